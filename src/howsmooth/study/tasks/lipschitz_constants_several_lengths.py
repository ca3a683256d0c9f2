"""The task of a study that measures Lipschitz constants at sequences of several lengths together.

The model runs once for each length. If a layer is the same map at several lengths, its constants at the
sequences of these lengths are measured in one call, in which the sequences share matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
    """The task of measuring the Lipschitz constants of one model at sequences of several lengths.

    ``parts`` are the tasks for the single lengths; all have the same model, input and scope.
    """

    parts: tuple[ConstantsTask, ...]

    kind = Measurement

    @property
    def plan(self) -> Plan:
        """The plan of the study that the task belongs to. A worker process uses it to keep the loaded model
        between tasks.
        """
        return self.parts[0].plan

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model in the results."""
        return self.parts[0].model

    @property
    def size(self) -> int:  # type: ignore[override]
        """The number of rows that the task computes because they are missing in the store, the file with all
        measurements.
        """
        return sum(part.size for part in self.parts)

    @property
    def n(self) -> int:  # type: ignore[override]
        """The average number of tokens of a sequence, over all rows of the task."""
        return round(sum(part.size * part.n for part in self.parts) / self.size)

    @property
    def alike(self) -> tuple[Any, ...]:
        """The key that is equal for tasks with similar running times: the table, the model and the scope."""
        return self.parts[0].alike

    @property
    def words(self) -> str:
        """A short text for progress messages, with the name of the model and the lengths."""
        return f"{self.model}, n = {self.parts[0].n} to {self.parts[-1].n}"

    def packed(self) -> JoinedConstants:
        """Return a copy of the task that contains the inputs of its sequences and can be sent to another
        process.
        """
        return replace(self, parts=tuple(part.packed() for part in self.parts))

    def failed(self, error: Exception) -> Failed:
        """Return a ``Failed`` object with the given error and the keys of all rows that the task should have
        computed.
        """
        return Failed([row for part in self.parts for row in part.failed(error).rows], error)

    def found(self, models: Models | None) -> Iterator[Found]:
        """Load the model, and yield the rows that are missing in the store, layer by layer.

        If the call for all lengths fails, each length is measured separately. Errors of layers that cannot be
        captured are yielded last, because such an error may end the study.
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
    """One layer or head at one length, with the indices of the sequences that are not measured yet."""

    task: ConstantsTask
    site: Any
    samples: Sequence[int]

    @property
    def tokens(self) -> int:
        """The total number of tokens of the sequences."""
        return len(self.samples) * self.task.n


def joined(work: Work, device: str) -> Work:
    """Join the measuring tasks of one model, input and scope into tasks that each have several lengths."""
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
    estimates = []
    if len(together) > 1:
        # If one sequence is at fault, this shows where each length is measured by itself.
        with suppress(Exception):
            estimates = _estimates(together)
    for part, (estimate, seconds) in zip(together, estimates, strict=False):
        yield from part.task.rows(part.site, part.samples, estimate, seconds)
    for part in group:
        if not estimates or part not in together:
            yield from part.task.measured(part.site, part.samples)


def _estimates(parts: Sequence[_Part]) -> list[tuple[LipschitzEstimate, float]]:
    """Measure the Lipschitz constants of one map at the sequences of several lengths in one call.

    For each length, return the estimates and the time of one sequence in seconds. The time of the call is
    divided among the sequences in proportion to their tokens.
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
