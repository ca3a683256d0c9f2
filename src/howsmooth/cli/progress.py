"""How far the work is: a bar with the time left on a terminal, plain lines anywhere else.

All of it goes to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from howsmooth.study.progress import Listener, Silent

__all__ = ["duration", "shown_progress"]

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Listener]:
    """Show what the listener is told in the way that fits where standard error goes."""
    if quiet:
        yield Silent()
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[words]}", style="dim", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True), speed_estimate_period=120) as progress:
            yield _Bar(progress)


class _Lines:
    """A line when a phase begins, and one every ten seconds within it."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def phase(self, words: str) -> None:
        """Say what begins now."""
        self._began = self._last = time.monotonic()
        print(words, file=sys.stderr, flush=True)

    def advance(self, done: float, total: float, words: str) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or done <= 0:
            return
        self._last = now
        left = duration((now - self._began) * (total - done) / done)
        print(f"  {100 * done / total:3.0f} %, about {left} left: {words}", file=sys.stderr, flush=True)


class _Bar:
    """A bar with the share done, the time spent and the time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def phase(self, words: str) -> None:
        """Begin a bar; the finished ones stay above it."""
        if self._task is not None:
            task = self._progress.tasks[-1]
            self._progress.update(self._task, total=task.total or 1, completed=task.total or 1, words="")
        self._task = self._progress.add_task(words, total=None, words="")

    def advance(self, done: float, total: float, words: str) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, total=total, completed=done, words=words)


def duration(seconds: float) -> str:
    """Say a time in the unit that fits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
