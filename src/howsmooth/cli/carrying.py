"""A plan of constants carried out, drawn and told, for ``howsmooth measure`` and ``howsmooth study``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from howsmooth.cli.options import as_typed
from howsmooth.cli.progress import shown_progress
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.plan import Execution, Plan
    from howsmooth.study.progress import Listener
    from howsmooth.study.runner import Means
    from howsmooth.study.subjects import OpenStudy
    from howsmooth.study.tasks.task import Work

__all__ = ["FAILED", "INTERRUPTED", "carry_out", "means_of", "resumable"]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if something of the plan failed and the rest was measured."""


def carry_out(
    plan: Plan, execution: Execution, *, again: str, keep_going: bool, as_json: bool, quiet: bool
) -> int:
    """Measure, write tables, figures and report, and print the result; returns the exit code.

    Parameters
    ----------
    plan, execution
        What to measure, and how.
    again
        What is to be typed to continue it.
    keep_going
        Go on after failures.
    as_json, quiet
        As the options of the commands.

    """
    # Only now what takes seconds to load.
    from howsmooth.cli import result
    from howsmooth.study.publish import publish
    from howsmooth.study.run import run

    out = execution.out
    with resumable(out, again), shown_progress(quiet=quiet) as display:
        with means_of(execution, display, keep_going=keep_going) as means:
            outcome = run(plan, out, means, beside=_beside(plan))
        display.phase("Drawing figures")
        published = publish(out, display)
    if as_json:
        typer.echo(result.measured_as_json(plan, outcome, published, out))
    elif not quiet:
        result.show_measured(plan, outcome, published, out)
    if not outcome.failed:
        return 0
    reason = readable(outcome.first_failure, longest=300)
    typer.echo(
        f"{outcome.failed} failed, the first because of: {reason} Try again with:\n  {again}", err=True
    )
    return FAILED


@contextmanager
def means_of(execution: Execution, display: Listener, *, keep_going: bool = False) -> Iterator[Means]:
    """Start the workers that were asked for; end them afterwards."""
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.runner import Means

    how = execution
    with opened_executor(how.executor, workers=how.workers, scheduler=how.scheduler) as pool:
        yield Means(display, as_typed(), keep_going, pool, threads_each(pool, how.threads))


def _beside(plan: Plan) -> list[Callable[[OpenStudy], Work]]:
    """Return what else a plan asks for: what the paper's code computes."""
    if not plan.as_published:
        return []
    from howsmooth.paper.published import parse_items
    from howsmooth.paper.published.task import published_left

    return [published_left(parse_items(plan.as_published))]


@contextmanager
def resumable(folder: Path, again: str) -> Iterator[None]:
    """After Ctrl-C, say what is kept in a folder and how to go on, and end with the exit code for it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(_interrupted(folder, again), err=True)
        raise typer.Exit(INTERRUPTED) from None


def _interrupted(folder: Path, again: str) -> str:
    from howsmooth.study.records import ATTACK_PLACE, Attack, FrameRow, Measurement, PublishedValue
    from howsmooth.study.store import Store

    # An attack has several rows.
    kinds = {kind: kind.key for kind in (Measurement, PublishedValue, FrameRow)} | {Attack: ATTACK_PLACE}
    kept = []
    if Store.exists(folder):
        with Store.open(folder, write=False) as store:
            counts = {kind.table: len(store.keys(kind, key)) for kind, key in kinds.items()}
            kept = [f"{count} {table}" for table, count in counts.items() if count]
    if not kept:
        return "interrupted: nothing had been measured yet."
    return (
        f"interrupted: {' and '.join(kept)} are kept in {encodable(str(folder))}. "
        f"Continue with the same command:\n  {again}"
    )
