"""Load the templates and styles that the HTML pages share, and compute their content digests."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import jinja2

__all__ = ["data_url", "digest", "png", "style_sheet", "templates_of"]

_BASE = Path(__file__).parent / "templates" / "page.css"


def templates_of(package: str) -> jinja2.Environment:
    """Return the Jinja environment for the templates of a package.

    It escapes values and refuses undefined variables.
    """
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style_sheet(own: str) -> str:
    """Return the shared style sheet followed by the rules of one page, which take precedence."""
    return _BASE.read_text(encoding="utf-8") + own


def digest(content: str) -> str:
    """Return the SHA-256 digest of a script or style in the format of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def png(figure: Any) -> bytes:
    """Return a matplotlib figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": "howsmooth"})
    return file.getvalue()


def data_url(image: bytes) -> str:
    """Return a PNG file as a URL that contains it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
