"""Show the radii of a text's tokens: a figure, a page for the browser, and a fragment of it for notebooks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from howsmooth.profiling.output_folder import write_result
from howsmooth.profiling.word_radii import WordRadii
from howsmooth.roundoff import limit_in_digits
from howsmooth.study.figures.style import STYLE, literal, new_figure
from howsmooth.study.html_assets import data_url, digest, png, style_sheet, templates_of
from howsmooth.study.records import plain_rows
from howsmooth.study.report.chart_data import visible_token

__all__ = ["draw", "fragment", "write"]

_LEVELS = 9  # shades of a highlighted token


def draw(found: WordRadii) -> Figure:
    """Draw the radius of each token on a logarithmic axis, with the smallest attack that was found."""
    table = found.table
    with rc_context(STYLE):
        figure = new_figure(max(3.6, 1.6 + 0.24 * len(table)), 3.0)
        axis = figure.subplots()
        axis.plot(range(len(table)), table["radius"], "o", label="proved")
        attack = table["attack"].astype(float)
        if bool(attack.notna().any()):
            axis.plot(range(len(table)), attack, "v", mfc="none", label="smallest attack found")
        axis.set_yscale("log")
        axis.set_xticks(range(len(table)), [literal(name) for name in _names(found)], rotation=90)
        axis.set_ylabel("radius")
        axis.legend()
        axis.set_title(literal(found.model))
        return figure


def write(found: WordRadii, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the page, the figure and the table of a text's radii into a folder, and return their paths.

    Raises
    ------
    StoreError
        If the folder cannot be written.

    """
    style = style_sheet(_template("profile.css").render())

    def page(image: str) -> str:
        rendered: str = _template("radius.html.jinja").render(
            found=found, style=Markup(style), style_digest=digest(style), body=_body(found, image)
        )
        return rendered

    return write_result(folder, found.plot(), found.model, {"radius": found.table}, page)


def fragment(found: WordRadii) -> str:
    """Return the text with its tokens coloured by radius, and the figure, as HTML for notebooks."""
    style = _template("profile.css").render()
    return f'<div class="howsmooth"><style>{style}</style>{_body(found, data_url(png(found.plot())))}</div>'


def _template(name: str) -> Any:
    return templates_of("howsmooth.profiling").get_template(name)


def _names(found: WordRadii) -> list[str]:
    if found.jointly:
        return ["all tokens"]
    return [visible_token(word) for word in found.words] or [str(i) for i in range(found.n)]


def _body(found: WordRadii, image: str) -> Markup:
    rows = plain_rows(found.table)
    smallest = min(row["radius"] for row in rows)
    spans = []
    for row, word in zip(rows, _names(found), strict=True):
        shade = _LEVELS if row["radius"] == 0 else round(_LEVELS * smallest / row["radius"])
        spans.append((shade, f"{word} ", limit_in_digits(row["radius"], 3, upper=False)))
    cells = [
        {
            "word": word,
            "radius": limit_in_digits(row["radius"], 4, upper=False),
            "attack": _number(row["attack"]),
            "first_order": _number(row["first_order"]),
            "order": row["order"],
            "lost_at": row["lost_at"],
        }
        for row, word in zip(rows, _names(found), strict=True)
    ]
    return Markup(
        _template("radius_body.html.jinja").render(found=found, image=image, spans=spans, rows=cells)
    )


def _number(value: float | None) -> str:
    return "none" if value is None or math.isinf(value) else f"{value:.4g}"
