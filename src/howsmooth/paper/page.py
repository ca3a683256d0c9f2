"""The page that puts all pictures together, with what is seen and how it was made; nothing here measures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from howsmooth.paper.figure import Figure, Finding
from howsmooth.study.names import readable
from howsmooth.study.pages import digest, style_sheet, templates_of

__all__ = ["PAGE", "render", "section"]

PAGE = "reproduce.html"
"""The name of the page's file."""

_ROWS_SHOWN = 12
_MOST_ROWS = 300


def render(sections: Sequence[tuple[Figure, str]], command: str, environment: Mapping[str, str]) -> str:
    """Write the page.

    Parameters
    ----------
    sections
        In the order of the page: a figure, and what :func:`section` gave for it.
    command
        That made it.
    environment
        As :func:`howsmooth.study.environment.environment`.

    Returns
    -------
    str
        HTML that needs nothing outside; its links lead to the PDF and CSV files beside it.

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


def section(figure: Figure, finding: Finding, folder: Path, refused: str = "") -> str:
    """Write a figure's section of the page.

    Parameters
    ----------
    figure, finding
        What was asked, and what was found.
    folder
        Where the page will lie: links to files within it are relative.
    refused
        Why the figure could not be made, in a sentence; empty if it was.

    """
    return _template("section.html.jinja").render(
        figure=figure,
        finding=finding,
        refused=refused,
        images=[
            {
                "source": f"data:image/png;base64,{base64.b64encode(picture.png.read_bytes()).decode()}",
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
                # Thousands of rows would make the page heavy, and are for a program.
                **_cells(table if len(table) <= _MOST_ROWS else table.head(0)),
                "file": f"{figure.name}/table-{number}.csv",
            }
            for number, (caption, table) in enumerate(finding.tables, 1)
        ],
    )


def _template(name: str) -> jinja2.Template:
    templates = templates_of("howsmooth.paper")
    templates.filters["plain"] = _plain
    return templates.get_template(name)


def _cells(table: pd.DataFrame) -> dict[str, Any]:
    numeric = [kind.kind in "iuf" for kind in table.dtypes]
    rows = table.astype(object).map(_cell).itertuples(index=False, name=None)
    return {
        "columns": list(zip(table.columns, numeric, strict=True)),
        "rows": [list(zip(row, numeric, strict=True)) for row in rows],
    }


def _cell(value: Any) -> str:
    """Write a value in as many digits as a reader can use; what is missing as nothing."""
    if pd.isna(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = ".0f" if value.is_integer() and abs(value) < 1e6 else ".3g"
        return f"{value:{digits}}".replace("inf", "∞").replace("-", "\N{MINUS SIGN}")
    return str(value)


def _plain(value: object, longest: int = 300) -> str:
    """Names and sentences as they can be shown: no control or direction characters, not endless."""
    return readable(str(value), longest=longest)
