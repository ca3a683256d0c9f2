"""Tables of docs/evidence.md, each between ``<!-- table NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence.md"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose first line is its head."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def placed(page: str, made: Mapping[str, str]) -> str:
    """Return a page with each of the tables in its place."""
    for name, table in made.items():
        mark = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(mark, lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"The page has {count} places for the table {name}.")
    return page


def write(made: Mapping[str, str]) -> None:
    """Write tables into the page."""
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
