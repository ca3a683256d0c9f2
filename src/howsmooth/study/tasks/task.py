"""What a task is: something to compute whose rows are written together, here or on a worker."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from howsmooth.study.feeds import Feed, SequenceData
from howsmooth.study.names import encodable
from howsmooth.study.plan import Plan
from howsmooth.study.records import Failure, Row
from howsmooth.study.store import now
from howsmooth.study.subjects import Models, Subject, capture_sites

__all__ = ["Failed", "Found", "SequenceTask", "Task", "Work", "each_if_not_all", "failure_row"]

K = TypeVar("K", bound=tuple[Any, ...])


@dataclass(frozen=True, eq=False)
class Failed:
    """Something that could not be computed.

    Attributes
    ----------
    rows
        What is recorded of it.
    error
        Why.

    """

    rows: Sequence[Failure]
    error: Exception


Found = Sequence[Row] | Failed
"""What comes of a task, step by step: rows that are written together, or a failure."""


@dataclass(frozen=True, eq=False)
class Work:
    """Tasks of one kind that are left to do.

    Attributes
    ----------
    kind
        Which rows are asked for.
    words
        What these are, such as ``"constants"``.
    tasks
        In the order in which they are carried out.
    kept
        How many of the rows asked for the store has.
    failed
        What cannot be done at all, and why.

    """

    kind: type[Row]
    words: str
    tasks: Sequence[Task]
    kept: int = 0
    failed: Sequence[Failed] = ()


class Task(ABC):
    """Something to compute, for a runner.

    Attributes
    ----------
    kind
        Which rows it is for; others may come beside them.
    essential
        Whether a failure ends a run that is not to keep going.
    n
        How many tokens each sequence has.

    """

    kind: ClassVar[type[Row]]
    essential: ClassVar[bool] = True
    n: int

    @property
    @abstractmethod
    def model(self) -> str:
        """The model that it needs: once that cannot be loaded, none of its tasks is tried again."""

    @property
    def size(self) -> int:
        """How many results are asked for: rows, or groups of rows."""
        return 1

    @property
    def alike(self) -> tuple[Any, ...]:
        """What tasks share whose times grow with n alone: at least the kind of rows."""
        return (self.kind.table,)

    @property
    def words(self) -> str:
        """Where it is, for people."""
        return self.model

    def count(self, rows: Sequence[Row]) -> int:
        """Say how many of the rows asked for some that were found are."""
        return sum(isinstance(row, self.kind) for row in rows)

    def packed(self) -> Self:
        """Return the task with all data that it needs, fit to be sent to another process."""
        return self

    @abstractmethod
    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute what is missing, with the models that this process has loaded."""

    def failed(self, error: Exception) -> Failed:
        """Say that the task failed as a whole."""
        return Failed([failure_row(error, self.kind, self.model)], error)


@dataclass(frozen=True, eq=False)
class SequenceTask(Task, Generic[K]):
    """Something to compute at some sequences of one model, text, length and scope.

    Attributes
    ----------
    plan, subject
        What is asked for.
    feed
        What the sequences are cut from; ``None`` in a packed task.
    n, scope
        The length, and what is called attention.
    starts
        The first tokens of the samples, in the order in which they are captured.
    missing
        The keys of the rows that the store does not have.
    data
        The inputs, in a packed task.

    """

    plan: Plan
    subject: Subject
    feed: Feed | None
    n: int
    scope: str
    starts: Mapping[int, int]
    missing: frozenset[K]
    data: SequenceData | None = None

    @property
    def size(self) -> int:
        """How many rows are missing."""
        return len(self.missing)

    @property
    def model(self) -> str:
        """The name under which the model's results stand."""
        return self.subject.model.label

    @property
    def alike(self) -> tuple[Any, ...]:
        """The kind of rows, the model and the scope."""
        return self.kind.table, self.model, self.scope

    @property
    def words(self) -> str:
        """The model and the length."""
        return f"{self.model}, n = {self.n}"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with something missing, whose keys say the scope first and then the layer."""
        return tuple(sorted({key[1] for key in self.missing}))

    def packed(self) -> Self:
        """Return the task with the inputs of its own sequences instead of the whole text."""
        assert self.feed is not None
        data = SequenceData.of(self.feed, list(self.starts.values()), self.n, worded=0 in self.starts)
        return replace(self, feed=None, data=data)

    def found(self, models: Models | None) -> Iterator[Found]:
        """Load the model, and compute what is missing."""
        assert models is not None
        try:
            model = models.load_for(self.subject)
        except Exception as error:
            yield Failed([failure_row(error, self.kind, self.model)], error)
        else:
            yield from self.computed(model)

    @abstractmethod
    def computed(self, model: Any) -> Iterator[Found]:
        """Compute what is missing with the loaded model."""

    def sites(self, model: Any) -> Iterator[Any]:
        """Capture all layers in one pass or, if that fails, those that can be captured, and failures."""
        yield from each_if_not_all(self.layers, lambda layers: self._captured(model, layers), self._no_layer)

    def _captured(self, model: Any, layers: Sequence[int]) -> list[Any]:
        assert self.data is not None
        inputs = self.data.inputs(self.plan.device)
        return capture_sites(model, inputs, self.subject, self.scope, layers, self.n)

    def _no_layer(self, error: Exception, layer: int) -> Failed:
        return self.failed(error, (layer, None), [None])

    def failed(
        self,
        error: Exception,
        place: tuple[int | None, int | None] = (None, None),
        samples: Sequence[int | None] = (),
    ) -> Failed:
        """Say that the task failed, as a whole or at one layer and head, and for some samples."""
        where = (self.model, self.subject.text.name, self.scope, *place, self.n)
        return Failed(
            [failure_row(error, self.kind, *where, sample) for sample in samples or self.starts], error
        )


def each_if_not_all(items: Sequence[int], take: Any, refused: Any) -> Iterator[Any]:
    """Take all items together or, if that fails, each that can be taken and ``refused`` for the others."""
    try:
        found = take(items)
    except Exception:
        found = []
    if found:
        yield from found
        return
    for item in items:
        try:
            found = take([item])
        except Exception as error:
            yield refused(error, item)
        else:
            yield from found


def failure_row(
    error: Exception,
    kind: type[Row],
    model: str,
    text: str | None = None,
    scope: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    n: int | None = None,
    sample: int | None = None,
) -> Failure:
    """Record a failure of a model, of a text with it, of a layer and head, or of a sample there."""
    return Failure(
        model=model,
        text=text,
        scope=scope,
        layer=layer,
        head=head,
        n=n,
        sample=sample,
        kind=type(error).__name__,
        error=encodable(" ".join(str(error).split())) or "no reason given",
        detail=encodable("".join(traceback.format_tb(error.__traceback__))),
        what=kind.table,
        happened=now(),
    )
