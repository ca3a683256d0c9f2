"""Print headings, tables and lines of text to the terminal, and format results as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth.words import encodable

__all__ = ["amount", "as_json", "console", "heading", "paragraph", "say", "show_table"]

_UNLIMITED = 10_000
_NARROWEST = 16  # characters of a wrapped column


def as_json(**described: Any) -> str:
    """Return a JSON object of the given values and howsmooth's version; NaN and infinity become null."""
    written = {"howsmooth": version("howsmooth"), **described}
    return json.dumps(_plain(written), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | Path):
        return encodable(str(value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console() -> Console:
    """Return a rich console. It breaks lines at the width of the terminal or of COLUMNS, but not in files."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNLIMITED)


def heading(words: str) -> None:
    """Print a line in bold."""
    console().print(Text(encodable(words), "bold"))


def paragraph(words: str) -> None:
    """Print text that is wrapped to the width of the terminal."""
    console().print(Text(encodable(words)))


def say(words: str) -> None:
    """Print a line without wrapping, because rich would break a long path in two."""
    print(encodable(words))


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] = (),
) -> None:
    """Print a table; columns in ``left`` or ``wrapped`` are aligned to the left, others to the right.

    If all names are blank, it has no header. Cells of columns in ``wrapped``, by default those in ``left``,
    are wrapped if the terminal is narrow. The others keep their width: a number that is cut off would be
    another number.
    """
    cells = [[Text(encodable(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    wraps = wrapped or left
    widths = [max(cell.cell_len for cell in one) for one in zip(map(Text, columns), *cells, strict=True)]
    header = any(name.strip() for name in columns)
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=header)
    for name, width in zip(columns, widths, strict=True):
        look: Any = {"justify": "left" if name in left or name in wrapped else "right", "overflow": "fold"}
        least = min(width, _NARROWEST) if name in wraps else width
        table.add_column(name, no_wrap=name not in wraps, min_width=least, **look)
    for row in cells:
        table.add_row(*row)
    terminal = console()
    needed = 2 * len(widths) + sum(column.min_width or 0 for column in table.columns)
    terminal.width = max(terminal.width, needed)
    terminal.print(Padding(table, (0, 0, 0, 2), expand=False))


def amount(log: float, digits: int = 5, *, upper: bool | None = None) -> str:
    """Format the number whose natural logarithm is ``log`` as text, even if the number itself overflows.

    With ``upper`` the number is an upper limit (True) or a lower one (False), and is rounded outwards.
    """
    from howsmooth.rounding import limit_in_digits

    def rounded(number: float) -> str:
        if upper is None:
            return f"{number:.{digits}g}"
        # The factor covers the rounding error of the exponential.
        return limit_in_digits(number * (1 + (1e-12 if upper else -1e-12)), digits, upper=upper)

    if log == -math.inf:
        return "0"
    if log == math.inf:
        return "inf"
    if abs(log) < 600:
        return rounded(math.exp(log))
    power = math.floor(log / math.log(10))
    if abs(power) > 1e6:
        return f"10^({rounded(log / math.log(10))})"
    return f"{rounded(math.exp(log - power * math.log(10)))}e{power:+d}"
