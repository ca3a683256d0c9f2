"""Define the dataclasses of a figure: ``Figure`` says how the figure is measured and drawn, ``FigureContext``
contains the data that are needed to plan it, and ``Finding`` contains its results.

Each figure has a module of its own; :data:`howsmooth.paper.reproduction.FIGURES` lists all figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context

from howsmooth.paper.figure_tasks import SiteTask, UnitTask, unit_of
from howsmooth.paper.plotting import PAPER, Picture
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.plans import Plan
from howsmooth.study.records import FIGURE, FigureRow
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import Models, PreparedStudy
from howsmooth.study.tasks.task import Work

__all__ = ["Figure", "FigureContext", "FigurePlan", "Finding", "models_for"]

FigurePlan = Generator[Work, None, Callable[[], Any]]
"""The plan of what a figure measures: it yields the tasks that are left to do, kind by kind, and returns a
function that reads the measurements from the store. The next kind is planned when the tasks of the kind
before have been carried out."""


@dataclass(frozen=True)
class FigureContext:
    """The data from which a figure plans its tasks: the options of the user, the store of the figure, and the
    workers and settings with which tasks are carried out.

    ``made`` says how the numbers were made, for the HTML page: the models, the texts with their hashes, and
    the settings. ``studies`` are the models and texts of the figure. Plans add entries to both.
    """

    options: FigureOptions
    store: Store
    means: Means
    made: dict[str, str] = field(default_factory=dict)
    studies: list[PreparedStudy] = field(default_factory=list)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that all rows of the figure's store share."""
        return {"seed": self.options.seed}

    @property
    def models(self) -> Models:
        """The loader of models; it keeps the last model for the next figure."""
        assert self.means.models is not None
        return self.means.models

    def begin(self) -> None:
        """Create the store of the figure if needed, and record the models and texts there."""
        self.store.begin(FIGURE, self.identity)
        for study in self.studies:
            study.begin()

    def units(self, tasks: Sequence[UnitTask | SiteTask], words: str) -> FigurePlan:
        """Yield one :class:`~howsmooth.study.tasks.task.Work` with the tasks whose rows the store does not
        have. Then return a function that reads the rows of all tasks into one table.

        ``words`` is a plural noun for the tasks. A row begins with the values of its task's key.
        """
        known = self.store.keys(FigureRow, ("unit",))
        left = [task for task in tasks if (unit_of(task.key),) not in known]
        yield Work(FigureRow, words, left, len(tasks) - len(left))

        def read() -> pd.DataFrame:
            stored = (
                (task, row) for task in tasks for row, _ in self.store.rows(FigureRow, unit=unit_of(task.key))
            )
            return pd.DataFrame([{**task.key, **json.loads(row.numbers)} for task, row in stored])

        return read


def models_for(options: FigureOptions) -> Models:
    """Return a loader of models that uses the seed, the device and the dtype of the given options."""
    return Models(Plan(seed=options.seed, device=options.device, dtype=options.dtype))


@dataclass(frozen=True, eq=False)
class Finding:
    """The results of a figure: pictures, sentences, tables, and how the numbers were made.

    The sentences in ``seen`` describe the results; their numbers come from the measurements. Each table is a
    pair of a caption and a DataFrame.
    """

    pictures: list[Picture]
    seen: list[str]
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or an additional figure or table of this library on a statement of the paper.

    Attributes
    ----------
    name, title, paper
        The name on the command line, such as ``figure-1``; the title; the place in the paper.
    about
        A few sentences that say what the figure shows, how it is measured, and how it is drawn.
    plan
        A function that checks the options, and plans the measurements.
    show
        A function that draws the measurements into a folder and describes them. It never measures.

    """

    name: str
    title: str
    paper: str
    about: str
    plan: Callable[[FigureContext], FigurePlan]
    show: Callable[[Any, Path], Finding]

    def measure(
        self, options: FigureOptions, folder: str | os.PathLike[str], means: Means
    ) -> tuple[Any, dict[str, str]]:
        """Carry out the measurements that the store in a folder lacks. The first result contains all
        measurements of the figure, the second contains sentences that say how they were made.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the options are impossible for this figure, before anything is measured; if a measurement
            fails; or if the store cannot be written.

        """
        with Store.open(folder, late=True) as store:
            context = FigureContext(options, store, means)
            store.check(FIGURE, context.identity)
            runner = Runner(store, means, context.models, options.device)
            plan = self.plan(context)
            while True:
                try:
                    work = next(plan)
                except StopIteration as end:
                    runner.finish()
                    return end.value(), context.made
                context.begin()
                runner.carry_out(work)

    def make(self, options: FigureOptions, folder: str | os.PathLike[str], means: Means) -> Finding:
        """Measure the figure, draw it in the style of the paper, and return its pictures, sentences and
        tables. The folder receives the store and the pictures.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            As :meth:`measure`, and if a picture cannot be written.

        """
        found, made = self.measure(options, folder, means)
        with rc_context(PAPER):
            return replace(self.show(found, Path(folder)), made=made)
