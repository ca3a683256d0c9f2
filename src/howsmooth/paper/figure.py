"""What a figure is: it measures on a bench, and shows what it found in pictures, sentences and tables.

Each figure is a module of its own, which :data:`howsmooth.paper.produce.FIGURES` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib import rc_context

from howsmooth.paper.drawing import PAPER, Picture
from howsmooth.paper.request import Request
from howsmooth.paper.units import Key, Row, kept_rows
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Listener, Silent
from howsmooth.study.subjects import Models

__all__ = ["Bench", "Figure", "Finding", "models_for"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Bench:
    """Where a figure is measured: what is asked, and what was finished before.

    Attributes
    ----------
    request
        What the user asks.
    folder
        The figure's own, in which finished work is kept.
    models
        Loads models, and keeps the last one, also for the next figure.
    listener
        Told how far the figure is.
    command
        As typed, to be recorded with the measurements.
    begin, end
        The shares of the figure's time between which this bench works.
    made
        How the numbers come about, by name, for the page: models, texts with their digests, settings. One
        dictionary for all parts of a bench; whoever measures adds to it.

    """

    request: Request
    folder: Path
    models: Models
    listener: Listener = field(default_factory=Silent)
    command: str = ""
    begin: float = 0.0
    end: float = 1.0
    made: dict[str, str] = field(default_factory=dict)

    def say(self, words: str, share: float = 0.0) -> None:
        """Tell that this share of the bench's own time is over."""
        self.listener.advance(self.begin + share * (self.end - self.begin), 1.0, words)

    def parts(self, costs: Sequence[float]) -> list[Bench]:
        """Divide the bench's time in proportion to some costs: one bench for each."""
        scale = (self.end - self.begin) / sum(costs)
        ends = [self.begin + scale * cost for cost in accumulate(costs, initial=0.0)]
        return [replace(self, begin=begin, end=end) for begin, end in pairwise(ends)]

    def each(self, items: Sequence[_T], costs: Sequence[float] = ()) -> Iterator[tuple[_T, Bench]]:
        """Give every item with a bench of its share of the time: all the same, or in proportion to costs."""
        return zip(items, self.parts(costs or [1.0] * len(items)), strict=True)

    def rows(self, key: Key, measure: Callable[[], Iterable[Row]]) -> list[Row]:
        """Return the rows of a unit of work, which is measured unless it is kept; its key stands in each row.

        Parameters
        ----------
        key
            All that the rows depend on.
        measure
            Gives the rows.

        Raises
        ------
        StoreError
            If rows cannot be written, or are not as they were written.

        """
        return [{**key, **row} for row in kept_rows(self.folder / "units", key, measure)]


def models_for(request: Request) -> Models:
    """Return what loads models as a request asks: with its seed, device and precision."""
    return Models(Plan(seed=request.seed, device=request.device, dtype=request.dtype))


@dataclass(frozen=True, eq=False)
class Finding:
    """What a figure shows.

    Attributes
    ----------
    pictures
        Drawn into the figure's folder.
    seen
        What is seen, in sentences that are written from the numbers.
    tables
        Captions with their tables.
    made
        How the numbers came about, as the bench has it.

    """

    pictures: list[Picture]
    seen: list[str]
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One of the paper's figures, or a table that belongs to it.

    Attributes
    ----------
    name
        As typed: ``figure-1``.
    title
        For people.
    paper
        Where it stands in the paper: ``Figure 1``.
    about
        What it shows, how that is measured, and how it is drawn, in a few sentences.
    measure
        Measures what the bench's folder lacks, and returns what is to be shown.
    show
        Draws what ``measure`` returned into a folder, and says what is seen; never measures.

    """

    name: str
    title: str
    paper: str
    about: str
    measure: Callable[[Bench], Any]
    show: Callable[[Any, Path], Finding]

    def make(self, bench: Bench) -> Finding:
        """Measure, and show what was found in the look of the paper.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the figure cannot be made of what is asked for, or something cannot be written.

        """
        found = self.measure(bench)
        bench.say("", 1.0)
        with rc_context(PAPER):
            return replace(self.show(found, bench.folder), made=bench.made)
