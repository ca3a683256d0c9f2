"""Carry out a plan of measurements, or predict its time and memory. If the user presses Ctrl-C, print how to
continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json as json_object
from howsmooth.cli.terminal_output import say, show_table
from howsmooth.cli.typer_command import ShownOrQuiet, as_typed
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import flag, option
from howsmooth.study.plans import Plan, shared
from howsmooth.study.progress_listener import Listener
from howsmooth.study.text_formatting import counted, duration, encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.resource_forecast import Forecast
    from howsmooth.study.runner import Means
    from howsmooth.study.study_preparation import PreparedStudy
    from howsmooth.study.tasks.task import Work

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "MeasurementShown",
    "carry_out",
    "means_of",
    "resumable",
    "rows_kept",
    "tell_forecast",
]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if some measurements failed and the others were made."""


@dataclass(frozen=True)
class MeasurementShown(ShownOrQuiet):
    """The options that choose how a command shows the progress and the result of a plan of measurements."""

    no_figures: bool = option(
        False,
        flag(),
        "Draw no figures, and leave them out of the report. A later run without this option draws them.",
    )
    parquet: bool = shared("parquet")
    dry_run: bool = option(
        False,
        flag(),
        "Load and check everything, time a few trial measurements, and print the time and the memory that "
        "each length will take. Nothing is written.",
    )

    @property
    def last_phase(self) -> str:
        """The name of the last phase of a run, for the progress display."""
        return "Writing tables" if self.no_figures else "Drawing figures"


def carry_out(
    plan: Plan,
    execution: Execution,
    shown: MeasurementShown,
    *,
    again: str,
    keep_going: bool,
) -> int:
    """Carry out the measurements of a plan, write and print the results, and return the exit code.

    The exit code is 0, or :data:`FAILED` if a measurement failed. ``again`` is the command that continues the
    measurements; it is printed after a failure or an interruption. With ``keep_going`` the other measurements
    go on after a failure.
    """
    # Imported here because these modules take seconds to load, which --help should not.
    from howsmooth.cli import print_measurement_result
    from howsmooth.study.measurement_outputs import write_outputs
    from howsmooth.study.measurement_run import run

    out = execution.out
    with resumable(lambda: rows_kept(out), again), shown_progress(quiet=shown.quiet) as display:
        with means_of(execution, display, keep_going=keep_going) as means:
            outcome = run(plan, out, means, beside=_beside(plan))
        display.phase(shown.last_phase)
        published = write_outputs(out, display, figures=not shown.no_figures, parquet=shown.parquet)
    if shown.json:
        typer.echo(print_measurement_result.measured_as_json(plan, outcome, published, out))
    elif not shown.quiet:
        print_measurement_result.show_measured(plan, outcome, published, out)
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


def _beside(plan: Plan) -> list[Callable[[PreparedStudy], Work]]:
    """Return a list with a function that plans the missing values of the published code. The list is empty if
    the plan does not ask for these values.
    """
    if not plan.as_published:
        return []
    from howsmooth.paper.published_code import parse_items
    from howsmooth.paper.published_code.constants_task import published_left

    return [published_left(parse_items(plan.as_published))]


@contextmanager
def resumable(kept: Callable[[], str], again: str) -> Iterator[None]:
    """On Ctrl-C, print what is saved and the command that continues the work, and exit with code 130.

    The function ``kept`` returns a phrase that says what is saved, and ``again`` is the command. If the
    phrase is empty, the KeyboardInterrupt is raised again.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not (said := kept()):
            raise
        typer.echo(f"interrupted: {said}. Continue with:\n  {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def rows_kept(folder: Path) -> str:
    """Return a phrase that says how many results are stored in a folder."""
    from howsmooth.study.records import ATTACK_PLACE, Attack, Measurement, PublishedValue
    from howsmooth.study.store import Store

    # One attack writes several rows, so attacks are counted by attention and length.
    kinds = {kind: kind.key for kind in (Measurement, PublishedValue)} | {Attack: ATTACK_PLACE}
    kept = ""
    if Store.exists(folder):
        with Store.open(folder, write=False) as store:
            counts = {kind.table: len(store.keys(kind, key)) for kind, key in kinds.items()}
        kept = " and ".join(f"{count} {table}" for table, count in counts.items() if count)
    return f"{kept} are saved in {encodable(str(folder))}" if kept else "nothing was measured yet"


def tell_forecast(
    plan: Plan, execution: Execution, shown: MeasurementShown, *, keep_going: bool = False
) -> int:
    """Predict and print the time and memory that a plan takes, and return the exit code.

    The exit code is :data:`FAILED` if a model cannot be measured on an input, as it would be in the run
    itself, and 0 otherwise. The JSON contains times in seconds and memory in bytes.
    """
    # Imported here because it takes seconds to load, which --help should not.
    from howsmooth.study.resource_forecast import forecast

    with shown_progress(quiet=shown.quiet or shown.json) as display:
        display.phase("Reading texts and models, and timing trial measurements")
        found = forecast(plan, execution.out, keep_going=keep_going, draw=not shown.no_figures)
    published = bool(plan.as_published)
    if shown.json:
        impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
        described = asdict(found) | {"impossible": impossible, "without_published_values": published}
        typer.echo(json_object(out=execution.out, **described))
    else:
        _show(found, execution.out, published=published, workers=execution.executor is not None)
    return FAILED if found.impossible else 0


def _show(found: Forecast, folder: Path, *, published: bool, workers: bool) -> None:
    """Print a table of the expected time and memory for each model, text and scope, and then the totals."""
    for (model, text, scope), parts in groupby(found.parts, key=attrgetter("model", "text", "scope")):
        say(f"{readable(model)}, {readable(text)}, {scope}:")
        rows = [
            [str(part.n), str(part.measurements), _short(part.seconds), _size(part.memory)] for part in parts
        ]
        show_table(["n", "measurements", "time", "memory"], rows)
    measuring = sum(part.seconds for part in found.parts)
    say(
        f"Reading and loading {_short(found.preparing)}, measuring {_short(measuring)}, bounds "
        f"{_short(found.bounds)}, tables, figures and report {_short(found.drawing)}."
    )
    kept = f"; {found.kept} measurements are already in {folder}" if found.kept else ""
    known = all(part.memory is not None for part in found.parts)
    say(
        f"In all about {duration(found.seconds)}, {duration(found.low)} to {duration(found.high)}, and "
        f"{'' if known else 'at least '}{_size(found.memory)} of memory{kept}."
    )
    for part in found.parts:
        if part.lacking is not None:
            say(
                f"A sequence of {part.n} tokens does not fit into the memory that one measurement may use, "
                f"so it will be refused. Raise --memory to {math.ceil(part.lacking / 1e6)}MB."
            )
    if published:
        say("This forecast does not include the values of the paper's published code.")
    for label, source, error in found.impossible:
        where = label if source is None else f"{label} on {source}"
        say(f"Cannot be measured: {readable(where)}: {readable(error, longest=300)}")
    if workers:
        say("These are the time and memory of one process. Workers share the measurements, not the memory.")
    say("Nothing was written.")


def _short(seconds: float) -> str:
    """Return a time as text, with two significant digits if it is below ten seconds."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def _size(size: float | None) -> str:
    """Return a number of bytes as text in GB or MB, or a question mark if the number is unknown."""
    if size is None:
        return "?"
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{size / 1e6:.0f} MB"
