"""Show the progress of a command: as a bar with the remaining time on a terminal, and as lines of text
elsewhere.

The progress is written to standard error, so standard output contains only results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from howsmooth.study.progress_listener import Listener
from howsmooth.words import duration

__all__ = ["shown_progress"]

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Listener]:
    """Yield a listener that shows a bar on a terminal and lines elsewhere, or nothing if ``quiet``."""
    if quiet:
        yield Listener()
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[words]}", style="dim", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield _Bar(progress)


class _Lines(Listener):
    """A listener that prints a line at the start of each phase, and then one every ten seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def phase(self, words: str) -> None:
        self._began = self._last = time.monotonic()
        print(words, file=sys.stderr, flush=True)

    def advance(self, done: float, total: float, words: str, left: float | None = None) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or not 0 < done < total:
            return
        self._last = now
        left = (now - self._began) * (total - done) / done if left is None else left
        line = f"  {100 * done / total:3.0f} %, about {duration(left)} left: {words}"
        print(line, file=sys.stderr, flush=True)


class _Bar(Listener):
    """A listener that draws a bar for each phase, with the share that is done and the remaining time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._began = time.monotonic()

    def phase(self, words: str) -> None:
        if self._task is not None:
            task = self._progress.tasks[-1]
            self._progress.update(self._task, total=task.total or 1, completed=task.total or 1, words="")
        self._task = self._progress.add_task(words, total=None, words="")
        self._began = time.monotonic()

    def advance(self, done: float, total: float, words: str, left: float | None = None) -> None:
        if left is None and done > 0:
            left = (time.monotonic() - self._began) * (total - done) / done
        if self._task is not None:
            told = words if left is None else f"about {duration(left)} left: {words}"
            self._progress.update(self._task, total=total, completed=done, words=told)
