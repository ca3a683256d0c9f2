"""Predict how long figures take, by making each of them for a few seconds."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from howsmooth.errors import HowsmoothError
from howsmooth.paper.figure import Figure, FigureContext, models_for
from howsmooth.paper.figure_options import FigureOptions
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = ["FigureTime", "expected_times"]

_TRIAL_SECONDS = 10.0


@dataclass(frozen=True)
class FigureTime:
    """How long a figure is expected to take from an empty folder.

    ``seconds`` is None, and ``refused`` the reason, if the figure cannot be made. ``tried`` is the share of
    the work that the trial finished, on which the expectation rests.
    """

    name: str
    seconds: float | None
    tried: float
    refused: str = ""


def expected_times(
    chosen: Sequence[Figure], options: FigureOptions, listener: Listener = SILENT
) -> list[FigureTime]:
    """Make each figure in a temporary folder for about ten seconds, and extrapolate the time it needs.

    The figure's own progress tells what share of the work is done. The progress rests on estimated costs, and
    a trial ends only after a finished step; so the times are right within a factor of two or three. The
    listener is told which figure is tried.
    """
    models, found = models_for(options), []
    for figure in chosen:
        listener.phase(f"Trying {figure.name}")
        clock, refused = _Clock(), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                figure.make(FigureContext(options, Path(folder), models, clock))
                clock.share = 1.0
            except _TrialEnded:
                pass
            except HowsmoothError as error:
                refused = " ".join(str(error).split())
        found.append(FigureTime(figure.name, None if refused else clock.expected(), clock.share, refused))
    return found


class _TrialEnded(KeyboardInterrupt):
    """Raised when the time of a trial is over; running studies close their stores as after Ctrl-C."""


class _Clock(Listener):
    """A listener that ends a figure's trial after ten seconds, once some share of the work is done."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        # The time at which the first measurement started; models and texts are read before that.
        self._measuring = self.began
        self.share = 0.0

    def advance(self, done: float, total: float, words: str) -> None:
        """Keep the share of the work that is done, and end the trial if it has lasted ten seconds."""
        now = time.perf_counter()
        if self.share == 0.0 and not done:
            self._measuring = now
        self.share = max(self.share, done / total)
        if self.share > 0.0 and now - self.began > _TRIAL_SECONDS:
            raise _TrialEnded

    def expected(self) -> float:
        """Return the expected time of the whole figure in seconds."""
        now = time.perf_counter()
        return self._measuring - self.began + (now - self._measuring) / self.share
