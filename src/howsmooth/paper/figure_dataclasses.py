"""Define the dataclasses of a figure: ``Figure`` (how the figure is measured and drawn), ``FigureContext``
(the options and models for the measurement), and ``Finding`` (its results).

Each figure has a module of its own; :data:`howsmooth.paper.reproduction.FIGURES` lists all figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib import rc_context

from howsmooth.paper.plotting import PAPER, Picture
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.paper.row_cache import Key, Row, kept_rows
from howsmooth.study.measured_models import Models
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = ["Figure", "FigureContext", "Finding", "models_for"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class FigureContext:
    """The data that a figure needs for its measurement: the options of the user, a folder, the models, and a
    listener that is told the progress.

    The measurements of the figure are kept in ``folder``. ``models`` keeps the last loaded model for the next
    figure. ``command`` is the command that the user typed, and is recorded with the measurements. ``begin``
    and ``end`` say which share of the figure's running time the work in this context takes. ``made`` says how
    the numbers were made, for the HTML page: the models, the texts with their hashes, and the settings. All
    contexts of one figure share this dictionary, and the measuring functions add entries to it.
    """

    options: FigureOptions
    folder: Path
    models: Models
    listener: Listener = SILENT
    command: str = ""
    begin: float = 0.0
    end: float = 1.0
    made: dict[str, str] = field(default_factory=dict)

    def say(self, words: str, share: float = 0.0) -> None:
        """Report a message to the progress listener, with the share of the work of this context
        that is done.
        """
        self.listener.advance(self.begin + share * (self.end - self.begin), 1.0, words)

    def parts(self, costs: Sequence[float]) -> list[FigureContext]:
        """Split the share of the figure's running time that this context covers, and return one context for
        each part, so that progress is told part by part.

        The time of a part is assumed to be proportional to its entry of ``costs``.
        """
        scale = (self.end - self.begin) / sum(costs)
        ends = [self.begin + scale * cost for cost in accumulate(costs, initial=0.0)]
        return [replace(self, begin=begin, end=end) for begin, end in pairwise(ends)]

    def each(self, items: Sequence[_T], costs: Sequence[float] = ()) -> Iterator[tuple[_T, FigureContext]]:
        """Yield each of the given items together with a context that reports the progress of the work on this
        item.

        The time of an item is assumed to be proportional to its entry of ``costs``; without costs, all items
        are assumed to take the same time.
        """
        return zip(items, self.parts(costs or [1.0] * len(items)), strict=True)

    def rows(self, key: Key, measure: Callable[[], Iterable[Row]]) -> list[Row]:
        """Return the rows that ``measure`` computes, with the entries of ``key`` added to each row; read the
        rows from a cache file if an earlier call wrote them.

        ``key`` contains all values on which the rows depend.

        Raises
        ------
        StoreError
            If the file cannot be written, or is damaged.

        """
        return [{**key, **row} for row in kept_rows(self.folder / "units", key, measure)]


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
    measure
        A function that measures what is not yet in the folder of the context, and returns the measurements.
    show
        A function that draws the measurements into a folder and describes them. It never measures.

    """

    name: str
    title: str
    paper: str
    about: str
    measure: Callable[[FigureContext], Any]
    show: Callable[[Any, Path], Finding]

    def make(self, context: FigureContext) -> Finding:
        """Measure the figure, draw it in the style of the paper, and return its pictures, sentences and
        tables.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the options are impossible for this figure, or a file cannot be written.

        """
        found = self.measure(context)
        context.say("", 1.0)
        with rc_context(PAPER):
            return replace(self.show(found, context.folder), made=context.made)
