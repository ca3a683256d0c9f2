"""What a listener is told of a run: how many results are there, and how long the others take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from howsmooth.study import runner
from howsmooth.study.records import Measurement
from howsmooth.study.runner import _WorkProgress
from howsmooth.study.tasks.task import Work
from tests._study import Heard


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def told(
    monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, float]], steps: list[tuple[float, int, int, bool]]
) -> Heard:
    """Carry out steps (time, task, results, ended) of tasks with given sizes and work."""
    clock, heard = Clock(), Heard()
    monkeypatch.setattr(runner, "time", clock)
    tasks = [SimpleNamespace(size=size, work=work, words="words") for size, work in sizes]
    work = Work(Measurement, "constants", tasks, kept=7)  # type: ignore[arg-type]
    progress = _WorkProgress(heard, work, before=0, whole=0)  # type: ignore[arg-type]
    for now, task, results, ended in steps:
        clock.now = now
        progress.advance(tasks[task], results, ended=ended)  # type: ignore[arg-type]
    return heard


def test_results_are_counted_and_never_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(10.0, 0, 2, False), (11.0, 0, 2, False), (12.0, 0, 0, True), (13.0, 1, 4, False)]
    heard = told(monkeypatch, [(6, 60.0), (4, 80.0)], [*steps, (14.0, 1, 0, True)])
    assert heard.phases == ["Computing 10 constants (7 more are in the store already)"]
    # Two results of the first task failed: they are over, but not there.
    assert [(done, total) for done, total, _ in heard.told] == [(2, 10), (4, 10), (6, 10), (10, 10), (10, 10)]
    assert [words for *_, words in heard.told][::3] == ["2 of 10, words", "8 of 10, words"]


def test_the_time_left_follows_from_the_work_and_not_from_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [(1000.0, 0, 5, False), (1001.0, 0, 1, False), (1010.0, 0, 4, True)]
    heard = told(monkeypatch, [(10, 100.0), (10, 400.0)], [*steps, (1010.1, 1, 1, False)])
    # Nothing is said before the pace is known; then 50 of the work took 10 s, and 400 are left.
    assert heard.left == [None, None, pytest.approx(80.0)]
