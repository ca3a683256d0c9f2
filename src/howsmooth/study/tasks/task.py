"""Define tasks: computations in this process or on a worker, which produce rows of the store."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from howsmooth.study.input_sequences import SequenceData
from howsmooth.study.plans import Plan
from howsmooth.study.records import PLACE, Failure, Row
from howsmooth.study.store import now
from howsmooth.study.study_preparation import Models, Subject, capture_sites
from howsmooth.words import encodable

__all__ = ["Failed", "Found", "SequenceTask", "Task", "Work", "each_if_not_all"]


@dataclass(frozen=True, eq=False)
class Failed:
    """A failed computation of a study: its error, and the rows that record it in the store."""

    rows: Sequence[Failure]
    error: Exception

    @classmethod
    def of(cls, error: Exception, kind: type[Row], *places: Sequence[Any]) -> Failed:
        """Make a row that records an error for each place, such as (model, text), where None means all."""
        told: dict[str, Any] = {
            "kind": type(error).__name__,
            "error": encodable(" ".join(str(error).split())) or "no reason given",
            "detail": encodable("".join(traceback.format_tb(error.__traceback__))),
            "what": kind.table,
            "happened": now(),
        }
        told = dict.fromkeys(PLACE) | told
        return cls([Failure(**(told | dict(zip(PLACE, one, strict=False)))) for one in places], error)


# Below this number of tokens, a result takes about the same time at all lengths.
_SHORT = 64

Found = Sequence[Row] | Failed
"""One result of a task: rows that are written together, or a failure."""


@dataclass(frozen=True, eq=False)
class Work:
    """The tasks of one kind, such as constants or bounds, that are left to do in a study, in their order."""

    kind: type[Row]  #: The class of the requested rows.
    words: str  #: Their plural noun, such as "constants".
    tasks: Sequence[Task]
    kept: int = 0  #: The number of requested rows that the store already has.
    failed: Sequence[Failed] = ()  #: The computations that are impossible.
    share: int = 0  #: Of a figure: how many of its tasks these are, as a reader counts them.


class Task(ABC):
    """One computation of a study, such as measuring constants at one length, whose results are rows."""

    kind: type[Row]  #: The class of the requested rows; there may also be rows of other classes.
    essential: ClassVar[bool] = True  #: Whether a failure ends the run, unless it is to keep going.
    model: str  #: The name of the needed model. If it cannot be loaded, all its tasks are skipped.
    n: int  #: The number of tokens of each sequence.
    size: int  #: The number of results that the task computes; a result is a row of the store, or several.

    @property
    def work(self) -> float:
        """An estimate of the work of the task, in arbitrary units: results times tokens."""
        return self.size * max(self.n, _SHORT)

    @property
    def words(self) -> str:
        """A short description of the task for progress messages."""
        return self.model

    def count(self, rows: Sequence[Row]) -> int:
        """Return how many results of the task the given rows contain."""
        return sum(isinstance(row, self.kind) for row in rows)

    def packed(self) -> Self:
        """Return the task with all data that it needs, ready to be sent to another process."""
        return self

    @abstractmethod
    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute the missing rows, and yield lists of rows, each to be written in one transaction."""

    def failed(self, error: Exception) -> Failed:
        """Record an error in one row, which stands for all missing rows of the task."""
        return Failed.of(error, self.kind, (self.model,))


@dataclass(frozen=True, eq=False)
class SequenceTask(Task):
    """A task that computes rows, such as constants, at sequences of one model, text, length and scope."""

    plan: Plan
    subject: Subject
    n: int
    scope: str
    starts: Mapping[int, int]  #: The first token of each sample, in the order of the batch.
    missing: frozenset[tuple[Any, ...]]  #: The keys of the rows that the store does not have.
    data: SequenceData | None = None  #: The inputs of the sequences, once the task is packed.

    @property
    def size(self) -> int:  # type: ignore[override]
        """How many rows the task computes: those that the store does not have yet."""
        return len(self.missing)

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model in results."""
        return self.subject.model.label

    @property
    def words(self) -> str:
        """A short description for progress messages: the model and the length."""
        return f"{self.model}, n = {self.n}"

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers that have missing rows in the store."""
        return tuple(sorted({key[1] for key in self.missing}))

    def packed(self) -> Self:
        """Return the task with the inputs of its sequences, ready to be sent to another process."""
        at = (self.subject.feed, list(self.starts.values()), self.n)
        return replace(self, data=SequenceData.of(*at, worded=0 in self.starts))

    def found(self, models: Models | None) -> Iterator[Found]:
        """Load the model, compute the rows that are missing in the store, and yield them."""
        assert models is not None
        try:
            model = models.load_for(self.subject)
        except Exception as error:
            yield Failed.of(error, self.kind, (self.model,))
        else:
            yield from self.computed(model)

    @abstractmethod
    def computed(self, model: Any) -> Iterator[Found]:
        """Compute the missing rows with the loaded model, and yield them."""

    def sites(self, model: Any) -> Iterator[Any]:
        """Run the model once; yield each layer or head with its input tokens, or why it is not captured."""
        assert self.data is not None
        given = (model, self.data.inputs(self.plan.device), self.subject, self.scope)
        how = (self.n, self.plan.output, self.plan.side)
        yield from each_if_not_all(
            self.layers, lambda layers: capture_sites(*given, layers, *how), self._no_layer
        )

    def _no_layer(self, error: Exception, layer: int) -> Failed:
        return self.failed(error, (layer, None), [None])

    def failed(
        self,
        error: Exception,
        place: tuple[int | None, int | None] = (None, None),
        samples: Sequence[int | None] = (),
    ) -> Failed:
        """Record an error of the whole task, or only of one layer or head and some samples."""
        where = (self.model, self.subject.text.name, self.scope, *place, self.n)
        return Failed.of(error, self.kind, *((*where, sample) for sample in samples or self.starts))


def each_if_not_all(items: Sequence[Any], take: Any, refused: Any) -> Iterator[Any]:
    """Yield the results of ``take(items)``. If it fails, try each half of the items in the same way; a single
    item that fails yields ``refused(error, item)``.
    """
    try:
        found = take(items)
    except Exception as error:
        if len(items) == 1:
            yield refused(error, items[0])
            return
        found = []
    yield from found
    if not found and len(items) > 1:
        for some in (items[: len(items) // 2], items[len(items) // 2 :]):
            yield from each_if_not_all(some, take, refused)
