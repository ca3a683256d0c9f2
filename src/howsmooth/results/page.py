"""Write HTML pages from one template, one style sheet, and parts such as tables and pictures.

A page is one file without references to others. Its content security policy names the digests of its style
sheet and of its script, so that a browser applies no other style and runs no other script, even if data
contain HTML.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from howsmooth.words import readable

__all__ = ["cell", "frame", "page", "parts", "plain_text", "style_of_parts", "templates"]


def templates(*packages: str) -> jinja2.Environment:
    """Return the page templates of all results; templates of the given ``packages`` take precedence."""
    loaders = [jinja2.PackageLoader(name) for name in (*packages, "howsmooth.results")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain_text, "digest": _digest}
    return environment


@cache
def parts() -> Any:
    """Return the macros of ``parts.html.jinja`` as functions, such as ``parts().table(columns, rows)``."""
    return templates().get_template("parts.html.jinja").module


def frame(table: pd.DataFrame, caption: str | Markup = "", *, label: str = "") -> Markup:
    """Return a table as the HTML of a page; its values are formatted by :func:`cell`."""
    columns = [(str(name), kind.kind in "iuf") for name, kind in table.dtypes.items()]
    rows = table.astype(object).map(cell).to_numpy().tolist()
    found: Markup = parts().table(columns, rows, caption, label)
    return found


def cell(value: Any) -> str:
    """Format a value of a table; numbers that are not whole have three digits, and a missing one is empty."""
    if pd.isna(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = ".0f" if value.is_integer() and abs(value) < 1e6 else ".3g"
        return f"{value:{digits}}".replace("inf", "∞").replace("-", "\N{MINUS SIGN}")
    return str(value)


def page(
    title: str,
    body: Sequence[str],
    *,
    style: str = "",
    script: str = "",
    data: Mapping[str, Markup] | None = None,
) -> str:
    """Join parts into one HTML page, and return it as text.

    ``style`` and ``script`` are those of this page alone; ``data`` are JSON that the script reads, by name.
    """
    own = templates().get_template("page.css").render() + style_of_parts() + style
    values: dict[str, Any] = {"title": title, "body": Markup("".join(body)), "style": own}
    return templates().get_template("page.html.jinja").render(values, script=script, data=data or {})


@cache
def style_of_parts() -> str:
    """Return the style sheet of a page's parts. It changes nothing else in a notebook."""
    return templates().get_template("parts.css").render()


def plain_text(value: object, longest: int = 300) -> str | Markup:
    """Return a name or text without control characters and shortened; return HTML unchanged."""
    return value if isinstance(value, Markup) else readable(str(value), longest)


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
