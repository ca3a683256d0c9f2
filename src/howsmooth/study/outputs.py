"""Write the tables, the figures and the report of a store of measurements. Nothing here measures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from howsmooth.study.exponents import exponents
from howsmooth.study.figures import Picture, draw_all, draw_published
from howsmooth.study.output_files import csv_of, replace_file, written_beside
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.published_values import compare
from howsmooth.study.records import Contents
from howsmooth.study.report import render
from howsmooth.study.store import Store

__all__ = ["Outputs", "write_outputs"]


@dataclass(frozen=True)
class Outputs:
    """The files written by :func:`write_outputs`, and the tables in them.

    Attributes
    ----------
    contents
        The contents of the store at the time of writing.
    exponents
        The result of :func:`howsmooth.study.exponents.exponents`.
    compared
        The exponents of published and corrected quantities, from
        :func:`howsmooth.study.published_values.compare`; empty if the store has no published values.
    pictures
        The figures.
    report
        The path of the report.

    """

    contents: Contents
    exponents: pd.DataFrame
    compared: pd.DataFrame
    pictures: list[Picture]
    report: Path


def write_outputs(
    folder: str | os.PathLike[str], listener: Listener = SILENT, *, figures: bool = True
) -> Outputs:
    """Write ``measurements.csv``, ``exponents.csv``, ``figures/`` and ``report.html`` beside a store.

    If the store has published values, also write ``published.csv``, ``published-exponents.csv`` and their
    figures.

    Parameters
    ----------
    folder
        The folder with the store.
    listener
        The listener that is told how many figures are drawn.
    figures
        Whether to draw figures; otherwise the report is without them.

    Raises
    ------
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    folder = Path(folder)
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    table, compared = exponents(contents.measurements), compare(contents.published)
    with written_beside(folder, "measurements"):
        replace_file(folder / "measurements.csv", csv_of(_rows(contents)))
        replace_file(folder / "exponents.csv", csv_of(table))
        pictures = []
        if figures:
            pictures = draw_all(contents.measurements, folder / "figures", listener, contents.kinds)
        page = folder / "report.html"
        replace_file(page, render(contents, table, pictures))
        if len(contents.published):
            values = contents.published.drop(columns="run")
            replace_file(folder / "published.csv", csv_of(values))
            replace_file(folder / "published-exponents.csv", csv_of(compared))
            if figures:
                draw_published(values, compared, folder / "figures")
    return Outputs(contents, table, compared, pictures, page)


def _rows(contents: Contents) -> pd.DataFrame:
    """Return the rows of ``measurements.csv``, with the precision of the weights and of the computation."""
    rows = contents.measurements
    stored = contents.models.set_index("label")["stored"]
    return rows.loc[:, "model":"seed"].assign(stored=rows["model"].map(stored), computed=rows["dtype"])
