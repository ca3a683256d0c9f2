"""What a run would take: time and memory of each length, told before anything is measured or written.

Texts and models are loaded and checked as for a run. Operations are counted by :mod:`howsmooth.study.cost`,
and what cannot be counted is tried, by :mod:`howsmooth.study.trial`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from howsmooth.study.begin import Impossible, consulted_study
from howsmooth.study.cost import (
    Rates,
    bounds_seconds,
    capture_memory,
    capture_seconds,
    drawing_seconds,
    estimate_cost,
    read,
)
from howsmooth.study.plan import Plan
from howsmooth.study.prepare import Subject
from howsmooth.study.records import Key
from howsmooth.study.site_bounds import most_tokens
from howsmooth.study.tools import Tools
from howsmooth.study.trial import Steps, Trial, taken, tried
from howsmooth.study.work import Batch, bounds_left, count_planned, work

__all__ = ["Forecast", "Part", "forecast"]


@dataclass(frozen=True)
class Part:
    """What one model on one text takes at one length and scope.

    Attributes
    ----------
    model, text, scope, n
        Which.
    measurements
        How many are left to make.
    seconds, low, high
        Wall time: expected, with few steps, and with many.
    memory
        Bytes of the process at the peak.
    fits
        Whether one measurement fits in the memory that it may use; if not, it is refused.

    """

    model: str
    text: str
    scope: str
    n: int
    measurements: int
    seconds: float
    low: float
    high: float
    memory: float
    fits: bool


@dataclass(frozen=True)
class Forecast:
    """What a run takes.

    Attributes
    ----------
    parts
        One for each model, text, scope and length with something left to measure.
    steps
        For each model, text and scope.
    preparing
        Seconds to read texts and load models, as it took just now.
    bounds, drawing
        Seconds for bounds, and for tables, figures and report.
    seconds, low, high
        Wall time of everything.
    memory
        Bytes of the process at the peak.
    kept
        Measurements of the plan that the store has.
    impossible
        Models, or texts with a model, that cannot be used, and why.

    """

    parts: tuple[Part, ...]
    steps: dict[tuple[str, str, str], Steps]
    preparing: float
    bounds: float
    drawing: float
    seconds: float
    low: float
    high: float
    memory: float
    kept: int
    impossible: tuple[tuple[str, str | None, str], ...]


class _Nothing:
    """What a study has whose store is not there yet."""

    def known(self, model: str, text: str) -> frozenset[Key]:
        return frozenset()

    def bounded(self, model: str, text: str) -> frozenset[Key]:
        return frozenset()


def forecast(
    plan: Plan,
    folder: Path,
    tools: Tools,
    rates: Rates,
    *,
    keep_going: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Forecast:
    """Predict what :func:`howsmooth.study.run.run` takes, and writing nothing.

    Parameters
    ----------
    plan, folder, tools, keep_going
        As for ``run``; what the store in ``folder`` has is not measured again.
    rates
        Of the machine, see :func:`howsmooth.study.calibration.calibrated`.
    clock
        Returns seconds; that of ``rates``.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        As ``run``, before anything is measured.

    """
    began = clock()
    with consulted_study(plan, folder, tools, keep_going=keep_going) as known:
        plan, models, placed, had = known.plan, known.models, known.placed, known.store or _Nothing()
        preparing = clock() - began
        baseline = _resident()
        trials: dict[tuple[str, str, str], Trial] = {}
        parts: list[Part] = []
        for subject, places in placed:
            for scope in plan.scopes:
                batches = [b for b in work(plan, [(subject, places)], had) if b.scope == scope]
                if not batches and not plan.bounds:
                    continue
                trial = tried(plan, subject, scope, places, tools, models, rates, known.store, clock)
                trials[_name(subject, scope)] = trial
                parts += _parts(plan, subject, batches, trial, rates, baseline)
        bounds = 0.0
        for task in bounds_left(plan, placed, had):
            trial = trials[_name(task.subject, task.scope)]
            captured = _capture(rates, trial, task.subject, task.n, 1, len(task.layers))
            most = most_tokens(trial.layer.d, trial.layer.heads)
            bounds += captured + len(task.missing) * bounds_seconds(rates, trial.layer, task.n, most=most)
        planned = sum(count_planned(plan, subject) for subject, _ in placed)
        left = sum(part.measurements for part in parts)
        curves = sum(len(one.layers) for one, _ in placed) * len(plan.scopes)
        drawing = drawing_seconds(rates, curves)
        beside = preparing + bounds + drawing
        return Forecast(
            parts=tuple(parts),
            steps={name: trial.steps for name, trial in trials.items()},
            preparing=preparing,
            bounds=bounds,
            drawing=drawing,
            seconds=beside + sum(part.seconds for part in parts),
            low=beside + sum(part.low for part in parts),
            high=beside + sum(part.high for part in parts),
            memory=max((part.memory for part in parts), default=baseline),
            kept=planned - left,
            impossible=tuple(_told(known.impossible)),
        )


def _parts(
    plan: Plan, subject: Subject, batches: Sequence[Batch], trial: Trial, rates: Rates, baseline: float
) -> Iterator[Part]:
    """Predict what is left of one subject and scope, length by length."""
    for n in sorted({batch.n for batch in batches}):
        here = [batch for batch in batches if batch.n == n]
        times, memory = [0.0, 0.0, 0.0], 0.0
        for batch in here:
            members = len(batch.samples)
            captured = _capture(rates, trial, subject, n, members, len(batch.layers))
            memory = max(memory, capture_memory(trial.layer, n, members=members))
            maps = len({(layer, head) for _, layer, head, _, _ in batch.missing})
            for at, steps in enumerate((trial.steps.low, trial.steps.likely, trial.steps.high)):
                cost = _estimate(plan, rates, trial, n, members, steps)
                times[at] += captured + maps * cost[0]
                memory = max(memory, cost[1])
        yield Part(
            model=subject.model.label,
            text=subject.text.name,
            scope=here[0].scope,
            n=n,
            measurements=sum(len(batch.missing) for batch in here),
            seconds=times[1],
            low=times[0],
            high=times[2],
            memory=baseline + memory,
            fits=taken(plan, trial.map, trial.layer, trial.n, n).fits,
        )


def _estimate(
    plan: Plan, rates: Rates, trial: Trial, n: int, members: int, steps: float
) -> tuple[float, float]:
    steps = min(steps, float(plan.max_iterations))
    layer = trial.layer
    takes = taken(plan, trial.map, layer, trial.n, n)
    cost = estimate_cost(
        rates, layer, n, members=members, steps=steps, dtype=plan.dtype, streamed=takes.streamed
    )
    # More members than fit are not measured together.
    together = 1 if takes.streamed else members
    size = max(float(takes.size), min(float(together * takes.size), takes.budget))
    return cost.seconds * read(trial.estimate, n), size + cost.memory


def _capture(rates: Rates, trial: Trial, subject: Subject, n: int, members: int, captured: int) -> float:
    layers = subject.model.layers
    seconds = capture_seconds(rates, trial.layer, n, members=members, layers=layers, captured=captured)
    return seconds * read(trial.capture, n)


def _name(subject: Subject, scope: str) -> tuple[str, str, str]:
    return subject.model.label, subject.text.name, scope


def _told(impossible: Impossible) -> Iterator[tuple[str, str | None, str]]:
    for spec, text, error in impossible:
        yield spec.label, text, " ".join(str(error).split())


def _resident() -> float:
    """Bytes of memory that the process holds."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    return 0.0
