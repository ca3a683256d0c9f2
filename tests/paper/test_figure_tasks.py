"""The tasks of figures: resumed, damaged, failed, sent to workers and timed."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from howsmooth.errors import HowsmoothError, ModelError, StoreError
from howsmooth.paper import end_of_sqrt_n_growth as crossover
from howsmooth.paper import reproduction
from howsmooth.paper.figure_definition import Figure, FigureContext, FigurePlan, Finding, models_for
from howsmooth.paper.figure_tasks import UnitTask, Values
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Failure, FigureRow
from howsmooth.study.runner import Means
from howsmooth.study.store import STORE_NAME, Store
from tests._figures import BERT, asked, measured, tiny_library

COSTS = {4: 0.5, 8: 1.0, 16: 4.0}


def one(n: int) -> Iterator[Values]:
    yield {"value": 0.1 + n, "log": float("inf"), "none": None, "names": ["a", "ü"]}
    yield {"value": -float(n)}


def figure(measure: Callable[[int], Any] = one, name: str = "made-up") -> Figure:
    """A figure of a unit of two rows for each of three lengths."""

    def plan(context: FigureContext) -> FigurePlan:
        context.made["Made"] = "up"
        tasks = [UnitTask({"n": n}, partial(measure, n), f"n = {n}", n=n) for n in COSTS]
        return context.units(tasks, "units")

    return Figure(name, name, name, "About.", plan, lambda found, folder: Finding([], []))


def test_rows_come_back_as_they_were_under_their_key(tmp_path: Path) -> None:
    rows = measured(figure(), tmp_path, FigureOptions())
    assert rows["n"].tolist() == [4, 4, 8, 8, 16, 16]
    assert rows["value"].tolist() == [4.1, -4.0, 8.1, -8.0, 16.1, -16.0]
    assert rows["log"][0] == float("inf")
    assert rows["none"].isna().all()
    assert rows["names"][0] == ["a", "ü"]


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


@pytest.mark.parametrize("column", ["numbers", "unit"])
def test_damage_is_refused(tmp_path: Path, column: str) -> None:
    measured(figure(), tmp_path, FigureOptions())
    with closing(sqlite3.connect(tmp_path / STORE_NAME)) as connection, connection:
        connection.execute(f"UPDATE figure_rows SET {column} = replace({column}, '4', '5') WHERE rowid = 1")
    with pytest.raises(StoreError, match="row 1 of figure_rows was changed"):
        measured(figure(), tmp_path, FigureOptions())


def test_another_seed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    measured(figure(), tmp_path, FigureOptions())
    with pytest.raises(StoreError, match=r"--seed 0, not 1\. Choose another --out, or repeat --seed 0"):
        measured(figure(), tmp_path, FigureOptions(seed=1))


def test_tasks_travel_to_workers_with_all_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "_LENGTHS", (2, 20))
    options = asked(BERT, lengths=(4,), layers=Ranges.parse("1", "layers"), as_published=True)
    for one in reproduction.FIGURES:
        with tiny_library(), Store.open(tmp_path / one.name, late=True) as store:
            context = FigureContext(options, store, Means(models=models_for(options)))
            for work in one.plan(context):
                for task in work.tasks:
                    sent = pickle.loads(pickle.dumps(task.packed()))
                    assert (sent.words, sent.alike) == (task.words, task.alike)


def test_times_are_predicted_from_a_few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], list[int]()

    def slow(n: int) -> list[Values]:
        clock[0] += COSTS[n]
        calls.append(n)
        return [{"value": 1.0}]

    def refused(context: FigureContext) -> FigurePlan:
        raise ModelError("no such model")

    monkeypatch.setattr(reproduction, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    figures = [figure(slow), Figure("bad", "bad", "bad", "About.", refused, lambda found, folder: None)]
    made, bad = reproduction.expected_times(figures, FigureOptions(), tmp_path)
    assert calls == [4, 4, 8, 16]  # the shortest twice, since its first run also starts things up
    assert made.seconds == pytest.approx(5.5)
    assert (made.tasks, bad.seconds, bad.refused) == (3, None, "no such model")
    assert not list(tmp_path.iterdir())
    # What the store has is not counted.
    measured(figure(), tmp_path / "made-up", FigureOptions())
    (made,) = reproduction.expected_times(figures[:1], FigureOptions(), tmp_path)
    assert (made.seconds, made.tasks) == (0.0, 0)


def test_a_task_that_takes_long_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], list[int]()

    def slow(n: int) -> list[Values]:
        clock[0] += 3.0
        calls.append(n)
        return [{"value": 1.0}]

    monkeypatch.setattr(reproduction, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    (made,) = reproduction.expected_times([figure(slow)], FigureOptions(), tmp_path)
    assert calls == [4]
    assert made.seconds == pytest.approx(9.0)


def test_a_task_that_fails_when_tried_is_said(tmp_path: Path) -> None:
    def failing(n: int) -> list[Values]:
        raise HowsmoothError("no tokens")

    (made,) = reproduction.expected_times([figure(failing)], FigureOptions(), tmp_path)
    assert (made.seconds, made.refused) == (None, "no tokens")
