"""Tables, figures and the report of a store. Nothing here measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from howsmooth.study.exponents import exponents
from howsmooth.study.figures import Picture, draw_all, draw_published
from howsmooth.study.files import csv_of, replace_file, written_beside
from howsmooth.study.progress import SILENT, Listener
from howsmooth.study.published_rows import compare
from howsmooth.study.records import Contents
from howsmooth.study.report import render
from howsmooth.study.store import Store

__all__ = ["Published", "publish"]


@dataclass(frozen=True)
class Published:
    """What was written, and what it was written from.

    Attributes
    ----------
    contents
        Of the store, at the moment of writing.
    exponents
        As :func:`howsmooth.study.exponents.exponents`.
    compared
        Exponents of published and corrected quantities, as :func:`howsmooth.study.published_rows.compare`;
        without rows if none were measured.
    pictures
        The figures.
    report
        The page.

    """

    contents: Contents
    exponents: pd.DataFrame
    compared: pd.DataFrame
    pictures: list[Picture]
    report: Path


def publish(folder: Path, listener: Listener = SILENT) -> Published:
    """Write ``measurements.csv``, ``exponents.csv``, ``figures/`` and ``report.html`` beside a store.

    With published values in it also ``published.csv``, ``published-exponents.csv`` and their figures.

    Parameters
    ----------
    folder
        That holds the store.
    listener
        Told how many figures are drawn, of how many.

    Raises
    ------
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    table, compared = exponents(contents.measurements), compare(contents.published)
    with written_beside(folder, "measurements"):
        replace_file(folder / "measurements.csv", csv_of(contents.measurements.loc[:, "model":"seed"]))
        replace_file(folder / "exponents.csv", csv_of(table))
        pictures = draw_all(contents.measurements, folder / "figures", listener, contents.kinds)
        page = folder / "report.html"
        replace_file(page, render(contents, table, pictures))
        if len(contents.published):
            values = contents.published.drop(columns="run")
            replace_file(folder / "published.csv", csv_of(values))
            replace_file(folder / "published-exponents.csv", csv_of(compared))
            draw_published(values, compared, folder / "figures")
    return Published(contents, table, compared, pictures, page)
