"""The printed form of a wide table: within 80 columns, with nothing lost without a word."""

from __future__ import annotations

import pandas as pd
import pytest

from howsmooth.printed_table import PrintedTable

TITLE = "a long title of a theorem in a paper, number "


@pytest.fixture
def wide() -> PrintedTable:
    columns = {f"number{k}": [k + 0.123456, k + 0.5, k + 0.25] for k in range(8)}
    texts = [f"{TITLE}{k} of one" for k in (1, 2, 1)]
    return PrintedTable(
        {
            "side": ["upper"] * 3,
            **columns,
            "head": [1, None, 2],
            "failure": None,
            "margin": 0.1234567,
            "source": texts,
        }
    )


def test_a_wide_table_is_printed_within_80_columns_and_names_what_it_leaves_out(wide: PrintedTable) -> None:
    lines = repr(wide).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:3] == ["number0", "number1", "number2"]
    assert lines[0].split()[-1] == "source"
    assert [line.split()[-1] for line in lines[1:4]] == ["[1]", "[2]", "[1]"]
    below = lines[4:]
    assert below[:2] == [f"source [1]: {TITLE}1 of one", f"source [2]: {TITLE}2 of one"]
    assert "In all rows: side upper, margin 0.123457" in below
    assert "Empty in all rows: failure" in below
    shown = set(lines[0].split())
    hidden = next(line for line in below if line.startswith("Not printed: ")).removeprefix("Not printed: ")
    assert set(hidden.split(", ")) == set(wide.columns) - shown - {"side", "failure", "margin"}


def test_many_texts_are_only_named(wide: PrintedTable) -> None:
    many = pd.concat([wide] * 9, ignore_index=True)
    many["source"] = [f"{TITLE}{k}" for k in range(len(many))]
    assert TITLE not in repr(many)
    assert "source" in next(line for line in repr(many).splitlines() if line.startswith("Not printed: "))


def test_what_fits_is_printed_as_by_pandas_and_slices_are_printed_alike(wide: PrintedTable) -> None:
    some = wide[["side", "head"]]
    assert repr(some) == repr(pd.DataFrame(some))
    assert max(map(len, repr(wide[wide["head"] == 1]).splitlines())) <= 80
    assert type(pd.DataFrame(wide)) is pd.DataFrame
    assert "\n[100 rows x 1 columns]" in repr(PrintedTable({"a": range(100)}))


def test_a_table_of_which_nothing_would_be_left_is_printed_as_pandas_does() -> None:
    table = PrintedTable({column: [f"{TITLE}{column} {row}" for row in range(25)] for column in (0, 1)})
    lines = repr(table).splitlines()
    assert lines[0].split() == ["0", "1"]
    assert [line.split()[0] for line in lines[1:]] == [str(row) for row in range(25)]
