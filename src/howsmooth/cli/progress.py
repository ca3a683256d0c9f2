"""How far the work is: a bar with the time left on a terminal, plain lines anywhere else.

All of it goes to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

__all__ = ["Display", "Silent", "choose", "duration"]

_SECONDS_BETWEEN_LINES = 10.0


@runtime_checkable
class Display(Protocol):
    """A listener that is a context manager."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, words: str) -> None:
        """Say what begins now."""

    def advance(self, done: float, total: float, words: str) -> None:
        """Say how much of the present phase is done, in units of time it takes."""


class Silent:
    """Says nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def phase(self, words: str) -> None:
        """Do nothing."""

    def advance(self, done: float, total: float, words: str) -> None:
        """Do nothing."""


class Lines:
    """A line when a phase begins, and one every ten seconds within it."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

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
        left = (now - self._began) * (total - done) / done
        print(
            f"  {100 * done / total:3.0f} %, about {duration(left)} left: {words}",
            file=sys.stderr,
            flush=True,
        )


class Bar:
    """A bar with the share done, the time spent and the time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[words]}", style="dim", markup=False),
            console=Console(stderr=True),
            speed_estimate_period=120,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

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


def choose(*, quiet: bool) -> Display:
    """Pick the display that fits where standard error goes."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


def duration(seconds: float) -> str:
    """Say a time in the unit that fits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
