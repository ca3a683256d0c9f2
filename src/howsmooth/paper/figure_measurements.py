"""Measure the numbers of a figure, and keep them in the store of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd

from howsmooth.paper.figure_definition import PaperFigure, Request, count_left, task_of
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.plans import Plan
from howsmooth.study.records import FIGURE, FigureRow
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import Models, PreparedStudy
from howsmooth.study.tasks.task import Found, Task, Work

__all__ = ["Bench", "Key", "Unit", "Values", "models_for", "opened_bench"]

Key = Mapping[str, str | int | None]
"""The values on which a unit of work depends, by name."""

Values = dict[str, Any]
"""A row of a figure: numbers and words, by name."""


@dataclass(frozen=True, eq=False)
class Unit(Task):
    """A unit of a figure's work: the function ``measure``, whose rows are stored together. ``key`` has all
    values on which the rows depend; ``words`` describes the unit in progress messages.

    With ``sites``, the function takes the result of ``sites()``: layers of a model, which are captured in
    this process also if the rows are computed on a worker.
    """

    key: Key
    measure: Callable[..., Iterable[Values]]
    words: str = ""
    sites: Callable[[], Any] | None = None

    kind = FigureRow
    size = 1

    @property
    def name(self) -> str:
        """The key as JSON, under which the store keeps the rows."""
        return json.dumps(dict(self.key), sort_keys=True, ensure_ascii=False)

    @property
    def model(self) -> str:  # type: ignore[override]
        """The name of the model, empty without one."""
        return str(self.key.get("model", ""))

    @property
    def n(self) -> int:  # type: ignore[override]
        """The number of tokens."""
        return int(self.key.get("n") or 1)

    def count(self, rows: object) -> int:
        """Return 1, because all rows of the unit count as one result."""
        return 1

    def packed(self) -> Unit:
        """Return the unit with the captured layers that it needs, ready to be sent to another process."""
        if self.sites is None:
            return self
        return replace(self, measure=partial(self.measure, self.sites()), sites=None)

    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute all rows of the unit and yield them as one list; yield a failure if an error occurs."""
        place = self.model, str(self.key.get("text", "")), self.name
        try:
            rows = [FigureRow(*place, at, json.dumps(one)) for at, one in enumerate(self.measure())]
        except Exception as error:
            yield self.failed(error)
        else:
            yield rows


@dataclass(frozen=True, eq=False)
class Bench(Request):
    """All that is needed to measure one figure: the request, the store, the workers and the runner.

    ``made`` says for the HTML page how the numbers were made. ``studies`` are the models and texts of the
    figure. Figures add entries to both.
    """

    store: Store
    means: Means
    runner: Runner
    made: dict[str, str] = field(default_factory=dict)
    studies: list[PreparedStudy] = field(default_factory=list)

    def begin(self) -> None:
        """Create the store of the figure if needed, and record its models and texts."""
        self.store.begin(FIGURE, {"seed": self.options.seed})
        for study in self.studies:
            study.begin()

    @property
    def loader(self) -> Models:
        """The loader of models, which all figures share."""
        assert self.means.models is not None
        return self.means.models

    def kept(self, units: Iterable[Unit]) -> pd.DataFrame:
        """Compute the units of work whose rows the store lacks. Return the rows of all units as one table,
        whose first columns are the entries of the units' keys.
        """
        units = list(units)
        known = self.store.keys(FigureRow, ("unit",))
        left = [unit for unit in units if (unit.name,) not in known]
        self.begin()
        share = len({task_of(unit.key) for unit in left})
        self.runner.carry_out(Work(FigureRow, "units", left, len(units) - len(left), share=share))
        rows = ((unit, row) for unit in units for row, _ in self.store.rows(FigureRow, unit=unit.name))
        return pd.DataFrame([{**unit.key, **json.loads(row.numbers)} for unit, row in rows])


def models_for(options: FigureOptions) -> Models:
    """Return a loader of models, with the seed, the device and the dtype of the options."""
    return Models(Plan(seed=options.seed, device=options.device, dtype=options.dtype))


@contextmanager
def opened_bench(
    figure: PaperFigure, options: FigureOptions, folder: str | os.PathLike[str], means: Means
) -> Iterator[Bench]:
    """Open the store in a figure's folder, and yield all that is needed to measure the figure."""
    tasks = count_left(Request(figure, options), folder)
    with Store.open(folder, late=True) as store:
        store.check(FIGURE, {"seed": options.seed})
        runner = Runner(store, means, means.models, options.device, tasks)
        bench = Bench(figure, options, store, means, runner)
        yield bench
        bench.runner.finish()
