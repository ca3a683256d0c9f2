"""Start the workers of a command, and print how to continue if the user presses Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from howsmooth.cli.typer_command import as_typed
from howsmooth.study.execution_options import Execution
from howsmooth.study.progress_listener import Listener
from howsmooth.study.text_formatting import counted

if TYPE_CHECKING:
    from howsmooth.study.runner import Means

__all__ = ["FAILED", "INTERRUPTED", "means_of", "resumable"]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if some measurements failed and the others were made."""


@contextmanager
def means_of(execution: Execution, display: Listener, *, keep_going: bool = False) -> Iterator[Means]:
    """Start the workers that the options ask for, yield the workers and settings with which tasks are carried
    out, and stop the workers at the end.
    """
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.runner import Means

    if execution.scheduler is not None:
        workers = counted(execution.workers or 1, "Dask worker")
        display.phase(f"Waiting for {workers} at {execution.scheduler}")
    with opened_executor(execution) as pool:
        yield Means(display, as_typed(), keep_going, pool, threads_each(pool, execution.threads))


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C, print what is saved and the command that continues the work, and exit with code 130.

    The function ``kept`` returns a phrase that says what is saved. If the phrase is empty, the
    KeyboardInterrupt is raised again.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not (said := kept()):
            raise
        typer.echo(f"interrupted: {said}. Continue with:\n  {as_typed()}", err=True)
        raise typer.Exit(INTERRUPTED) from None
