"""Hears how far a run is, shows it, and knows what to say after Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from howsmooth.cli.progress import Display
from howsmooth.study.progress import Outcome, Progress

__all__ = ["INTERRUPTED", "Watch"]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


class Watch:
    """Hears how far the run is, shows it, and remembers it for the message after Ctrl-C.

    Parameters
    ----------
    display
        Where to show it.
    again
        The command that continues.

    """

    def __init__(self, display: Display, again: str) -> None:
        self._display = display
        self._again = again
        self._last: Progress | None = None
        self.finished: Outcome | None = None

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        if self._last is None:
            kept = f" ({progress.kept} more are in the store already)" if progress.kept else ""
            what = f"Measuring {progress.planned} constants" if progress.planned else "Computing bounds"
            self._display.phase(f"{what}{kept}")
        self._last = progress
        failed = f" ({progress.failed} failed)" if progress.failed else ""
        words = f"{progress.done} of {progress.planned}{failed}, {progress.model}, n = {progress.n}"
        words += ", bounds" if progress.bounding else ""
        self._display.advance(progress.cost_done, progress.cost_planned, words)

    def interrupted(self, folder: Path) -> str:
        """Say what was kept, and how to go on."""
        if self.finished is not None:
            done = self.finished.measured + self.finished.kept
            return (
                f"interrupted while drawing: all {done} measurements are kept in {folder}. "
                f"Draw with the same command:\n  {self._again}"
            )
        if self._last is None:
            return "interrupted: nothing had been measured yet."
        done = self._last.done + self._last.kept
        planned = self._last.planned + self._last.kept
        return (
            f"interrupted: {done} of {planned} measurements are kept in {folder}. "
            f"Continue with the same command:\n  {self._again}"
        )
