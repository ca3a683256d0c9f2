"""The class ``PrintedTable``: a pandas DataFrame that is printed within 80 columns, with a list of the
columns that did not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import fill
from typing import Any

import pandas as pd

__all__ = ["PrintedTable"]

_WIDTH = 80
_LONG = 32  # characters of a cell from which the texts of a column are listed below the rows
_MOST_TEXTS = 20


class PrintedTable(pd.DataFrame):
    """A pandas DataFrame that is printed within 80 columns. Columns that do not fit are named below the rows.

    If the rows are too wide, a column that has the same value in all rows, or no value in any row, is printed
    below the rows instead. If a column contains at most 20 different long texts, such as titles, the texts
    are numbered, and listed below the rows. Other columns that do not fit are only named. The table itself
    contains all columns; ``pandas.DataFrame(table)`` is printed as pandas prints a table.
    """

    @property
    def _constructor(self) -> Callable[..., PrintedTable]:
        return PrintedTable

    def __repr__(self) -> str:
        rows = pd.DataFrame(self)
        if _widest(words := _printed(rows)) <= _WIDTH or self.empty:
            return words
        same, empty, texts, numbered, hidden = [], [], [], [], []
        for name in rows.columns:
            column = [_cell(value) for value in rows[name]]
            different = list(dict.fromkeys(column))
            if different == [""]:
                empty.append(str(name))
            elif len(rows) > 1 and len(different) == 1:
                same.append(f"{name} {different[0]}")
            elif max(map(len, different)) <= _LONG:
                continue
            elif len(different) <= _MOST_TEXTS:
                numbers = {text: f"[{number}]" for number, text in enumerate(different, 1)}
                texts += [f"{name} {number}: {text}" for text, number in numbers.items()]
                rows[name] = [numbers[text] for text in column]
                numbered.append(name)
                continue
            else:
                hidden.append(str(name))
            rows = rows.drop(columns=name)
        for name in rows.columns[:0:-1]:
            if _widest(_printed(rows)) <= _WIDTH:
                break
            if name not in numbered:
                hidden.append(str(name))
                rows = rows.drop(columns=name)
        if rows.columns.empty:
            return words
        words, left = _printed(rows), [str(name) for name in self.columns if str(name) in hidden]
        below = [f"In all rows: {', '.join(same)}"] if same else []
        below += [f"Not printed: {', '.join(left)}"] if left else []
        below += [f"Empty in all rows: {', '.join(empty)}"] if empty else []
        return "\n".join([words, *(fill(line, _WIDTH, subsequent_indent="    ") for line in texts + below)])


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or value != value or value == "":
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _printed(rows: pd.DataFrame) -> str:
    most, least = pd.get_option("display.max_rows"), pd.get_option("display.min_rows")
    return rows.to_string(max_rows=most, min_rows=least, show_dimensions=bool(most and len(rows) > most))


def _widest(words: str) -> int:
    return max(map(len, words.splitlines()), default=0)
