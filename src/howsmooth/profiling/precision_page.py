"""Write the result of ``precision`` as one HTML page, a figure and a table."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from markupsafe import Markup

from howsmooth.errors import StoreError
from howsmooth.profiling.precision_result import Precision
from howsmooth.study.html_pages import data_url, digest, png, style_sheet, templates_of
from howsmooth.study.output_files import csv_of, replace_file
from howsmooth.study.records import plain_rows

__all__ = ["write"]

_ON_PAGE = 60  # rows of the ranking; precision.csv has all
_NUMBERS = ("predicted", "change", "bound", "predicted_kl", "kl")


def write(found: Precision, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the page, the figure and the table into a folder, and return their paths.

    Raises
    ------
    StoreError
        If the folder cannot be written.

    """
    folder = Path(folder)
    figure = found.plot()
    names = ("precision.html", "precision.png", "precision.pdf", "precision.csv")
    page, image, vector, table = paths = [folder / name for name in names]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = png(figure)
        replace_file(page, _rendered(found, data_url(drawn)))
        image.write_bytes(drawn)
        figure.savefig(vector, metadata={"Creator": "howsmooth", "CreationDate": None})
        replace_file(table, csv_of(found.table))
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another --out."
        ) from error
    return paths


def _rendered(found: Precision, image: str) -> str:
    ranking = found.ranking.head(_ON_PAGE)
    if not found.has_kl:
        ranking = ranking.drop(columns=["predicted_kl", "kl"])
    rows = [
        row | {name: f"{row[name]:.4g}" for name in _NUMBERS if name in row}
        for row in plain_rows(ranking.drop(columns=["output_norm", "name"]))
    ]
    agreement = [row | {"spearman": f"{row['spearman']:.3f}"} for row in plain_rows(found.agreement)]
    style = style_sheet("")
    page: str = (
        templates_of("howsmooth.profiling")
        .get_template("precision.html.jinja")
        .render(
            found=found,
            style=Markup(style),
            style_digest=digest(style),
            image=image,
            agreement=agreement,
            columns=list(rows[0]),
            rows=rows,
            shown=len(rows),
            total=len(found.table),
            version=version("howsmooth"),
        )
    )
    return page
