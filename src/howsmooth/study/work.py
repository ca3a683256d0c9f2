"""What a run has to do: batches of measurements, and bounds, that the store does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from howsmooth.study.cost import bounds_cost, measurement_cost, usual_layer
from howsmooth.study.plan import Plan
from howsmooth.study.prepare import Subject
from howsmooth.study.records import Key
from howsmooth.study.sequences import Sequences
from howsmooth.study.site_bounds import BOUNDED_SCOPES, bounded_lengths, most_tokens

__all__ = ["Batch", "Bounds", "Held", "Task", "batch_size", "bounds_left", "count_planned", "work"]

# Attention probabilities and their companions of one batch may take about this much memory.
_BATCH_BYTES = 2**31
_ARRAYS_A_HEAD = 6


@runtime_checkable
class Task(Protocol):
    """What a run is made of: something to compute at some sequences of one subject and length."""

    @property
    def subject(self) -> Subject:
        """The model on its text."""

    @property
    def n(self) -> int:
        """How many tokens each sequence has."""

    @property
    def scope(self) -> str:
        """What is called attention."""

    @property
    def starts(self) -> Mapping[int, int]:
        """First tokens of the samples, in the order in which they are captured."""

    @property
    def what(self) -> str:
        """What a failure is a failure of, see :class:`~howsmooth.study.records.Failure`."""


@dataclass(frozen=True)
class Batch:
    """Measurements that share one forward pass: a subject, a length, a scope, some of its samples."""

    subject: Subject
    n: int
    scope: str
    samples: tuple[int, ...]
    starts: Mapping[int, int]
    missing: frozenset[Key]

    @property
    def what(self) -> str:
        """What a failure of it is a failure of."""
        return "measurement"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with something left to measure."""
        return tuple(sorted({layer for _, layer, _, _, _ in self.missing}))

    @property
    def cost(self) -> float:
        """An estimate of the time it takes, in no particular unit."""
        return len(self.missing) * self.cost_of_one

    @property
    def cost_of_one(self) -> float:
        """That of one measurement."""
        return measurement_cost(self.n, _heads(self))


@dataclass(frozen=True)
class Bounds:
    """Bounds to compute at one sequence, sample 0: those of some layers and heads of a scope."""

    subject: Subject
    n: int
    scope: str
    start: int
    missing: frozenset[Key]

    @property
    def what(self) -> str:
        """What a failure of them is a failure of."""
        return "bounds"

    @property
    def starts(self) -> Mapping[int, int]:
        """The first token of sample 0."""
        return {0: self.start}

    def among(self, measured: frozenset[Key]) -> Bounds:
        """Keep what is measured."""
        return replace(self, missing=self.missing & measured)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers without bounds."""
        return tuple(sorted({layer for _, layer, *_ in self.missing}))

    @property
    def cost(self) -> float:
        """An estimate of the time it takes, in the unit of :attr:`Batch.cost`."""
        heads = _heads(self)
        most = most_tokens(usual_layer(heads).d, heads)
        return len(self.missing) * bounds_cost(self.n, heads, most=most)


def _heads(task: Task) -> int:
    return 1 if task.scope == "head" else task.subject.model.heads


@runtime_checkable
class Held(Protocol):
    """What has been done: a store, as far as it is asked here."""

    def known(self, model: str, text: str) -> frozenset[Key]:
        """Return the measurements of a model on a text."""

    def bounded(self, model: str, text: str) -> frozenset[Key]:
        """Return where bounds are known."""


def work(plan: Plan, placed: Sequence[tuple[Subject, Sequences]], store: Held) -> Iterator[Batch]:
    """List what is left to do, subject by subject, from short to long."""
    for subject, places in placed:
        known = store.known(subject.model.label, subject.text.name)
        for n in sorted(subject.lengths):
            size = batch_size(subject.model.heads, n, plan.dtype)
            for scope in plan.scopes:
                heads = subject.heads if scope == "head" else (None,)
                for first in range(0, plan.samples, size):
                    asked = {
                        (scope, layer, head, n, sample)
                        for sample in range(first, min(first + size, plan.samples))
                        for layer in subject.layers
                        for head in heads
                    }
                    missing = frozenset(asked - known)
                    if missing:
                        samples = tuple(sorted({sample for *_, sample in missing}))
                        starts = {sample: places[n, sample] for sample in samples}
                        yield Batch(subject, n, scope, samples, starts, missing)


def count_planned(plan: Plan, subject: Subject) -> int:
    """Count the measurements that the plan asks of a subject."""
    maps = sum(len(subject.heads) if scope == "head" else 1 for scope in plan.scopes)
    return len(subject.layers) * maps * len(subject.lengths) * plan.samples


def batch_size(heads: int, n: int, dtype: str) -> int:
    """How many sequences of n tokens are measured together without filling the memory."""
    itemsize = 8 if dtype == "float64" else 4
    size = heads * n * n * itemsize * _ARRAYS_A_HEAD
    return max(1, _BATCH_BYTES // size)


def bounds_left(plan: Plan, placed: Sequence[tuple[Subject, Sequences]], store: Held) -> Iterator[Bounds]:
    """List the bounds that the store does not have, at three lengths of each subject."""
    if not plan.bounds:
        return
    for subject, places in placed:
        known = store.bounded(subject.model.label, subject.text.name)
        for n in bounded_lengths(subject.lengths):
            for scope in (scope for scope in plan.scopes if scope in BOUNDED_SCOPES):
                heads = subject.heads if scope == "head" else (None,)
                asked = {(scope, layer, head, n, 0) for layer in subject.layers for head in heads}
                if asked - known:
                    yield Bounds(subject, n, scope, places[n, 0], frozenset(asked - known))
