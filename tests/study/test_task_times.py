"""How long tasks take, from those that were done: the rule, number by number."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from howsmooth.study.task_times import TaskTimes
from howsmooth.study.tasks.task import Task


def task(n: int, size: int = 1, alike: tuple[str, ...] = ("a",)) -> Any:
    return create_autospec(Task, alike=alike, n=n, size=size)


def learnt(*done: tuple[int, float]) -> TaskTimes:
    times = TaskTimes()
    for n, seconds in done:
        times.learn(("a",), n, 1, seconds)
    return times


@pytest.mark.parametrize(
    ("done", "n", "expected"),
    [
        ([(64, 3.0)], 128, 6.0),  # with one length, like n from 64 tokens on,
        ([(64, 3.0)], 2, 3.0),  # and flat below
        ([(4, 3.0)], 32, 3.0),
        ([(4, 3.0)], 128, 6.0),
        ([(128, 4.0)], 4, 2.0),
        ([(10, 1.0), (40, 4.0)], 20, 2.0),  # with two, a power of n
        ([(40, 1.0), (160, 8.0)], 360, 27.0),
        ([(40, 1.0), (160, 8.0)], 40, 1.0),
        ([(40, 1.0), (80, 16.0)], 160, 64.0),  # which is 2 at most
        ([(10, 1.0), (40, 8.0)], 90, 18.0),  # and 1 among short lengths
        ([(10, 5.0), (20, 1.0)], 40, 1.0),  # and 0 at least
        ([(1, 100.0), (10, 1.0), (40, 4.0), (9000, 1.0)], 20, 2.0),  # between the nearest lengths
        ([(24, 1.0), (60, 2.0), (72, 3.0)], 1152, 3 * 16.0),  # and not of two that are close to each other
        ([(10, 2.0), (12, 3.0)], 128, 6.0),
        ([(64, 0.0), (128, 3.0)], 128, 3.0),  # what took no time has no power
    ],
)
def test_a_row_takes_what_the_nearest_lengths_say(
    done: list[tuple[int, float]], n: int, expected: float
) -> None:
    assert learnt(*done).a_row(("a",), n) == pytest.approx(expected)


def test_rows_of_a_length_are_averaged_and_a_task_is_the_sum_of_its_rows() -> None:
    times = learnt((8, 1.0))
    times.learn(("a",), 8, 3, 7.0)
    assert times.expect(task(8, size=5)) == pytest.approx(10.0)
    assert times.expect(task(8, alike=("b",))) is None


def test_what_is_unknown_counts_as_the_others_do() -> None:
    times = learnt((8, 2.0))
    known, unknown = task(8, size=10), task(8, size=30, alike=("b",))
    assert times.expect_all([(known, 0.5)]) == pytest.approx(10.0)
    assert times.expect_all([(known, 1.0), (unknown, 1 / 3)]) == pytest.approx(40.0)
    assert times.expect_all([(unknown, 1.0)]) is None
    assert times.expect_all([]) == 0.0
