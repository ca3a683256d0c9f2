"""Write the tables, the figures and the report of a store of measurements. Nothing is measured here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from howsmooth.files import csv_of, replace_file, write_parquet, written_beside
from howsmooth.study.exponents import compare, exponents
from howsmooth.study.figures import Picture, draw_all
from howsmooth.study.options import choice
from howsmooth.study.plans import FIGURES
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.records import Contents, plain_rows
from howsmooth.study.report.page import render
from howsmooth.study.store import Store
from howsmooth.study.stored_tables import citations, measurement_table

__all__ = ["Outputs", "write_outputs"]


@dataclass(frozen=True)
class Outputs:
    """The files written by :func:`write_outputs`, and the tables in them.

    ``contents`` has the tables of the store at the time of writing. ``exponents`` comes from
    :func:`howsmooth.study.exponents.exponents`; ``compared`` from :func:`howsmooth.study.exponents.compare`,
    and is empty if the store has no published values. ``parquet`` has the paths of the tables in parquet.
    """

    contents: Contents
    exponents: pd.DataFrame
    compared: pd.DataFrame
    pictures: list[Picture]
    report: Path
    parquet: tuple[Path, ...] = ()


def write_outputs(
    folder: str | os.PathLike[str],
    listener: Listener = SILENT,
    *,
    figures: str = "page",
    parquet: bool = False,
) -> Outputs:
    """Write ``measurements.csv``, ``exponents.csv`` and ``report.html`` beside a store.

    If the store has published values, also write ``published.csv`` and ``published-exponents.csv``. Draw one
    overview for each model into the folder ``figures``, as PNG and PDF, and show it in the report, which also
    draws all points when it is opened; with ``figures="all"``, draw all overviews and a figure of each layer
    and head. With ``parquet``, also write ``measurements.parquet`` and ``exponents.parquet``, with the lines
    to cite in their metadata.

    Raises
    ------
    ArgumentError
        If ``figures`` is not one of :data:`howsmooth.study.plans.FIGURES`, or ``parquet`` is asked for and
        pandas has no engine for it.
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    choice(*FIGURES).read("figures", figures)
    folder = Path(folder)
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    rows = contents.measurements
    table, compared = contents.with_choices(exponents(rows)), compare(contents.published)
    written = measurement_table(contents)
    tables = {"measurements": written, "exponents": table} if parquet else {}
    in_parquet = tuple(folder / f"{name}.parquet" for name in tables)
    with written_beside(folder, "measurements"):
        for path, each in zip(in_parquet, tables.values(), strict=True):
            write_parquet(each, path, "\n".join(citations(contents, plain_rows(table))))
        replace_file(folder / "measurements.csv", csv_of(written))
        replace_file(folder / "exponents.csv", csv_of(table))
        chosen = contents.with_choices(rows)
        few = figures != "all"
        pictures = draw_all(chosen, folder / "figures", listener, contents.kinds, overviews=few)
        page = folder / "report.html"
        replace_file(page, render(contents, table, compared, pictures))
        if len(contents.published):
            values = contents.published.drop(columns="run")
            replace_file(folder / "published.csv", csv_of(values))
            replace_file(folder / "published-exponents.csv", csv_of(compared))
    return Outputs(contents, table, compared, pictures, page, in_parquet)
