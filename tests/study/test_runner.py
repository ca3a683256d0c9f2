"""How long tasks take, as the runner of a study expects it from those that are finished."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from howsmooth.study.runner import TaskTimes
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


def test_without_a_task_that_is_alike_the_same_kind_of_rows_counts() -> None:
    times = TaskTimes()
    times.learn(("rows", "one model"), 64, 1, 2.0)
    assert times.a_row(("rows", "another"), 128) == pytest.approx(4.0)
    assert times.a_row(("bounds", "one model"), 128) is None


def test_the_time_left_is_the_time_spent_by_the_seconds_of_rows_left_and_done() -> None:
    a, times = ("a",), learnt((64, 2.0), (128, 4.0))
    done, left = {(a, 64): 1, (a, 128): 1}, {(a, 256): 3}
    assert times.left(6.0, done, left) == pytest.approx(24.0)
    assert times.left(9.0, done, left) == pytest.approx(36.0)  # half as long again as the rows alone
    # As long as nothing is known, a row counts n times, but at least 64 times.
    assert TaskTimes().left(2.0, {(a, 64): 1}, {(a, 128): 1, (a, 16): 1}) == pytest.approx(6.0)
