"""Run a plan of measurements for ``howsmooth measure`` and ``howsmooth study``, and handle Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import as_typed
from howsmooth.study.text_formatting import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.execution_options import Execution
    from howsmooth.study.open_study import OpenStudy
    from howsmooth.study.plans import Plan
    from howsmooth.study.progress_listener import Listener
    from howsmooth.study.runner import Means
    from howsmooth.study.tasks.task import Work

__all__ = ["FAILED", "INTERRUPTED", "carry_out", "means_of", "resumable", "rows_kept"]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if some measurements failed and the others were made."""


def carry_out(
    plan: Plan,
    execution: Execution,
    *,
    again: str,
    keep_going: bool,
    figures: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure a plan, write its tables, figures and report, and print the result; return the exit code.

    The code is 0, or :data:`FAILED` if a measurement failed. ``again`` is the command that continues the
    study, to be shown after a failure or an interruption. With ``keep_going`` a failure ends nothing else.
    """
    # Imported here because these modules take seconds to load, which --help should not.
    from howsmooth.cli import measure_result
    from howsmooth.cli.terminal_output import counted
    from howsmooth.study.measurement_outputs import write_outputs
    from howsmooth.study.measurement_run import run

    out = execution.out
    with resumable(lambda: rows_kept(out), again), shown_progress(quiet=quiet) as display:
        with means_of(execution, display, keep_going=keep_going) as means:
            outcome = run(plan, out, means, beside=_beside(plan))
        display.phase("Drawing figures" if figures else "Writing tables")
        published = write_outputs(out, display, figures=figures)
    if as_json:
        typer.echo(measure_result.measured_as_json(plan, outcome, published, out))
    elif not quiet:
        measure_result.show_measured(plan, outcome, published, out)
    if not outcome.failed:
        return 0
    reason = readable(outcome.first_failure, longest=300)
    typer.echo(
        f"{counted(outcome.failed, 'computation')} failed. Reason of the first failure: {reason} "
        f"Try again with:\n  {again}",
        err=True,
    )
    return FAILED


@contextmanager
def means_of(execution: Execution, display: Listener, *, keep_going: bool = False) -> Iterator[Means]:
    """Start the workers that were asked for, yield the means with which they carry out tasks, stop them."""
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.runner import Means

    with opened_executor(execution) as pool:
        yield Means(display, as_typed(), keep_going, pool, threads_each(pool, execution.threads))


def _beside(plan: Plan) -> list[Callable[[OpenStudy], Work]]:
    """Return a list of one function, which lists the published values left to compute; empty if unwanted."""
    if not plan.as_published:
        return []
    from howsmooth.paper.published import parse_items
    from howsmooth.paper.published.constants_task import published_left

    return [published_left(parse_items(plan.as_published))]


@contextmanager
def resumable(kept: Callable[[], str], again: str) -> Iterator[None]:
    """On Ctrl-C, print what is ``kept`` and the command ``again`` that continues, and exit with the code 130.

    If nothing is kept, the interruption is left to the caller.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not (said := kept()):
            raise
        typer.echo(f"interrupted: {said}. Continue with:\n  {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def rows_kept(folder: Path) -> str:
    """Say how many rows the store in a folder holds."""
    from howsmooth.study.records import ATTACK_PLACE, Attack, FrameRow, Measurement, PublishedValue
    from howsmooth.study.store import Store

    # One attack writes several rows, so attacks are counted by attention and length.
    kinds = {kind: kind.key for kind in (Measurement, PublishedValue, FrameRow)} | {Attack: ATTACK_PLACE}
    kept = ""
    if Store.exists(folder):
        with Store.open(folder, write=False) as store:
            counts = {kind.table: len(store.keys(kind, key)) for kind, key in kinds.items()}
        kept = " and ".join(f"{count} {table}" for table, count in counts.items() if count)
    return f"{kept} are saved in {encodable(str(folder))}" if kept else "nothing was measured yet"
