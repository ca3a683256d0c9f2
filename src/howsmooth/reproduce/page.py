"""The page that puts all pictures together, with what is seen and how it was made; nothing here measures."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from howsmooth.reproduce.finding import Finding
from howsmooth.study.names import readable
from howsmooth.study.pages import digest, style_sheet, templates_of

__all__ = ["PAGE", "Section", "render", "table_name"]

PAGE = "reproduce.html"
"""The name of the page's file."""

_ROWS_SHOWN = 12
_MOST_ROWS = 300
_DOTS_AN_INCH = 220  # of the pictures
_PIXELS_AN_INCH = 110  # a little larger than on paper, where there is room


@dataclass(frozen=True, eq=False)
class Section:
    """An experiment on the page.

    Attributes
    ----------
    name, title, paper, about
        Those of the experiment.
    finding
        What it found; None if it could not be made.
    refused
        Why not, in a sentence.

    """

    name: str
    title: str
    paper: str
    about: str
    finding: Finding | None
    refused: str = ""


def table_name(number: int) -> str:
    """Return the file name of a section's table, counted from 0."""
    return f"table-{number + 1}.csv"


def render(folder: Path, sections: Sequence[Section], command: str, environment: Mapping[str, str]) -> str:
    """Write the page.

    Parameters
    ----------
    folder
        Where the page will lie: links to files within it are relative.
    sections
        In the order of the page.
    command
        That made it.
    environment
        As :func:`howsmooth.study.environment.environment`.

    Returns
    -------
    str
        HTML that needs nothing outside; its links lead to the PDF and CSV files in ``folder``.

    """
    templates = templates_of("howsmooth.reproduce")
    templates.filters["plain"] = _plain
    own = files("howsmooth.reproduce").joinpath("templates/reproduce.css").read_text(encoding="utf-8")
    style = style_sheet(own)
    return templates.get_template("reproduce.html.jinja").render(
        style=style,
        style_digest=digest(style),
        sections=[_section(one, folder) for one in sections],
        command=command,
        environment=list(environment.items()),
    )


def _section(section: Section, folder: Path) -> dict[str, Any]:
    finding = section.finding or Finding([], [])
    return {
        "name": section.name,
        "title": section.title,
        "paper": section.paper,
        "about": section.about,
        "refused": section.refused,
        "seen": finding.seen,
        "made": finding.made,
        "images": [
            {
                "source": f"data:image/png;base64,{base64.b64encode(png).decode()}",
                "alt": picture.alt,
                "caption": picture.caption,
                "width": round(_width(png) * _PIXELS_AN_INCH / _DOTS_AN_INCH),
                **_link(picture.pdf, folder),
            }
            for picture in finding.pictures
            for png in (picture.png.read_bytes(),)
        ],
        "tables": [
            {
                "caption": caption,
                "open": len(table) <= _ROWS_SHOWN,
                "count": len(table),
                # Thousands of rows would make the page heavy, and are for a program.
                **_cells(table if len(table) <= _MOST_ROWS else table.head(0)),
                **_link(folder / section.name / table_name(number), folder),
            }
            for number, (caption, table) in enumerate(finding.tables)
        ],
    }


def _link(path: Path, folder: Path) -> dict[str, str]:
    inside = path.relative_to(folder).as_posix()
    return {"file": inside, "href": quote(inside)}


def _width(png: bytes) -> int:
    """Read the width in pixels from a PNG's header."""
    return int(struct.unpack(">I", png[16:20])[0])


def _cells(table: pd.DataFrame) -> dict[str, Any]:
    numeric = [
        pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in table.dtypes
    ]
    rows = [
        [(_cell(value), number) for value, number in zip(row, numeric, strict=True)]
        for row in table.astype(object).itertuples(index=False, name=None)
    ]
    return {"columns": list(zip(map(str, table.columns), numeric, strict=True)), "rows": rows}


def _cell(value: object) -> str:
    """Write a value in as many digits as a reader can use; what is missing as nothing."""
    if value is None or value is pd.NA:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        if math.isinf(value):
            return "∞" if value > 0 else "\N{MINUS SIGN}∞"
        if value == round(value) and abs(value) < 1e6:
            return f"{value:.0f}".replace("-", "\N{MINUS SIGN}")
        return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
    return str(value)


def _plain(value: object, longest: int = 300) -> str:
    """Names and sentences as they can be shown: no control or direction characters, not endless."""
    return readable(str(value), longest=longest)
