"""Define the dataclasses of a figure: ``Figure`` (how the figure is measured and drawn), ``FigurePlan`` (its
tasks), and ``Finding`` (its results).

Each figure has a module of its own; :data:`howsmooth.paper.reproduction.FIGURES` lists all figures.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context

from howsmooth.paper.figure_tasks import SiteTask, UnitTask, tasks_left, values_of
from howsmooth.paper.plotting import PAPER, Picture
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.measured_models import Models
from howsmooth.study.plans import Plan
from howsmooth.study.prepared_study import PreparedStudy
from howsmooth.study.records import FIGURE
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import Store
from howsmooth.study.tasks.task import Work

__all__ = ["Figure", "FigureContext", "FigurePlan", "Finding", "Units", "models_for"]


@dataclass(frozen=True)
class FigureContext:
    """The data from which a figure plans its tasks: the options of the user, the store of the figure, and the
    means of carrying out tasks.

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


def models_for(options: FigureOptions) -> Models:
    """Return a loader of models that uses the seed, the device and the dtype of the given options."""
    return Models(Plan(seed=options.seed, device=options.device, dtype=options.dtype))


class FigurePlan(ABC):
    """What a figure measures: its tasks, and how their stored rows are read."""

    @abstractmethod
    def works(self) -> Iterator[Work]:
        """Yield the tasks that are left to do, kind by kind. The tasks of a kind may depend on rows of the
        kinds before.
        """

    @abstractmethod
    def found(self) -> Any:
        """Return the measurements of the figure from its store, after all tasks were carried out."""


@dataclass(frozen=True, eq=False)
class Units(FigurePlan):
    """The plan of a figure whose tasks are independent of each other, and whose rows form one table."""

    context: FigureContext
    tasks: Sequence[UnitTask | SiteTask]
    words: str

    def works(self) -> Iterator[Work]:
        """Yield the tasks whose rows the store does not have."""
        yield tasks_left(self.context.store, self.tasks, self.words)

    def found(self) -> pd.DataFrame:
        """Return the rows of all tasks as one table."""
        return pd.DataFrame(values_of(self.context.store, self.tasks))


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
        A function that checks the options and returns the plan of the measurements.
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
        """Measure what the store in a folder does not have; return all measurements, and sentences that say
        how they were made.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the options are impossible for this figure, before anything is measured; if a measurement
            fails; or if the store cannot be written.

        """
        with Store.open(folder, late=True) as store:
            context = FigureContext(options, store, means)
            store.check(FIGURE, context.identity)
            plan = self.plan(context)
            context.begin()
            runner = Runner(store, means, context.models, options.device)
            for work in plan.works():
                runner.carry_out(work)
            runner.finish()
            return plan.found(), context.made

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
