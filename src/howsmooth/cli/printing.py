"""How commands print: headings, tables and lines for people, JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth.study.names import encodable

__all__ = ["amount", "as_json", "counted", "heading", "paragraph", "say", "show_table"]


def as_json(**described: Any) -> str:
    """Write one JSON object, the version of the package first; what is no finite number is null."""
    written = {"howsmooth": version("howsmooth"), **described}
    return json.dumps(_plain(written), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Bring a value to what JSON has."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | Path):
        return encodable(str(value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def heading(words: str) -> None:
    """Print words in bold."""
    Console().print(Text(encodable(words), "bold"))


def paragraph(words: str) -> None:
    """Print words, broken into lines as the terminal needs."""
    Console().print(Text(encodable(words)))


def say(words: str) -> None:
    """Print a line as it is: rich would break a long path in two."""
    print(encodable(words))


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] = (),
) -> None:
    """Print a table.

    Parameters
    ----------
    columns
        Their names; without any, there is no header.
    rows
        The cells of each.
    left
        Columns that begin at the left; all others end at the right.
    wrapped
        Columns that begin at the left and are broken into lines.

    """
    header = any(name.strip() for name in columns)
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=header)
    for name in columns:
        begins = name in left or name in wrapped
        table.add_column(
            name, justify="left" if begins else "right", no_wrap=name not in wrapped, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(encodable(cell)) if isinstance(cell, str) else cell for cell in row))
    Console().print(Padding(table, (0, 0, 0, 2), expand=False))


def counted(number: int, what: str) -> str:
    """Write a number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def amount(log: float, digits: int = 5) -> str:
    """Write the number with this natural logarithm, however large."""
    if log == -math.inf:
        return "0"
    if log == math.inf:
        return "inf"
    if abs(log) < 600:
        return f"{math.exp(log):.{digits}g}"
    power = math.floor(log / math.log(10))
    return f"{math.exp(log - power * math.log(10)):.{digits}g}e{power:+d}"
