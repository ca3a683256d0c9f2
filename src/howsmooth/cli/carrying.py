"""A plan of constants carried out, drawn and told, for ``howsmooth measure`` and ``howsmooth study``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from howsmooth.cli.parsing import use_threads
from howsmooth.cli.progress import choose
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.plan import Execution, Plan
    from howsmooth.study.subjects import OpenStudy
    from howsmooth.study.tasks.task import Work

__all__ = ["FAILED", "INTERRUPTED", "carry_out", "interrupted"]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if something of the plan failed and the rest was measured."""


def carry_out(
    plan: Plan,
    execution: Execution,
    *,
    command: str,
    again: str,
    keep_going: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure, write tables, figures and report, and print the result; returns the exit code.

    Parameters
    ----------
    plan, execution
        What to measure, and how.
    command, again
        What was typed, and what continues it.
    keep_going
        Go on after failures.
    as_json, quiet
        As the options of the commands.

    """
    # Only now what takes seconds to load.
    from howsmooth.cli import result
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.publish import publish
    from howsmooth.study.run import run
    from howsmooth.study.runner import Means

    how, out = execution, execution.out
    use_threads(how.threads)
    display = choose(quiet=quiet)
    try:
        with display:
            with opened_executor(how.executor, workers=how.workers, scheduler=how.scheduler) as pool:
                means = Means(display, command, keep_going, pool, threads_each(pool, how.threads))
                outcome = run(plan, out, means, beside=_beside(plan))
            display.phase("Drawing figures")
            published = publish(out, display)
    except KeyboardInterrupt:
        typer.echo(interrupted(out, again), err=True)
        return INTERRUPTED
    if as_json:
        typer.echo(result.as_json(plan, outcome, published, out))
    elif not quiet:
        result.show(plan, outcome, published, out)
    if not outcome.failed:
        return 0
    reason = readable(outcome.first_failure, longest=300)
    typer.echo(
        f"{outcome.failed} failed, the first because of: {reason} Try again with:\n  {again}", err=True
    )
    return FAILED


def _beside(plan: Plan) -> list[Callable[[OpenStudy], Work]]:
    """Return what else a plan asks for: what the paper's code computes."""
    if not plan.as_published:
        return []
    from howsmooth.paper.published import parse_items
    from howsmooth.paper.published.task import published_left

    return [published_left(parse_items(plan.as_published))]


def interrupted(folder: Path, again: str) -> str:
    """Say after Ctrl-C what is kept in a folder, and how to go on."""
    from howsmooth.study.records import ATTACK_PLACE, Attack, FrameRow, Measurement, PublishedValue
    from howsmooth.study.store import Store

    # An attack has several rows.
    kinds = {kind: kind.key for kind in (Measurement, PublishedValue, FrameRow)} | {Attack: ATTACK_PLACE}
    kept = []
    if Store.exists(folder):
        with Store.open(folder, write=False) as store:
            kept = [
                f"{count} {kind.table}"
                for kind, key in kinds.items()
                if (count := len(store.keys(kind, key)))
            ]
    if not kept:
        return "interrupted: nothing had been measured yet."
    return (
        f"interrupted: {' and '.join(kept)} are kept in {encodable(str(folder))}. "
        f"Continue with the same command:\n  {again}"
    )
