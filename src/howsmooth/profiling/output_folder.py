"""Write what was found at one input into a folder: a page, its figure and its tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from howsmooth.study.figures.style import save
from howsmooth.study.file_writing import csv_of, replace_file, writable_folder
from howsmooth.study.html_assets import data_url

__all__ = ["write_result"]


def write_result(
    folder: str | os.PathLike[str],
    figure: Figure,
    title: str,
    tables: Mapping[str, pd.DataFrame],
    page: Callable[[str], str] | None = None,
) -> list[Path]:
    """Write a figure as PNG and PDF, tables as CSV, and a page if there is one, and return their paths.

    Parameters
    ----------
    folder
        The folder, which is created if needed.
    figure, title
        The figure, and the title in its metadata.
    tables
        The tables by the names of their files without ``.csv``; the first also names page and figure.
    page
        Function that returns the page's HTML for the figure as a data URL.

    Raises
    ------
    StoreError
        If the folder cannot be written.

    """
    stem = next(iter(tables))
    with writable_folder(folder) as folder:
        image, vector = save(figure, folder, stem, title)
        paths = [image, vector]
        if page is not None:
            paths.insert(0, folder / f"{stem}.html")
            replace_file(paths[0], page(data_url(image.read_bytes())))
        for name, table in tables.items():
            paths.append(folder / f"{name}.csv")
            replace_file(paths[-1], csv_of(table))
    return paths
