"""The option ``--dry-run``: predict the time and memory of a plan, and print them as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howsmooth.cli.plan_execution import FAILED
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json as json_object
from howsmooth.cli.terminal_output import say, show_table
from howsmooth.cli.typer_command import switch
from howsmooth.study.text_formatting import duration, readable

if TYPE_CHECKING:
    from howsmooth.study.execution_options import Execution
    from howsmooth.study.plans import Plan
    from howsmooth.study.resource_forecast import Forecast

__all__ = ["DryRunOption", "tell_forecast"]

DryRunOption = Annotated[
    bool,
    switch(
        "--dry-run",
        help="Load and check everything, time a few trial measurements, and print the time and the memory "
        "that each length will take. Nothing is written.",
    ),
]


def tell_forecast(
    plan: Plan, execution: Execution, *, as_json: bool, quiet: bool, keep_going: bool = False
) -> int:
    """Predict the time and memory that a plan takes, print them, and return the exit code.

    The exit code is 0, or :data:`FAILED`, as that of the run, if a model cannot be measured on an input. The
    JSON has seconds and bytes.
    """
    # Imported here because it takes seconds to load, which --help should not.
    from howsmooth.study.resource_forecast import forecast

    with shown_progress(quiet=quiet or as_json) as display:
        display.phase("Reading texts and models, and timing trial measurements")
        found = forecast(plan, execution.out, keep_going=keep_going)
    published = bool(plan.as_published)
    if as_json:
        impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
        described = asdict(found) | {"impossible": impossible, "without_published_values": published}
        typer.echo(json_object(out=execution.out, **described))
    else:
        _show(found, execution.out, published=published)
    return FAILED if found.impossible else 0


def _show(found: Forecast, folder: Path, *, published: bool) -> None:
    """Print a table of expected time and memory for each model, text and scope, and the totals."""
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
    say(
        f"In all about {duration(found.seconds)}, {duration(found.low)} to {duration(found.high)}, and "
        f"{_size(found.memory)} of memory{kept}."
    )
    for part in found.parts:
        if not part.fits:
            say(
                f"A sequence of {part.n} tokens does not fit into the memory that one measurement may use, "
                "so it will be refused. Raise --memory."
            )
    if published:
        say("This forecast does not include the values of the paper's published code.")
    for label, source, error in found.impossible:
        where = label if source is None else f"{label} on {source}"
        say(f"Cannot be measured: {readable(where)}: {readable(error, longest=300)}")
    say("Nothing was written.")


def _short(seconds: float) -> str:
    """Format a time, with two significant digits if it is below ten seconds."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def _size(size: float | None) -> str:
    """Format a number of bytes in GB or MB; a question mark if it is unknown."""
    if size is None:
        return "?"
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{size / 1e6:.0f} MB"
