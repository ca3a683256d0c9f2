"""Define a figure (a measuring and a drawing function), the context it is measured in, and its findings.

Each figure has its own module; :data:`howsmooth.paper.reproduction.FIGURES` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib import rc_context

from howsmooth.paper.figure_options import FigureOptions
from howsmooth.paper.plotting import PAPER, Picture
from howsmooth.paper.row_cache import Key, Row, kept_rows
from howsmooth.study.measured_models import Models
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = ["Figure", "FigureContext", "Finding", "models_for"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class FigureContext:
    """What a figure needs to measure: the user's options, its folder, the models, the progress listener.

    The folder keeps finished work, ``models`` the last model for the next figure, and ``command``, what the
    user typed, is recorded with the measurements. The work in this context takes the share of the figure's
    time from ``begin`` to ``end``. ``made`` says how the numbers were made, for the page: models, texts with
    their digests, and settings, by name. All contexts of a figure share it, and measuring functions add to
    it.
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
        """Report progress to the listener: the share of this work that is done, and a message."""
        self.listener.advance(self.begin + share * (self.end - self.begin), 1.0, words)

    def parts(self, costs: Sequence[float]) -> list[FigureContext]:
        """Return one context for each part of the work; the parts are measured one after another.

        Each part gets a share of the progress in proportion to its entry of ``costs``.
        """
        scale = (self.end - self.begin) / sum(costs)
        ends = [self.begin + scale * cost for cost in accumulate(costs, initial=0.0)]
        return [replace(self, begin=begin, end=end) for begin, end in pairwise(ends)]

    def each(self, items: Sequence[_T], costs: Sequence[float] = ()) -> Iterator[tuple[_T, FigureContext]]:
        """Yield each item of work with the context that reports the progress of this item.

        The items' shares of the progress are in proportion to ``costs``, or equal without costs.
        """
        return zip(items, self.parts(costs or [1.0] * len(items)), strict=True)

    def rows(self, key: Key, measure: Callable[[], Iterable[Row]]) -> list[Row]:
        """Measure rows once, and from then on read them from a file; add the key to each row.

        ``key`` holds all values on which the rows depend.

        Raises
        ------
        StoreError
            If the file cannot be written, or is damaged.

        """
        return [{**key, **row} for row in kept_rows(self.folder / "units", key, measure)]


def models_for(options: FigureOptions) -> Models:
    """Return the loader of models, which takes the seed, device and dtype from the options."""
    return Models(Plan(seed=options.seed, device=options.device, dtype=options.dtype))


@dataclass(frozen=True, eq=False)
class Finding:
    """The results that a figure shows: pictures, sentences, tables, and how the numbers were made.

    ``seen`` are sentences whose numbers come from the measurements. A table has a caption before it.
    """

    pictures: list[Picture]
    seen: list[str]
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or a table that belongs to it.

    Attributes
    ----------
    name, title, paper
        The name on the command line, such as ``figure-1``; the title; the place in the paper.
    about
        A few sentences on what it shows, how it is measured, and how it is drawn.
    measure
        A function that measures what the folder of the context lacks, and returns what to show.
    show
        A function that draws the result of ``measure`` into a folder and describes it. It never measures.

    """

    name: str
    title: str
    paper: str
    about: str
    measure: Callable[[FigureContext], Any]
    show: Callable[[Any, Path], Finding]

    def make(self, context: FigureContext) -> Finding:
        """Measure the figure, draw it in the style of the paper, and return its findings.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the options are impossible for this figure, or a file cannot be written.

        """
        found = self.measure(context)
        context.say("", 1.0)
        with rc_context(PAPER):
            return replace(self.show(found, context.folder), made=context.made)
