"""The units of figures: resumed, failed, counted and sent to workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from howsmooth.errors import ModelError, StoreError
from howsmooth.paper.figure_definition import FIGURES, Finding, PaperFigure, TasksLeft, tasks_left
from howsmooth.paper.figure_measurements import Bench, Unit, Values
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Failure, FigureRow
from howsmooth.study.runner import Runner
from howsmooth.study.store import Store
from howsmooth.study.tasks.task import Task, Work
from tests._figures import BERT, Told, asked, measured

LENGTHS = (4, 8, 16)


def one(n: int) -> Iterator[Values]:
    yield {"value": 0.1 + n, "log": float("inf"), "none": None, "names": ["a", "ü"]}
    yield {"value": -float(n)}


def figure(measure: Callable[[int], Any] = one, name: str = "made-up") -> PaperFigure:
    """A figure of a unit of two rows for each of three lengths."""

    def all_units(bench: Bench) -> pd.DataFrame:
        bench.made["Made"] = "up"
        return bench.kept([Unit({"n": n}, partial(measure, n), f"n = {n}") for n in LENGTHS])

    return PaperFigure(name, name, name, "About.", all_units, lambda found, folder: Finding([], []))


def test_after_an_interruption_only_missing_units_are_computed(tmp_path: Path) -> None:
    calls: list[int] = []

    def stopping(n: int) -> Iterator[Values]:
        calls.append(n)
        yield from one(n)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(figure(stopping), tmp_path, FigureOptions())
    rows = measured(figure(stopping), tmp_path, FigureOptions())
    assert calls == [4, 8, 8, 16]  # a unit is kept whole or not at all
    pd.testing.assert_frame_equal(rows, measured(figure(stopping), tmp_path, FigureOptions()))
    assert len(calls) == 4
    # Rows come back as they were.
    assert rows["n"].tolist() == [4, 4, 8, 8, 16, 16]
    assert rows["value"].tolist() == [4.1, -4.0, 8.1, -8.0, 16.1, -16.0]
    assert rows["log"][0] == float("inf")
    assert rows["none"].isna().all()
    assert rows["names"][0] == ["a", "ü"]
    with pytest.raises(StoreError, match=r"--seed 0, not 1\. Choose another --out, or repeat --seed 0"):
        measured(figure(), tmp_path, FigureOptions(seed=1))


def test_a_failed_unit_is_recorded_and_tried_again(tmp_path: Path) -> None:
    def failing(n: int) -> Iterator[Values]:
        if n == 8:
            raise ModelError("No such head.")
        yield from one(n)

    with pytest.raises(ModelError, match="No such head"):
        measured(figure(failing), tmp_path, FigureOptions())
    with Store.open(tmp_path, write=False) as store:
        ((failure, _),) = store.rows(Failure)
        assert store.count(FigureRow) == 2
    assert (failure.what, failure.error) == ("figure_rows", "No such head.")
    measured(figure(), tmp_path, FigureOptions())
    with Store.open(tmp_path, write=False) as store:
        assert not store.rows(Failure)


@pytest.mark.parametrize("one", FIGURES, ids=lambda one: one.name)
def test_tasks_travel_to_workers_and_are_as_many_as_were_counted(
    one: PaperFigure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Task] = []
    shares: list[int] = []
    carry_out = Runner.carry_out

    def noted(self: Runner, work: Work) -> None:
        sent.extend(pickle.loads(pickle.dumps(task.packed())) for task in work.tasks)
        assert [task.words for task in sent[-len(work.tasks) :]] == [task.words for task in work.tasks]
        shares.append(work.share)
        carry_out(self, work)

    monkeypatch.setattr(Runner, "carry_out", noted)
    options = asked(BERT, lengths=(6,), layers=Ranges.parse("1", "layers"), as_published=True, search=True)
    (before,) = tasks_left([one], options, tmp_path)
    measured(one, tmp_path / one.name, options, told=(told := Told()))
    assert sent
    # One count from 0 to 1 for all kinds of work, which never goes back.
    assert told.shares == sorted(told.shares)
    assert (told.shares[-1], told.phases) == (1, [])
    assert before.tasks == sum(shares)
    assert tasks_left([one], options, tmp_path) == [TasksLeft(one.name)]
