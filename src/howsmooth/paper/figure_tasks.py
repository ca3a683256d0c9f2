"""Define the tasks that compute the rows of a figure. The runner of a study carries them out, and its store
keeps the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from howsmooth.study.records import FigureRow, Row
from howsmooth.study.study_preparation import Models
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Task

__all__ = ["Key", "SiteTask", "UnitTask", "Values", "unit_of"]

Key = Mapping[str, str | int | None]
"""The values on which a unit of work depends, by name."""

Values = dict[str, Any]
"""A row of a figure: numbers and words, by name."""


class _OfUnit(Task):
    """Computes one unit of a figure, rows that are stored together and count as one result."""

    kind = FigureRow
    size = 1

    key: Key

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, because all rows of the task count as one result."""
        return 1


@dataclass(frozen=True, eq=False)
class UnitTask(_OfUnit):
    """A task that computes one unit of a figure, a set of rows that are stored together, without a loaded
    model.

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
        """A short description of the task for progress messages."""
        return self.label

    @property
    def alike(self) -> tuple[Any, ...]:
        """A tuple that is equal for tasks whose running times differ only because of their token counts."""
        return (FigureRow.table, *self.group)

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model in the key of the task, or empty text if the key names no model."""
        return str(self.key.get("model", ""))

    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute all rows of the task and yield them as one list; yield a failure if an error occurs."""
        try:
            rows = _rows(self.key, self.measure())
        except Exception as error:
            yield self.failed(error)
        else:
            yield rows


@dataclass(frozen=True, eq=False)
class SiteTask(_OfUnit, SequenceTask):
    """A task that computes one unit of a figure, a set of rows that are stored together, at captured layers
    of a model.

    ``key`` contains all values on which the rows depend. ``measure`` computes rows from one captured layer or
    head, a :class:`howsmooth.models.Site`.
    """

    key: Key = field(default_factory=dict)
    measure: Callable[[Any], Iterable[Values]] = list

    def computed(self, model: Any) -> Iterator[Found]:
        """Compute the rows of all layers, and yield them as one list. If a layer fails, yield only the
        failure of this layer.
        """
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
    """Return the name under which the store keeps the rows with a given key: the key as JSON."""
    return json.dumps(dict(key), sort_keys=True, ensure_ascii=False)


def _rows(key: Key, values: Iterable[Values]) -> list[FigureRow]:
    model, text = (str(key.get(name, "")) for name in ("model", "text"))
    return [
        FigureRow(model, text, unit_of(key), number, json.dumps(one)) for number, one in enumerate(values)
    ]
