"""How long tasks take, learnt from those that were done.

The rule: tasks that are alike (the same kind of rows, model and scope) take a time a row that is a power of
the number of tokens n. The exponent is that between the nearest length that was done and the next one that
is shorter or longer by at least a factor of two, and is kept between 0 and 2: lengths that are closer say
little, since times vary. With one such length done it is 1 from 64 tokens on, and 0 below: there, what does
not depend on n takes the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from howsmooth.study.tasks.task import Task

__all__ = ["Pace"]

_STEEPEST = 2.0
_SHORT = 64


class Pace:
    """Seconds a row of tasks that were done, and of those to come."""

    def __init__(self) -> None:
        # By what tasks have alike, then by n: seconds and rows.
        self._done: dict[tuple[Any, ...], dict[int, tuple[float, int]]] = defaultdict(dict)

    def learn(self, alike: tuple[Any, ...], n: int, rows: int, seconds: float) -> None:
        """Take note of rows that were made: what their tasks have ``alike``, and the length."""
        before, others = self._done[alike].get(n, (0.0, 0))
        self._done[alike][n] = (before + seconds, others + rows)

    def expect(self, task: Task) -> float | None:
        """Return the seconds that a task will take; ``None`` if nothing like it was done."""
        row = self.a_row(task.alike, task.n)
        return None if row is None else task.size * row

    def a_row(self, alike: tuple[Any, ...], n: int) -> float | None:
        """Return the seconds of one row at a length; ``None`` if nothing like it was done."""
        seen = self._done.get(alike)
        if not seen:
            return None
        first, *others = sorted(seen, key=lambda one: abs(math.log(one / n)))
        near = [first, *(other for other in others if max(first, other) >= 2 * min(first, other))][:2]
        times = [seen[one][0] / seen[one][1] for one in near]
        if len(near) == 1 or min(times) <= 0:
            return times[0] * max(n, _SHORT) / max(near[0], _SHORT)
        exponent = math.log(times[1] / times[0]) / math.log(near[1] / near[0])
        return float(times[0] * (n / near[0]) ** min(max(exponent, 0.0), _STEEPEST))

    def expect_all(self, tasks: Iterable[tuple[Task, float]]) -> float | None:
        """Return the seconds that parts of tasks will take; ``None`` if nothing like any of them was done.

        Parameters
        ----------
        tasks
            Each with the share of it that is left. Those of which nothing is known count as the others do.

        """
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
