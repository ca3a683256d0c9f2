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
    """A failed computation of a study: its error, and the rows that record the failure in the store."""

    rows: Sequence[Failure]
    error: Exception

    @classmethod
    def of(cls, error: Exception, kind: type[Row], *places: Sequence[Any]) -> Failed:
        """Turn an error into a :class:`Failed`, with one failure row for each of ``places``.

        Each place, such as a layer at one length, is a tuple with the first values of
        :data:`~howsmooth.study.records.PLACE`. A value that is missing or None means that the computation
        failed for all values: without a layer, for all layers.
        """
        told: dict[str, Any] = {
            "kind": type(error).__name__,
            "error": encodable(" ".join(str(error).split())) or "no reason given",
            "detail": encodable("".join(traceback.format_tb(error.__traceback__))),
            "what": kind.table,
            "happened": now(),
        }
        everywhere: dict[str, Any] = dict.fromkeys(PLACE)
        rows = [Failure(**(everywhere | dict(zip(PLACE, one, strict=False)) | told)) for one in places]
        return cls(rows, error)


Found = Sequence[Row] | Failed
"""One result of a task: rows that are written together, or a failure."""


@dataclass(frozen=True, eq=False)
class Work:
    """The tasks of one kind, such as constants or bounds, that are left to do in a study.

    ``kind`` is the class of the requested rows, ``words`` their plural noun, such as ``"constants"``. The
    tasks are carried out in their order. ``kept`` counts requested rows that the store already has,
    ``failed`` has the computations that are impossible.
    """

    kind: type[Row]
    words: str
    tasks: Sequence[Task]
    kept: int = 0
    failed: Sequence[Failed] = ()


class Task(ABC):
    """One computation of a study, such as measuring constants at one length, whose results are rows.

    Attributes
    ----------
    kind
        The class of the requested rows; the task may also produce rows of other classes.
    essential
        Whether a failure ends the run, unless the run is to keep going.
    model
        The name of the model that the task needs. If it cannot be loaded, all its tasks are skipped.
    n
        The number of tokens of each sequence.
    size
        The number of results that the task computes; a result is a row of the store, or several.

    """

    kind: type[Row]
    essential: ClassVar[bool] = True
    model: str
    n: int
    size: int

    @property
    def alike(self) -> tuple[Any, ...]:
        """The key that is equal for tasks with similar running times, such as (table, model, scope).

        So the times of finished tasks predict the times of other tasks with the same key.
        """
        return (self.kind.table,)

    @property
    def words(self) -> str:
        """A short description of the task for progress messages."""
        return self.model

    def count(self, rows: Sequence[Row]) -> int:
        """Return the number of results that the given rows of the task contain.

        All rows of the task together contain ``size`` results.
        """
        return sum(isinstance(row, self.kind) for row in rows)

    def packed(self) -> Self:
        """Return the task with all data that it needs, ready to be sent to another process."""
        return self

    @abstractmethod
    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute the missing rows, and yield lists of rows, each to be written in one transaction.

        ``models`` keeps the loaded models of this process.
        """

    def failed(self, error: Exception) -> Failed:
        """Turn an error into a :class:`Failed`, with one row that stands for all missing rows of the task."""
        return Failed.of(error, self.kind, (self.model,))


@dataclass(frozen=True, eq=False)
class SequenceTask(Task):
    """A task that computes rows, such as constants, at sequences of one model, text, length and scope.

    ``starts`` has the first token of each sample, in the order of the batch; ``missing`` the keys of the rows
    that the store does not have. ``data`` are the inputs of the sequences, and ``None`` until the task is
    packed.
    """

    plan: Plan
    subject: Subject
    n: int
    scope: str
    starts: Mapping[int, int]
    missing: frozenset[tuple[Any, ...]]
    data: SequenceData | None = None

    @property
    def size(self) -> int:  # type: ignore[override]
        """The number of missing rows that the task computes."""
        return len(self.missing)

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model in results."""
        return self.subject.model.label

    @property
    def alike(self) -> tuple[Any, ...]:
        """The key that is equal for tasks with similar running times: the table, the model and the scope."""
        return self.kind.table, self.model, self.scope

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
        starts = list(self.starts.values())
        data = SequenceData.of(self.subject.feed, starts, self.n, worded=0 in self.starts)
        return replace(self, data=data)

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
        """Run the model once; yield each layer or head of the task as a map, with its input tokens.

        If that fails, try the layers one by one, and yield a failure for each layer that cannot be captured.
        """
        assert self.data is not None
        inputs = self.data.inputs(self.plan.device)

        def captured(layers: Sequence[int]) -> list[Any]:
            plan = self.plan
            return capture_sites(
                model, inputs, self.subject, self.scope, layers, self.n, plan.output, plan.side
            )

        yield from each_if_not_all(self.layers, captured, self._no_layer)

    def _no_layer(self, error: Exception, layer: int) -> Failed:
        return self.failed(error, (layer, None), [None])

    def failed(
        self,
        error: Exception,
        place: tuple[int | None, int | None] = (None, None),
        samples: Sequence[int | None] = (),
    ) -> Failed:
        """Turn an error of the task, or of one layer and head in the task, into a :class:`Failed`.

        Without ``samples``, all samples of the task failed.
        """
        where = (self.model, self.subject.text.name, self.scope, *place, self.n)
        return Failed.of(error, self.kind, *((*where, sample) for sample in samples or self.starts))


def each_if_not_all(items: Sequence[int], take: Any, refused: Any) -> Iterator[Any]:
    """Try all items together; if that fails, try each item alone.

    Yield the results of ``take(items)``. If it fails or returns nothing, yield the results of
    ``take([item])`` for each item, or ``refused(error, item)`` for an item that fails alone.
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
        for item in items:
            yield from each_if_not_all([item], take, refused)
