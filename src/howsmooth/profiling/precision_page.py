"""Write the result of ``precision`` as one HTML page, a figure and a table."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from markupsafe import Markup

from howsmooth.profiling.output_folder import write_result
from howsmooth.profiling.precision_result import Precision
from howsmooth.study.html_assets import digest, style_sheet, templates_of
from howsmooth.study.records import plain_rows

__all__ = ["write"]

_ON_PAGE = 60  # rows of the ranking; precision.csv has all


def write(found: Precision, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the page, figure and table of quantised keys and values into a folder; return their paths.

    Raises
    ------
    StoreError
        If the folder cannot be written.

    """
    tables = {"precision": found.table}
    return write_result(folder, found.plot(), found.model, tables, lambda image: _rendered(found, image))


def _rendered(found: Precision, image: str) -> str:
    rows = plain_rows(found.first_rows(_ON_PAGE))
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
