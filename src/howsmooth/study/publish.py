"""Tables, figures and the report of a store. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.exponents import exponents
from howsmooth.study.figures import Picture, draw_all
from howsmooth.study.report import render
from howsmooth.study.store import COLUMNS, Contents, Store

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

    """

    contents: Contents
    exponents: pd.DataFrame
    pictures: list[Picture]
    report: Path
    measurements: Path
    exponents_file: Path


def publish(folder: Path, on_figure: Callable[[int, int], None] = lambda done, total: None) -> Published:
    """Write ``measurements.csv``, ``exponents.csv``, ``figures/`` and ``report.html`` beside a store.

    Parameters
    ----------
    folder
        That holds the store.
    on_figure
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
        _replace(rows, contents.measurements[list(COLUMNS)].to_csv(index=False, lineterminator="\n"))
        fits = folder / "exponents.csv"
        _replace(fits, table.to_csv(index=False, lineterminator="\n"))
        pictures = draw_all(contents.measurements, folder / "figures", on_figure)
        page = folder / "report.html"
        _replace(page, render(contents, table, pictures))
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The measurements are kept in "
            f"{folder}; make it writable or make room, and run the same command again."
        ) from error
    return Published(contents, table, pictures, page, rows, fits)


def write_table(table: pd.DataFrame, folder: Path, name: str) -> Path:
    """Write a table as CSV into a folder, which is made if it is not there, and return the file.

    Raises
    ------
    StoreError
        If it cannot be written.

    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(path, table.to_csv(index=False, lineterminator="\n"))
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another --out."
        ) from error
    return path


def _replace(path: Path, content: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    # Lone surrogates can come from file names that are not UTF-8.
    partial.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
    partial.replace(path)
