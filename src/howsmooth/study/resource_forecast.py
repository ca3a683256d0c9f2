"""Predict how long a run, a single task, or the unfinished part of a run takes.

The rule: a row of n tokens takes c·n^p seconds, with c and p from finished rows of tasks that are alike
(:class:`TaskTimes`). The time left is the time spent so far, times the ratio of the seconds that the rule
expects for the rows left and for the rows done. Bounds take a share of the measuring time, and each figure
two thirds of a second (:func:`after_measuring`). The progress of a run, ``--status`` and ``--dry-run`` all
use it.

For ``--dry-run``, finished rows come from trials. For each model, text and scope, some tasks are carried out
at the shortest, the middle and the longest length: first one layer at one sequence; if that is expected to
take at most two seconds, then one layer at all sequences, and the whole task. Only the largest of these
counts, because the capture of a layer takes the same time for one sequence as for all. The forecast aims to
be right within a factor of two; ``low`` and ``high`` are these limits.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from howsmooth.attention import SelfAttention
from howsmooth.batching import footprint
from howsmooth.memory import memory_budget
from howsmooth.scopes import ATTENTION_SCOPES
from howsmooth.study.plans import Plan
from howsmooth.study.study_preparation import PreparedStudy, prepared_study
from howsmooth.study.tasks.bounds import SHARE, BoundsTask
from howsmooth.study.tasks.lipschitz_constants import ConstantsTask, constants_left
from howsmooth.study.tasks.task import Failed, SequenceTask, Task
from howsmooth.study.window_placement import bounded_lengths

__all__ = ["WITHIN", "Forecast", "Part", "TaskTimes", "after_measuring", "figure_count", "forecast"]

WITHIN = 2.0
"""The factor within which a forecast should be right."""

_TRIAL_SECONDS = 2.0
# Lengths that are timed first if all lengths of the plan are longer.
_FIRST = (16, 128, 512)
# Below this number of tokens, the cost of the n² pairs of tokens does not dominate.
_SHORT = 64
# Seconds to write the tables and the report, and to draw each figure.
_DRAWING, _FIGURE = 1.0, 0.65
# Number of vectors of n·d entries that the solver keeps for one sequence: a typical basis and work space.
_VECTORS = 40


# Beside the key of its tasks, each time is kept with the kind of rows alone, the first entry of the key.
_ANY = object()

Rows = Mapping[tuple[tuple[Any, ...], int], int]
"""Numbers of rows, by the key of similar tasks (``alike``) and the length n."""


class TaskTimes:
    """A record of the times of finished tasks, which predicts the times of other tasks.

    Tasks are alike if they have the same kind of rows, model and scope; without such a task, all tasks with
    the same kind of rows count. The exponent of n is fitted to the nearest finished length and the next one
    that is at least twice as long or as short: times vary, so that lengths near to each other say little
    about the exponent. It is limited to the range from 0 to 2, and from 0 to 1 if both lengths are below 64.
    If there is no second such length, the exponent is 1 above 64 tokens, and 0 below.
    """

    def __init__(self) -> None:
        # Seconds and rows, by the tasks' `alike` and then by n.
        self._done: dict[tuple[Any, ...], dict[int, tuple[float, int]]] = defaultdict(dict)

    def learn(
        self, alike: tuple[Any, ...], n: int, rows: int, seconds: float, *, instead: bool = False
    ) -> None:
        """Record how long some rows of length n took to compute, in tasks with the key ``alike``.

        These rows are added to the rows of this length recorded before; with ``instead``, they replace them.
        """
        for key in (alike, (_ANY, alike[0])):
            before, others = (0.0, 0) if instead else self._done[key].get(n, (0.0, 0))
            self._done[key][n] = (before + seconds, others + rows)

    def expect(self, task: Task) -> float | None:
        """Predict the seconds that a task takes; ``None`` if no similar task is finished."""
        row = self.a_row(task.alike, task.n)
        return None if row is None else task.size * row

    def a_row(self, alike: tuple[Any, ...], n: int) -> float | None:
        """Predict the seconds of one row at length n; ``None`` if no similar task (``alike``) is finished."""
        seen = self._done.get(alike) or self._done.get((_ANY, alike[0]))
        if not seen:
            return None
        first, *others = sorted(seen, key=lambda one: abs(math.log(one / n)))
        near = [first, *(other for other in others if max(first, other) >= 2 * min(first, other))][:2]
        times = [seen[one][0] / seen[one][1] for one in near]
        if len(near) == 1 or min(times) <= 0:
            return times[0] * max(n, _SHORT) / max(near[0], _SHORT)
        exponent = math.log(times[1] / times[0]) / math.log(near[1] / near[0])
        steepest = 1.0 if max(near) < _SHORT else 2.0
        return float(times[0] * (n / near[0]) ** min(max(exponent, 0.0), steepest))

    def left(self, spent: float, done: Rows, left: Rows) -> float:
        """Predict the seconds that the rows ``left`` take, if the rows ``done`` took ``spent`` seconds."""

        def expected(rows: Rows) -> float:
            each = ((count, n, self.a_row(alike, n)) for (alike, n), count in rows.items())
            return float(sum(count * (max(n, _SHORT) if row is None else row) for count, n, row in each))

        return spent * expected(left) / max(expected(done), 1e-9)


@dataclass(frozen=True)
class Part:
    """The expected wall time and peak memory of the measurements of one model, text, scope and length n.

    ``measurements`` is the number left to make. ``memory``, of the process, is in bytes, and None if it
    cannot be predicted for this map. ``lacking`` is None if one measurement fits into the memory that it may
    use, or else the bytes that it would need: it will be refused.
    """

    model: str
    text: str
    scope: str
    n: int
    measurements: int
    seconds: float
    memory: float | None
    lacking: float | None


@dataclass(frozen=True)
class Forecast:
    """The expected time and memory of a run.

    Attributes
    ----------
    parts
        One entry for each model, text, scope and length with measurements left to make.
    preparing
        Seconds to read texts and load models, as just measured.
    bounds, drawing
        Expected seconds for bounds, and for tables, figures and the report.
    seconds, low, high
        The expected wall time of the whole run, and its limits.
    memory
        The expected peak memory of the process in bytes, as far as it can be predicted.
    kept
        The number of measurements of the plan that the store already has.
    impossible
        The models and texts that cannot be measured or bounded, as (model, text or None, reason).

    """

    parts: tuple[Part, ...]
    preparing: float
    bounds: float
    drawing: float
    seconds: float
    low: float
    high: float
    memory: float
    kept: int
    impossible: tuple[tuple[str, str | None, str], ...]


def forecast(
    plan: Plan, folder: str | os.PathLike[str], *, keep_going: bool = False, draw: bool = True
) -> Forecast:
    """Predict the time and memory of a run of a plan, by trying a few tasks and without writing anything.

    The arguments are those of ``run``, and ``draw`` says whether figures will be drawn. Measurements that the
    store in ``folder`` has are not counted.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        The errors that ``run`` raises before it measures.

    """
    began = time.monotonic()
    with prepared_study(plan, folder, write=False, keep_going=keep_going) as study:
        preparing = time.monotonic() - began
        left = constants_left(study)
        groups: dict[tuple[str, str, str], list[ConstantsTask]] = {}
        for task in left.tasks:
            assert isinstance(task, ConstantsTask)
            groups.setdefault((task.model, task.subject.text.name, task.scope), []).append(task)
        held, trials = _resident(), [_Trial(study, tasks, keep_going) for tasks in groups.values()]
        parts = tuple(part for trial in trials for part in trial.parts(held))
        measuring = sum((part.seconds for part in parts), start=0.0)
        shown = [{key[:3] for task in tasks for key in task.missing} for tasks in groups.values()]
        bounds, drawing = after_measuring(plan, measuring, figure_count(shown) if draw else 0)
        if plan.bounds == "all":
            bounds = sum((trial.bounds() for trial in trials), start=0.0)
        impossible = [(spec.label, text, str(error)) for spec, text, error in study.impossible]
        impossible += [failure for trial in trials for failure in trial.failures]
        seconds = preparing + measuring + bounds + drawing
        return Forecast(
            parts=parts,
            preparing=preparing,
            bounds=bounds,
            drawing=drawing,
            seconds=seconds,
            low=seconds / WITHIN,
            high=seconds * WITHIN,
            memory=max((part.memory or held for part in parts), default=held),
            kept=left.kept,
            impossible=tuple(
                dict.fromkeys((label, text, " ".join(error.split())) for label, text, error in impossible)
            ),
        )


def after_measuring(plan: Plan, measuring: float, figures: int) -> tuple[float, float]:
    """Return the expected seconds for bounds and for writing outputs, which follow the measurements.

    ``--dry-run`` and ``--status`` both add them to the seconds of the measurements that are left. Bounds
    count if they take a share of that time (``bounds="auto"``) and some scope is attention alone; all bounds
    have to be timed. ``figures`` are the figures to be drawn (:func:`figure_count`).
    """
    bounded = plan.bounds == "auto" and any(scope in ATTENTION_SCOPES for scope in plan.scopes)
    return SHARE * measuring if bounded else 0.0, _DRAWING + _FIGURE * figures


def figure_count(shown: Iterable[Collection[object]]) -> int:
    """Return how many figures show some layers or heads, given those of each model, text and scope.

    There is one for each, and an overview of several, which takes as long as a fifth of their figures.
    """
    return sum(len(parts) + math.ceil(len(parts) / 5) * (len(parts) > 1) for parts in shown)


class _Trial:
    """A trial of a few tasks of a model, to predict how much time and memory all tasks of the model take.

    All tasks are left to do, and belong to one model, text and scope.
    """

    def __init__(self, study: PreparedStudy, tasks: Sequence[ConstantsTask], keep_going: bool) -> None:
        self._study = study
        self._keep_going = keep_going
        self._tasks = tasks
        self._task_times = TaskTimes()
        self._map: Any = None
        self._known = (0, 0)  # the shape of the input of self._map, which may join two sequences
        self._captured_at = 0  # the length n of the task that captured it
        self.failures: list[tuple[str, str, str]] = []  # those that do not end a run, as in `impossible`
        lengths = bounded_lengths([task.n for task in tasks])
        # An input that can be cut to any length is timed at shorter ones first.
        short = () if tasks[0].subject.feed.lengths else tuple(n for n in _FIRST if n < lengths[0])
        # Warm up without learning the time: the first task also does work that a process does only once.
        self._timed(_part_of(tasks[0], (*short, *lengths)[0]))
        # From short to long, so that the times of short sequences tell when to stop.
        for n in (*short, *lengths):
            whole = next((task for task in tasks if task.n == n), None)
            trials = [_part_of(whole or tasks[0], n)]
            if (self._task_times.expect(trials[0]) or 0.0) > _TRIAL_SECONDS:
                break
            if whole is not None:
                # Sequences measured in one batch take less time each than one alone, so time a batch too.
                first = frozenset(key for key in whole.missing if key[1] == whole.layers[0])
                trials += [replace(whole, missing=first), whole]
            for task in trials:
                if (self._task_times.expect(task) or 0.0) <= _TRIAL_SECONDS:
                    self._task_times.learn(task.alike, task.n, task.size, self._timed(task), instead=True)

    def _timed(self, task: SequenceTask) -> float:
        """Carry out a task and return its seconds. If it fails, raise or keep the error as the run would."""
        packed, began = task.packed(), time.monotonic()
        for step in packed.found(self._study.models):
            if isinstance(step, Failed):
                if task.essential and not self._keep_going:
                    raise step.error
                reason = str(step.error) if task.essential else f"bounds: {step.error}"
                self.failures.append((task.model, task.subject.text.name, reason))
        seconds = time.monotonic() - began
        # The first task that succeeds also shows a map, from which the memory is predicted.
        if self._map is None and not self.failures:
            site = next(iter(packed.sites(self._study.models.load_for(packed.subject))))
            self._map, self._known, self._captured_at = site.map, tuple(site.x.shape[-2:]), packed.n
        return seconds

    def parts(self, held: float) -> Iterator[Part]:
        """Yield, for each length, the expected time and memory of its measurements.

        ``held`` is the memory in use now, in bytes.
        """
        for n in sorted({task.n for task in self._tasks}):
            here = [task for task in self._tasks if task.n == n]
            memory, lacking = self._memory(n, max(len(task.starts) for task in here))
            yield Part(
                model=here[0].model,
                text=here[0].subject.text.name,
                scope=here[0].scope,
                n=n,
                measurements=sum(task.size for task in here),
                seconds=sum(self._task_times.expect(task) or 0.0 for task in here),
                memory=None if memory is None else held + memory,
                lacking=lacking,
            )

    def _memory(self, n: int, members: int) -> tuple[float | None, float | None]:
        """Return the bytes of memory that a batch of sequences needs, and those that one sequence needs if it
        does not fit.

        The batch has ``members`` sequences of n tokens.
        """
        if self._map is None:
            return None, None
        plan, (known, d) = self._study.plan, self._known
        device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
        exact = isinstance(self._map, SelfAttention)
        # The footprint of other maps is known only at the length of capture; it grows like n².
        how = footprint(self._map, (n if exact else known, d), dtype=dtype, device=device, memory=plan.memory)
        if not how.size:
            return None, None
        size = float(how.size) if exact else how.size * (n / self._captured_at) ** 2
        budget = float(memory_budget(plan.memory, device))
        # Sequences share a batch as far as memory allows, so the batch takes at most the budget. A streamed
        # map is measured one sequence after another.
        together = size if how.streamed else min(members * size, max(size, budget))
        lacking = size if how.streamed and size > budget else None
        return together + members * _VECTORS * n * d * dtype.itemsize, lacking

    def bounds(self) -> float:
        """Predict how many seconds the bounds on all layers take, by timing one layer at a few lengths."""
        first = self._tasks[0]
        if first.scope not in ATTENTION_SCOPES:
            return 0.0
        tasks, times = [], TaskTimes()
        for n in bounded_lengths([task.n for task in self._tasks]):
            one = _part_of(next(task for task in self._tasks if task.n == n), n)
            # The bounds are computed at the first sequence, which becomes sample 0.
            missing = frozenset((*key[:-1], 0) for key in one.missing)
            starts = {0: next(iter(one.starts.values()))}
            task = BoundsTask(one.plan, one.subject, n, one.scope, starts, missing)
            tasks.append(task)
            if (times.expect(task) or 0.0) <= _TRIAL_SECONDS:
                times.learn(task.alike, task.n, task.size, self._timed(task))
        return len(first.subject.layers) * sum(times.expect(task) or 0.0 for task in tasks)


def _part_of(task: ConstantsTask, n: int) -> ConstantsTask:
    """Restrict a task to one layer and one sequence, cut to n tokens, so that it is quick to time."""
    layer, sample = task.layers[0], next(iter(task.starts))
    asked = {(scope, at, head, n, which) for scope, at, head, _, which in task.missing}
    missing = frozenset(key for key in asked if key[1] == layer and key[-1] == sample)
    return replace(task, n=n, starts={sample: task.starts[sample]}, missing=missing)


def _resident() -> float:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    return 0.0
