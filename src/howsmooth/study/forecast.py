"""What a run would take, told before anything is measured or written: a little of the plan is tried.

The rule: of each model, text and scope, tasks of the plan are carried out at its shortest, its middle and its
longest length: one layer at one sequence, and one layer at all sequences and the whole where that takes no
more than about two seconds. From these times :class:`~howsmooth.study.pace.Pace` tells those at all lengths.
Bounds and drawing come on top. Such a forecast is meant to be right within a factor of two, which ``low`` and
``high`` say.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from howsmooth.attention import SelfAttention
from howsmooth.batching import footprint
from howsmooth.memory import memory_budget
from howsmooth.scopes import ATTENTION_SCOPES
from howsmooth.study.pace import Pace
from howsmooth.study.plan import Plan
from howsmooth.study.records import Row
from howsmooth.study.sequences import bounded_lengths
from howsmooth.study.subjects import OpenStudy, opened_study
from howsmooth.study.tasks.bounds import SHARE, BoundsTask
from howsmooth.study.tasks.constants import ConstantsTask, constants_left
from howsmooth.study.tasks.task import Failed, SequenceTask

__all__ = ["WITHIN", "Forecast", "Part", "forecast"]

WITHIN = 2.0
"""The factor within which a forecast is meant to be right."""

_TRIAL_SECONDS = 2.0
# Where all lengths are longer, these are tried first.
_SHORT = (16, 128, 512)
# Seconds of tables and report, and of each figure.
_DRAWING, _FIGURE = 2.0, 0.5
# Vectors of one sequence that the solver holds, in numbers of n d: a usual basis and what it works with.
_VECTORS = 40


@dataclass(frozen=True)
class Part:
    """What one model on one text takes at one length and scope.

    Attributes
    ----------
    model, text, scope, n
        Which.
    measurements
        How many are left to make.
    seconds
        Wall time that is expected.
    memory
        Bytes of the process at the peak; ``None`` for a map whose needs are not known beforehand.
    fits
        Whether one measurement fits in the memory that it may use; if not, it is refused.

    """

    model: str
    text: str
    scope: str
    n: int
    measurements: int
    seconds: float
    memory: float | None
    fits: bool


@dataclass(frozen=True)
class Forecast:
    """What a run takes.

    Attributes
    ----------
    parts
        One for each model, text, scope and length with something left to measure.
    preparing
        Seconds to read texts and load models, as it took just now.
    bounds, drawing
        Seconds for bounds, and for tables, figures and report.
    seconds, low, high
        Wall time of everything.
    memory
        Bytes of the process at the peak, as far as known.
    kept
        Measurements of the plan that the store has.
    impossible
        Models, or texts with a model, that cannot be used, and why.

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


def forecast(plan: Plan, folder: Path, *, keep_going: bool = False) -> Forecast:
    """Predict what :func:`howsmooth.study.run.run` takes, writing nothing.

    Parameters
    ----------
    plan, folder, keep_going
        As for ``run``; what the store in ``folder`` has is not measured again.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        As ``run``, before anything is measured.

    """
    began = time.monotonic()
    with opened_study(plan, folder, write=False, keep_going=keep_going) as study:
        preparing = time.monotonic() - began
        left = constants_left(study)
        groups: dict[tuple[str, str, str], list[ConstantsTask]] = {}
        for task in left.tasks:
            assert isinstance(task, ConstantsTask)
            groups.setdefault((task.model, task.subject.text.name, task.scope), []).append(task)
        held, trials = _resident(), [_Trial(study, tasks) for tasks in groups.values()]
        parts = tuple(part for trial in trials for part in trial.parts(held))
        measuring = sum((part.seconds for part in parts), start=0.0)
        bounds = _bounds(plan, measuring, trials)
        figures = sum(len(one.subject.layers) for one in study.placed) * len(plan.scopes)
        drawing = _DRAWING + _FIGURE * figures
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
                (spec.label, text, " ".join(str(error).split())) for spec, text, error in study.impossible
            ),
        )


def _bounds(plan: Plan, measuring: float, trials: Sequence[_Trial]) -> float:
    match plan.bounds:
        case "none":
            return 0.0
        case "all":
            return sum((trial.bounds() for trial in trials), start=0.0)
        case _:
            return SHARE * measuring


class _Trial:
    """A little of what is left of one model, text and scope, carried out and timed."""

    def __init__(self, study: OpenStudy, tasks: Sequence[ConstantsTask]) -> None:
        self._study = study
        self._tasks = tasks
        self._pace = Pace()
        self._map: Any = None
        self._known = (0, 0)  # shape (n, d) of the tokens of that map
        lengths = sorted({task.n for task in tasks})
        self._lengths = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
        # What is done once in a process is not to be timed.
        self._timed(_part_of(tasks[0], self._first()))
        for n in [*(short for short in _SHORT if self._free and short < lengths[0]), *self._lengths]:
            if not self._try(n):
                break

    @property
    def _free(self) -> bool:
        """Whether sequences can be cut to any length."""
        return not getattr(self._tasks[0].feed, "lengths", ())

    def _first(self) -> int:
        return min(self._lengths[0], _SHORT[0]) if self._free else self._lengths[0]

    def _try(self, n: int) -> bool:
        """Time a length, at least in part; return whether there was time for it."""
        whole = next((task for task in self._tasks if task.n == n), None)
        part = _part_of(whole or self._tasks[0], n)
        if (self._pace.expect(part) or 0.0) > _TRIAL_SECONDS:
            return False
        self._learn(part)
        # Sequences that are measured together take less time each, so that one alone says too much.
        for more in () if whole is None else (_layer_of(whole), whole):
            if (self._pace.expect(more) or 0.0) <= _TRIAL_SECONDS:
                self._learn(more)
        return True

    def _learn(self, task: ConstantsTask) -> None:
        self._pace.learn(task.alike, task.n, task.size, self._timed(task))

    def _timed(self, task: SequenceTask[Any]) -> float:
        """Carry a task out, and return the seconds that it took; what fails raises its error."""
        packed, began = task.packed(), time.monotonic()
        found: list[Sequence[Row]] = []
        for step in packed.found(self._study.models):
            if isinstance(step, Failed):
                raise step.error
            found.append(step)
        seconds = time.monotonic() - began
        if self._map is None:
            site = next(iter(packed.sites(self._study.models.load_for(packed.subject))))
            self._map, self._known = site.map, tuple(site.x.shape[-2:])
        return seconds

    def parts(self, held: float) -> Iterator[Part]:
        """Predict what is left, length by length; ``held`` bytes are in use now."""
        for n in sorted({task.n for task in self._tasks}):
            here = [task for task in self._tasks if task.n == n]
            memory, fits = self._memory(n, max(len(task.starts) for task in here))
            yield Part(
                model=here[0].model,
                text=here[0].subject.text.name,
                scope=here[0].scope,
                n=n,
                measurements=sum(task.size for task in here),
                seconds=sum(self._pace.expect(task) or 0.0 for task in here),
                memory=None if memory is None else held + memory,
                fits=fits,
            )

    def _memory(self, n: int, members: int) -> tuple[float | None, bool]:
        """Return the bytes that some sequences of n tokens take together, and whether one fits."""
        plan, (known, d) = self._study.plan, self._known
        device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
        exact = isinstance(self._map, SelfAttention)
        # Other maps know the length only at which they were captured; their probabilities grow like n².
        how = footprint(self._map, (n if exact else known, d), dtype=dtype, device=device, memory=plan.memory)
        if not how.size:
            return None, True
        size = float(how.size) if exact else how.size * (n / known) ** 2
        budget = float(memory_budget(plan.memory, device))
        together = size if how.streamed else min(members * size, max(size, budget))
        return together + members * _VECTORS * n * d * dtype.itemsize, not how.streamed or size <= budget

    def bounds(self) -> float:
        """Predict all bounds, from those of one layer at the lengths that can be tried."""
        first = self._tasks[0]
        if first.scope not in ATTENTION_SCOPES:
            return 0.0
        lengths = bounded_lengths(tuple({task.n for task in self._tasks}))
        tasks = [_bounds_of(_part_of(next(t for t in self._tasks if t.n == n), n)) for n in lengths]
        pace = Pace()
        for task in tasks:
            if (pace.expect(task) or 0.0) <= _TRIAL_SECONDS:
                pace.learn(task.alike, task.n, task.size, self._timed(task))
        return len(first.subject.layers) * sum(pace.expect(task) or 0.0 for task in tasks)


def _layer_of(task: ConstantsTask) -> ConstantsTask:
    """Return one layer of a task, with all its sequences."""
    missing = frozenset(key for key in task.missing if key[1] == task.layers[0])
    return ConstantsTask(task.plan, task.subject, task.feed, task.n, task.scope, task.starts, missing)


def _part_of(task: ConstantsTask, n: int) -> ConstantsTask:
    """Return one layer and one sequence of a task, cut to n tokens."""
    layer, sample = task.layers[0], next(iter(task.starts))
    asked = {(scope, at, head, n, which) for scope, at, head, _, which in task.missing}
    missing = frozenset(key for key in asked if key[1] == layer and key[-1] == sample)
    starts = {sample: task.starts[sample]}
    return ConstantsTask(task.plan, task.subject, task.feed, n, task.scope, starts, missing)


def _bounds_of(task: ConstantsTask) -> BoundsTask:
    """Return the bounds at the sequence of a task, as if it were sample 0."""
    missing = frozenset((scope, layer, head, n, 0) for scope, layer, head, n, _ in task.missing)
    starts = {0: next(iter(task.starts.values()))}
    return BoundsTask(task.plan, task.subject, task.feed, task.n, task.scope, starts, missing)


def _resident() -> float:
    """Bytes of memory that the process holds."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    return 0.0
