"""The task that measures constants at sequences of several lengths together.

The model runs once for each length. The sequences of all lengths at which a layer is the same map are then
measured in one call, in which they share matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from howsmooth.batching import are_measured_together
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.study.measured_models import Models
from howsmooth.study.plans import Plan
from howsmooth.study.records import Measurement
from howsmooth.study.tasks.lipschitz_constants import ConstantsTask
from howsmooth.study.tasks.task import Failed, Found, Task, Work

__all__ = ["JoinedConstants", "joined"]

# Lengths are joined as long as all their sequences have no more tokens than this. On a CPU, products with
# more tokens take no less time for each, and finished results would be written late.
_TOKENS = {"cpu": 1 << 11}
_TOKENS_ELSEWHERE = 1 << 15


@dataclass(frozen=True, eq=False)
class JoinedConstants(Task):
    """Measures the Lipschitz constants of one model at some sequences of several lengths.

    ``parts`` are the tasks of the single lengths, of one model, input and scope.
    """

    parts: tuple[ConstantsTask, ...]

    kind = Measurement

    @property
    def plan(self) -> Plan:
        """The plan of the study, by which a worker keeps the model of the last task."""
        return self.parts[0].plan

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model in results."""
        return self.parts[0].model

    @property
    def size(self) -> int:  # type: ignore[override]
        """The number of rows that the task computes because the store lacks them."""
        return sum(part.size for part in self.parts)

    @property
    def n(self) -> int:  # type: ignore[override]
        """The number of tokens of a sequence, on average over the rows."""
        return round(sum(part.size * part.n for part in self.parts) / self.size)

    @property
    def alike(self) -> tuple[Any, ...]:
        """The key of tasks whose times predict each other: the table, the model and the scope."""
        return self.parts[0].alike

    @property
    def words(self) -> str:
        """A short description for progress messages: the model and the lengths."""
        return f"{self.model}, n = {self.parts[0].n} to {self.parts[-1].n}"

    def packed(self) -> JoinedConstants:
        """Return the task with the inputs of its sequences, ready to be sent to another process."""
        return replace(self, parts=tuple(part.packed() for part in self.parts))

    def failed(self, error: Exception) -> Failed:
        """Return ``error`` as a failure with a row for each missing row of the task."""
        return Failed([row for part in self.parts for row in part.failed(error).rows], error)

    def found(self, models: Models | None) -> Iterator[Found]:
        """Load the model, and yield the rows that the store lacks, layer by layer.

        If the call for all lengths fails, each length is measured by itself. Layers that cannot be captured
        come last, as they may end the run.
        """
        assert models is not None
        try:
            model = models.load_for(self.parts[0].subject)
        except Exception as error:
            yield Failed.of(error, self.kind, (self.model,))
            return
        failures: list[Failed] = []
        groups: dict[tuple[int, int | None], list[_Part]] = {}
        # The longest sequence comes first, as its map has the longest tables of positions.
        for task in sorted(self.parts, key=lambda part: -part.n):
            for site in task.sites(model):
                if isinstance(site, Failed):
                    failures.append(site)
                elif samples := task.samples_left(site):
                    group = groups.setdefault((site.layer, site.head), [])
                    if group and are_measured_together(group[0].site.map, site.map):
                        site = replace(site, map=group[0].site.map)  # one copy of the parameters
                    group.append(_Part(task, site, samples))
        for group in groups.values():
            yield from _rows(group[::-1])
        yield from failures[::-1]


@dataclass(frozen=True, eq=False)
class _Part:
    """One layer or head at the samples of one length that are left to measure."""

    task: ConstantsTask
    site: Any
    samples: Sequence[int]

    @property
    def tokens(self) -> int:
        """The number of tokens of all samples."""
        return len(self.samples) * self.task.n


def joined(work: Work, device: str) -> Work:
    """Join the tasks of the constants of one model, input and scope into tasks of several lengths each."""
    most = _TOKENS.get(torch.device(device).type, _TOKENS_ELSEWHERE)
    groups: list[list[ConstantsTask]] = []
    latest: dict[tuple[Any, ...], list[ConstantsTask]] = {}
    for task in work.tasks:
        assert isinstance(task, ConstantsTask)
        key = (id(task.subject), task.scope)
        group = latest.get(key)
        if group is None or sum(len(one.starts) * one.n for one in [*group, task]) > most:
            group = latest[key] = []
            groups.append(group)
        group.append(task)
    tasks = [group[0] if len(group) == 1 else JoinedConstants(tuple(group)) for group in groups]
    return replace(work, tasks=tasks)


def _rows(group: Sequence[_Part]) -> Iterator[Found]:
    """Yield the rows of one layer or head at all lengths of a task."""
    f = group[-1].site.map
    together = [part for part in group if part.site.map is f]
    apart = [part for part in group if part.site.map is not f]
    if len(together) > 1 and are_measured_together(f, f):
        try:
            estimates = _estimates(together)
        except Exception:  # one sequence may be at fault, which shows where each is measured by itself
            apart = list(group)
        else:
            for part, (estimate, seconds) in zip(together, estimates, strict=True):
                yield from part.task.rows(part.site, part.samples, estimate, seconds)
    else:
        apart = list(group)
    for part in apart:
        yield from part.task.measured(part.site, part.samples)


def _estimates(parts: Sequence[_Part]) -> list[tuple[LipschitzEstimate, float]]:
    """Measure one map at the sequences of several lengths in one call.

    Return for each length its estimates and the seconds of one sequence, which are shared by tokens.
    """
    began = time.perf_counter()
    found = parts[-1].task.estimate(
        parts[-1].site.map,
        [x for part in parts for x in part.task.tokens_of(part.site, part.samples)],
        [seed for part in parts for seed in part.task.seeds_of(part.site, part.samples)],
    )
    a_token = (time.perf_counter() - began) / sum(part.tokens for part in parts)
    estimates, first = [], 0
    for part in parts:
        some = slice(first, first + len(part.samples))
        first = some.stop
        fields: dict[str, Any] = {
            name: getattr(found, name) for name in ("confidence", "method", "scope", "rtol", "seed")
        }
        for name in ("value", "lower", "upper", "converged", "iterations"):
            fields[name] = getattr(found, name)[some]
        for name in ("input_direction", "output_direction"):
            fields[name] = torch.stack(getattr(found, name)[some])
        estimates.append((LipschitzEstimate(**fields), a_token * part.task.n))
    return estimates
