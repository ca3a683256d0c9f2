"""The worked case of examples/news: the committed numbers agree with each other and with the page."""

from __future__ import annotations

import json

import pytest
from examples.news import page
from examples.news.data import HELD_OUT, LONGEST

DONE = json.loads((page.HERE / "radii.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("form", page.FORMS)
def test_every_proved_radius_lies_below_the_attack(form: str) -> None:
    rows = DONE[form]
    assert len(rows) == HELD_OUT
    assert set(rows) <= {str(index) for index in range(HELD_OUT)}
    for row in rows.values():
        assert 0 <= row["token"] < row["tokens"] <= LONGEST
        assert len(row["constants"]) == 3
        if row["right"]:
            assert 0 < row["radius"] < row["attack"]
            assert len(row["losses"]) in (13, 14)  # the last is that of rounding
            assert 0 < sum(row["losses"].values()) < row["margin"]
        else:
            assert row["radius"] == row["attack"] == 0


def test_both_forms_have_the_same_headlines() -> None:
    plain, penalised = page.results().values()
    assert [row["tokens"] for row in plain] == [row["tokens"] for row in penalised]
    assert len(plain) == len(DONE["penalised"])


def test_the_page_has_the_tables_of_the_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text) == text
