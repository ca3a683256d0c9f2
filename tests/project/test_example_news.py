"""The worked case of examples/news: the committed numbers agree with each other."""

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
