"""Define the tasks that compute the rows of a figure, for the runner and the store of a study."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from howsmooth.study.measured_models import Models
from howsmooth.study.records import FigureRow, Row
from howsmooth.study.store import Store
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Task, Work

__all__ = ["Key", "SiteTask", "UnitTask", "Values", "tasks_left", "values_of"]

Key = Mapping[str, str | int | None]
"""The values on which a unit of work depends, by name."""

Values = dict[str, Any]
"""A row of a figure: numbers and words, by name."""


@dataclass(frozen=True, eq=False)
class UnitTask(Task):
    """A task that computes the rows of one unit of a figure without a loaded model.

    ``key`` contains all values on which the rows depend, and identifies the unit in the store. ``measure``
    computes the rows. ``label`` describes the unit in progress messages. ``group`` is equal for units whose
    running times depend on the number of tokens ``n`` alone.
    """

    kind = FigureRow
    size = 1

    key: Key
    measure: Callable[[], Iterable[Values]]
    label: str
    group: tuple[Any, ...] = ()
    n: int = 1

    @property
    def words(self) -> str:
        """A short description of the unit for progress messages."""
        return self.label

    @property
    def alike(self) -> tuple[Any, ...]:
        """The key that is equal for tasks with similar running times."""
        return (FigureRow.table, *self.group)

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model in the key, if any."""
        return str(self.key.get("model", ""))

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, since all rows of a unit are one result."""
        return 1

    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute the rows of the unit, and yield them together."""
        try:
            rows = _rows(self.key, self.measure())
        except Exception as error:
            yield self.failed(error)
        else:
            yield rows


@dataclass(frozen=True, eq=False)
class SiteTask(SequenceTask):
    """A task that computes the rows of one unit of a figure at captured layers of a model.

    ``key`` contains all values on which the rows depend. ``measure`` computes rows from one captured layer or
    head, a :class:`howsmooth.models.Site`.
    """

    kind = FigureRow
    size = 1  # type: ignore[assignment]

    key: Key = field(default_factory=dict)
    measure: Callable[[Any], Iterable[Values]] = list

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, since all rows of a unit are one result."""
        return 1

    def computed(self, model: Any) -> Iterator[Found]:
        """Compute the rows of all layers, and yield them together; yield a failure if one layer fails."""
        values: list[Values] = []
        try:
            for site in self.sites(model):
                if isinstance(site, Failed):
                    yield site
                    return
                values += self.measure(site)
        except Exception as error:
            yield self.failed(error)
        else:
            yield _rows(self.key, values)


def tasks_left(store: Store, tasks: Sequence[UnitTask | SiteTask], words: str) -> Work:
    """List those tasks whose rows the store does not have. ``words`` is a plural noun for the tasks."""
    known = store.keys(FigureRow, ("unit",))
    left = [task for task in tasks if (_unit(task.key),) not in known]
    return Work(FigureRow, words, left, len(tasks) - len(left))


def values_of(store: Store, tasks: Sequence[UnitTask | SiteTask]) -> list[Values]:
    """Return the stored rows of some tasks in the order of the tasks. Each row begins with the values of the
    task's key.
    """
    return [
        {**task.key, **json.loads(row.numbers)}
        for task in tasks
        for row, _ in store.rows(FigureRow, unit=_unit(task.key))
    ]


def _unit(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True, ensure_ascii=False)


def _rows(key: Key, values: Iterable[Values]) -> list[FigureRow]:
    model, text = (str(key.get(name, "")) for name in ("model", "text"))
    return [FigureRow(model, text, _unit(key), number, json.dumps(one)) for number, one in enumerate(values)]
