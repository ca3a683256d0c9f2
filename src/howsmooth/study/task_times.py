"""Predict how long tasks take from the times of finished tasks.

Tasks are alike if they have the same kind of rows, model and scope. For such tasks, the time of a row is
modelled as a power of the number of tokens n. The exponent is fitted to the nearest finished length and the
next one that is at least twice as long or as short: times vary, so that lengths near to each other say little
about the exponent. It is limited to the range from 0 to 2, and from 0 to 1 if both lengths are below 64,
where the cost of the n² pairs of tokens does not dominate yet. If there is one such length only, the exponent
is 1 above 64 tokens, and 0 below, where the cost that does not depend on n dominates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from howsmooth.study.tasks.task import Task

__all__ = ["TaskTimes"]

_SHORT = 64


class TaskTimes:
    """The times of finished tasks, and predictions for other tasks."""

    def __init__(self) -> None:
        # Seconds and rows, by the tasks' `alike` and then by n.
        self._done: dict[tuple[Any, ...], dict[int, tuple[float, int]]] = defaultdict(dict)

    def learn(self, alike: tuple[Any, ...], n: int, rows: int, seconds: float) -> None:
        """Record how long some finished rows of length n took.

        ``alike`` is what their task has in common with tasks whose times differ only because of n.
        """
        before, others = self._done[alike].get(n, (0.0, 0))
        self._done[alike][n] = (before + seconds, others + rows)

    def expect(self, task: Task) -> float | None:
        """Predict the seconds that a task takes; ``None`` if no similar task is finished."""
        row = self.a_row(task.alike, task.n)
        return None if row is None else task.size * row

    def a_row(self, alike: tuple[Any, ...], n: int) -> float | None:
        """Predict the seconds of one row at length n; ``None`` if no task of kind ``alike`` is finished."""
        seen = self._done.get(alike)
        if not seen:
            return None
        # The nearest finished length (as a ratio), and the next one that is at least a factor of two away
        # from it.
        first, *others = sorted(seen, key=lambda one: abs(math.log(one / n)))
        near = [first, *(other for other in others if max(first, other) >= 2 * min(first, other))][:2]
        times = [seen[one][0] / seen[one][1] for one in near]
        # One length says nothing about the exponent: take 1, and 0 for short sequences.
        if len(near) == 1 or min(times) <= 0:
            return times[0] * max(n, _SHORT) / max(near[0], _SHORT)
        exponent = math.log(times[1] / times[0]) / math.log(near[1] / near[0])
        steepest = 1.0 if max(near) < _SHORT else 2.0
        return float(times[0] * (n / near[0]) ** min(max(exponent, 0.0), steepest))

    def expect_all(self, tasks: Iterable[tuple[Task, float]]) -> float | None:
        """Predict the remaining seconds of unfinished tasks, each given with the share of it that is left.

        A task with no finished task like it is assumed to take the average time per row of the others. Return
        ``None`` if there is work left, but no task like any of them is finished.
        """
        # Rows left of tasks with an expected time, their seconds, and rows left of tasks without.
        seconds = rows = unknown = 0.0
        for task, share in tasks:
            expected = self.expect(task)
            if expected is None:
                unknown += share * task.size
            else:
                seconds += share * expected
                rows += share * task.size
        if not rows:
            return None if unknown else 0.0
        return seconds * (1 + unknown / rows)
