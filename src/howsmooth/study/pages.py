"""What the pages of the program have in common: their templates, the base of their style, and digests."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import jinja2

__all__ = ["digest", "style_sheet", "templates_of"]

_BASE = Path(__file__).parent / "templates" / "page.css"


def templates_of(package: str) -> jinja2.Environment:
    """Read the templates of a package; what is put into them is escaped, and must be there."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style_sheet(own: str) -> str:
    """Put a page's own rules behind those of all pages, so that they prevail."""
    return _BASE.read_text(encoding="utf-8") + own


def digest(content: str) -> str:
    """Write the digest by which a content security policy names an element's content."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
