"""Predict how long the figures will take, from a trial of about ten seconds for each figure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from howsmooth.errors import HowsmoothError
from howsmooth.paper.figure_dataclasses import Figure, FigureContext, models_for
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = ["FigureTime", "expected_times"]

_TRIAL_SECONDS = 10.0


@dataclass(frozen=True)
class FigureTime:
    """The predicted time of a figure, if nothing of it has been measured before.

    ``seconds`` is None if the figure cannot be made, and ``refused`` is then the reason. ``tried`` is the
    share of the work that was done in the trial on which the prediction is based.
    """

    name: str
    seconds: float | None
    tried: float
    refused: str = ""


def expected_times(
    chosen: Sequence[Figure], options: FigureOptions, listener: Listener = SILENT
) -> list[FigureTime]:
    """Predict the time of each figure: make the figure for about ten seconds in a temporary folder, and
    extrapolate.

    The extrapolation uses the share of the work that the figure reports as done. This share is based on
    estimated costs, and a trial ends only after a finished step, so a prediction is right within a factor of
    two or three. The listener is told which figure is tried.
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
    """The exception that ends a trial when its time is over. It is a KeyboardInterrupt, so that a running
    measurement closes its store as after Ctrl-C.
    """


class _Clock(Listener):
    """A progress listener that ends the trial of a figure after ten seconds, or later, when the first step is
    finished.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        # The time at which the first measurement started; models and texts are read before that.
        self._measuring = self.began
        self.share = 0.0

    def advance(self, done: float, total: float, words: str) -> None:
        """Remember the share of the work that is done, and end the trial if it has lasted ten seconds."""
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
