"""Write the HTML page that shows all figures, their results, and how the results were made.

Nothing in this module measures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
import pandas as pd

from howsmooth.paper.figure_definition import Figure, Finding
from howsmooth.study.html_assets import data_url, digest, style_sheet, templates_of
from howsmooth.study.text_formatting import readable

__all__ = ["PAGE", "render", "section"]

PAGE = "reproduce.html"
"""The file name of the page."""

_ROWS_SHOWN = 12
_MOST_ROWS = 300


def render(sections: Sequence[tuple[Figure, str]], command: str, environment: Mapping[str, str]) -> str:
    """Return the page of all figures as a single HTML file, which links to PDF and CSV files in the same
    folder.

    ``sections`` is a list of pairs of a figure and the HTML of its section, in the order of the page.
    ``command`` is the command that the user typed, and ``environment`` describes the software and hardware,
    as :func:`howsmooth.study.environment.environment` returns it.
    """
    own = files("howsmooth.paper").joinpath("templates/reproduce.css").read_text(encoding="utf-8")
    style = style_sheet(own)
    return _template("reproduce.html.jinja").render(
        style=style,
        style_digest=digest(style),
        sections=sections,
        command=command,
        environment=list(environment.items()),
    )


def section(figure: Figure, finding: Finding, folder: str | os.PathLike[str], refused: str = "") -> str:
    """Return the HTML of the page's section on one figure.

    Links are relative to ``folder``, in which the page is written. ``refused`` is the reason why the figure
    could not be made, and is empty if it was made.
    """
    return _template("section.html.jinja").render(
        figure=figure,
        finding=finding,
        refused=refused,
        images=[
            {
                "source": data_url(picture.png.read_bytes()),
                "drawn": picture,
                "file": picture.pdf.relative_to(folder).as_posix(),
            }
            for picture in finding.pictures
        ],
        tables=[
            {
                "caption": caption,
                "open": len(table) <= _ROWS_SHOWN,
                "count": len(table),
                # Leave large tables out of the page; the CSV file has them.
                **_cells(table if len(table) <= _MOST_ROWS else table.head(0)),
                "file": f"{figure.name}/table-{number}.csv",
            }
            for number, (caption, table) in enumerate(finding.tables, 1)
        ],
    )


def _template(name: str) -> jinja2.Template:
    templates = templates_of("howsmooth.paper")
    templates.filters["plain"] = lambda value, longest=300: readable(str(value), longest)
    return templates.get_template(name)


def _cells(table: pd.DataFrame) -> dict[str, Any]:
    numeric = [kind.kind in "iuf" for kind in table.dtypes]
    rows = table.astype(object).map(_cell).itertuples(index=False, name=None)
    return {
        "columns": list(zip(table.columns, numeric, strict=True)),
        "rows": [list(zip(row, numeric, strict=True)) for row in rows],
    }


def _cell(value: Any) -> str:
    """Format a value; numbers that are not whole have three digits, and a missing one is empty."""
    if pd.isna(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = ".0f" if value.is_integer() and abs(value) < 1e6 else ".3g"
        return f"{value:{digits}}".replace("inf", "∞").replace("-", "\N{MINUS SIGN}")
    return str(value)
