"""Write tables, figures and a report from a store of measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd

from howsmooth.errors import ArgumentError
from howsmooth.files import csv_of, replace_file, write_parquet, written_beside
from howsmooth.results.drawing import Figure, Picture
from howsmooth.results.result import Result
from howsmooth.study.exponents import compare, exponents
from howsmooth.study.figures import draw_all, overview
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.records import Contents, plain_rows
from howsmooth.study.report import render
from howsmooth.study.store import Store
from howsmooth.study.stored_tables import citations, measurement_table

__all__ = ["Outputs", "write_outputs"]


@dataclass(frozen=True, eq=False, repr=False)
class Outputs(Result):
    """The result of a study: the stored tables, the fitted exponents, and the written files. ``compared`` has
    the exponents of the published code's values, and is empty without such values.
    """

    NAME: ClassVar[str] = "report"
    TITLE: ClassVar[str] = "Exponents of local Lipschitz constants in the length"

    contents: Contents
    exponents: pd.DataFrame
    compared: pd.DataFrame
    pictures: list[Picture]
    report: Path
    parquet: tuple[Path, ...] = ()

    @property
    def table(self) -> pd.DataFrame:
        """The exponents, a row for each layer or head."""
        return self.exponents

    @property
    def citation(self) -> str:
        """Text to cite: a line for each model, scope and text."""
        return "\n".join(citations(self.contents, plain_rows(self.exponents)))

    def _tables(self) -> dict[str, pd.DataFrame]:
        return {"measurements": measurement_table(self.contents), "exponents": self.exponents}

    def plot(self) -> Figure:
        """Draw an overview of the first model: its constants against the length, with the fits."""
        return overview(self.contents.with_choices(self.contents.measurements), self.contents.kinds)

    def page(self, images: Mapping[str, str] | None = None) -> str:
        """Return the report as one HTML page, whose script draws the points when the page is opened."""
        return render(self.contents, self.exponents, self.compared, self.pictures)


def write_outputs(
    folder: str | os.PathLike[str],
    listener: Listener = SILENT,
    *,
    figures: str = "page",
    parquet: bool = False,
) -> Outputs:
    """Write ``measurements.csv``, ``exponents.csv`` and ``report.html`` beside a store.

    If the store has published values, also write ``published.csv`` and ``published-exponents.csv``. Draw one
    overview for each model into the folder ``figures``, as PNG and PDF; with ``figures="all"``, all overviews
    and a figure of each layer and head. With ``parquet``, also write ``measurements.parquet`` and
    ``exponents.parquet``, with the lines to cite in their metadata; without an engine of pandas for it,
    ArgumentError is raised. A store that cannot be read, or a file that cannot be written, raises StoreError.
    """
    if figures not in ("page", "all"):
        raise ArgumentError("figures", expected="one of page, all", got=repr(figures))
    folder = Path(folder)
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    rows = contents.with_choices(contents.measurements)
    table, compared = contents.with_choices(exponents(contents.measurements)), compare(contents.published)
    written = measurement_table(contents)
    paths = tuple(folder / f"{name}.parquet" for name in ("measurements", "exponents") if parquet)
    with written_beside(folder, "measurements"):
        few = figures != "all"
        pictures = draw_all(rows, folder / "figures", listener, contents.kinds, overviews=few)
        found = Outputs(contents, table, compared, pictures, folder / "report.html", paths)
        for path, each in zip(paths, (written, table), strict=False):
            write_parquet(each, path, found.citation)
        replace_file(folder / "measurements.csv", csv_of(written))
        replace_file(folder / "exponents.csv", csv_of(table))
        replace_file(found.report, found.page())
        if len(contents.published):
            replace_file(folder / "published.csv", csv_of(contents.published.drop(columns="run")))
            replace_file(folder / "published-exponents.csv", csv_of(compared))
    return found
