"""Follows every link and picture of the built pages to its file and anchor, and warns of those without.

Sphinx checks the references that it resolves itself, but not the addresses in finished HTML: of templates,
of raw HTML and of anchors in other pages. Addresses elsewhere are the task of ``sphinx-build -b linkcheck``;
but no page may fetch anything from there, since it can be read without a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.util import logging

logger = logging.getLogger(__name__)


class Page(HTMLParser):
    """Collects the anchors of a page and the addresses that it points to."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.addresses.add(value)
                if tag != "a" and urlsplit(value).netloc:
                    self.fetched.add(value)
            elif value and name == "srcset":
                self.addresses |= {part.split()[0] for part in value.split(",") if part.strip()}


def broken_links(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield page, address and what is wrong with it, for every page in a folder of HTML."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for address in sorted(page.fetched):
            yield path.relative_to(folder).as_posix(), address, "it would be fetched from elsewhere"
        for address in sorted(page.addresses):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            name = path.relative_to(folder).as_posix()
            if not target.is_file():
                yield name, address, "no such file"
            elif not target.is_relative_to(folder):
                yield name, address, "a file outside the site"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield name, address, "no such anchor"


def check(app: Any, exception: Exception | None) -> None:
    """Warn of every broken link; warnings are errors."""
    if exception is not None or app.builder.format != "html":
        return
    for page, address, reason in broken_links(Path(app.outdir).resolve()):
        logger.warning("%s: the link to %s is broken: %s", page, address, reason)


def setup(app: Any) -> dict[str, Any]:
    """Run after everything is written, before Sphinx counts its warnings."""
    app.connect("build-finished", check, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
