"""Tables, figures and the report of a store. Nothing here measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.exponents import exponents
from howsmooth.study.figures import Picture, draw_all
from howsmooth.study.files import replace_file, write_table
from howsmooth.study.progress import Listener, Silent
from howsmooth.study.published_tables import PublishedComparison, write_comparison
from howsmooth.study.records import COLUMNS, Contents
from howsmooth.study.report import render
from howsmooth.study.store import Store

__all__ = ["Published", "publish", "write_table"]


@dataclass(frozen=True)
class Published:
    """What was written, and what it was written from.

    Attributes
    ----------
    contents
        Of the store, at the moment of writing.
    exponents
        As :func:`howsmooth.study.exponents.exponents`.
    pictures
        The figures.
    report, measurements, exponents_file
        The other files.
    comparison
        Of the published with the corrected quantities; ``None`` if there are none.

    """

    contents: Contents
    exponents: pd.DataFrame
    pictures: list[Picture]
    report: Path
    measurements: Path
    exponents_file: Path
    comparison: PublishedComparison | None


def publish(folder: Path, listener: Listener | None = None) -> Published:
    """Write ``measurements.csv``, ``exponents.csv``, ``figures/`` and ``report.html`` beside a store.

    With published values in it also what :func:`~howsmooth.study.published_tables.write_comparison` writes.

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
    table = exponents(contents.measurements)
    try:
        rows = folder / "measurements.csv"
        replace_file(rows, contents.measurements[list(COLUMNS)].to_csv(index=False, lineterminator="\n"))
        fits = folder / "exponents.csv"
        replace_file(fits, table.to_csv(index=False, lineterminator="\n"))
        kinds = dict(contents.texts[["name", "kind"]].itertuples(index=False, name=None))
        pictures = draw_all(contents.measurements, folder / "figures", listener or Silent(), kinds)
        page = folder / "report.html"
        replace_file(page, render(contents, table, pictures))
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The measurements are kept in "
            f"{folder}; make it writable or make room, and run the same command again."
        ) from error
    comparison = None if contents.published.empty else write_comparison(contents.published, folder)
    return Published(contents, table, pictures, page, rows, fits, comparison)
