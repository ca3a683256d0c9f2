"""The keys of ``--json`` as ``docs/reference/cli.md`` describes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"


def check_documented(command: str, said: dict[str, Any]) -> None:
    """Compare a JSON object with the section of its command: its keys, and those of objects within it.

    What lies in an object or in rows is compared if the table names keys of it.
    """
    (section,) = re.findall(
        rf"^### JSON of {re.escape(command)}$(.*?)(?=^#|\Z)", PAGE.read_text("utf-8"), re.S | re.M
    )
    also, _, table = section.partition("| key |")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    keys = set(_code(also)) | {key for row in rows for key in _code(row[1])}
    needed = {key for key in keys if not key.endswith("?")}
    assert needed <= said.keys() - {"howsmooth"} <= {key.rstrip("?") for key in keys}
    for row in rows:
        within = said.get(_code(row[1])[0].rstrip("?"))
        named = {key for key in _code(row[3]) if not key.startswith("--")}
        if named and within and row[2].split()[0] in ("rows", "object"):
            assert named == _keys(within), row[1]


def _code(words: str) -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"\{\w+\}`[^`]*`", "", words))  # without links


def _keys(value: Any) -> set[str]:
    """Return all keys in a value; the rows of a table of a figure have columns of their own."""
    if isinstance(value, dict):
        return value.keys() | {key for name, one in value.items() if name != "rows" for key in _keys(one)}
    return {key for one in value for key in _keys(one)} if isinstance(value, list) else set()
