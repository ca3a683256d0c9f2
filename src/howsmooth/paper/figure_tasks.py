"""Define the tasks that compute the rows of a figure, for the runner and the store of a study."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from howsmooth.study.measured_models import Models
from howsmooth.study.records import FigureRow, Row
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Task

__all__ = ["Key", "SiteTask", "UnitTask", "Values", "unit_of"]

Key = Mapping[str, str | int | None]
"""The values on which a unit of work depends, by name."""

Values = dict[str, Any]
"""A row of a figure: numbers and words, by name."""


class _OfUnit(Task):
    """The base class of tasks that compute all rows of one unit, which are one result."""

    kind = FigureRow
    size = 1

    key: Key

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, since all rows of a unit are one result."""
        return 1


@dataclass(frozen=True, eq=False)
class UnitTask(_OfUnit):
    """A task that computes the rows of one unit of a figure without a loaded model.

    ``key`` contains all values on which the rows depend, and identifies the unit in the store. ``measure``
    computes the rows. ``label`` describes the unit in progress messages. ``group`` is equal for units whose
    running times depend on the number of tokens ``n`` alone.
    """

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

    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute the rows of the unit, and yield them together."""
        try:
            rows = _rows(self.key, self.measure())
        except Exception as error:
            yield self.failed(error)
        else:
            yield rows


@dataclass(frozen=True, eq=False)
class SiteTask(_OfUnit, SequenceTask):
    """A task that computes the rows of one unit of a figure at captured layers of a model.

    ``key`` contains all values on which the rows depend. ``measure`` computes rows from one captured layer or
    head, a :class:`howsmooth.models.Site`.
    """

    key: Key = field(default_factory=dict)
    measure: Callable[[Any], Iterable[Values]] = list

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


def unit_of(key: Key) -> str:
    """Return the name of a unit in the store: its key as JSON."""
    return json.dumps(dict(key), sort_keys=True, ensure_ascii=False)


def _rows(key: Key, values: Iterable[Values]) -> list[FigureRow]:
    model, text = (str(key.get(name, "")) for name in ("model", "text"))
    return [
        FigureRow(model, text, unit_of(key), number, json.dumps(one)) for number, one in enumerate(values)
    ]
