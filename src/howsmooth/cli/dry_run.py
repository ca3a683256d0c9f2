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
from howsmooth.cli.terminal_output import as_json, say, show_table
from howsmooth.cli.typer_command import OUTPUT
from howsmooth.study.text_formatting import duration, readable

if TYPE_CHECKING:
    from howsmooth.study.execution_options import Execution
    from howsmooth.study.plans import Plan
    from howsmooth.study.resource_forecast import Forecast

__all__ = ["DryRunOption", "tell_forecast"]

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Load and check everything, time a few trial measurements, and print the time and the memory "
        "that each length will take. Nothing is written.",
        rich_help_panel=OUTPUT,
    ),
]


def tell_forecast(
    plan: Plan, execution: Execution, *, as_json: bool, quiet: bool, keep_going: bool = False
) -> int:
    """Predict the time and memory that a plan takes, print them, and return the exit code.

    The exit code is 0, or :data:`FAILED`, as that of the run, if a model cannot be measured on an input.

    Parameters
    ----------
    plan, execution, keep_going
        The same values as for a run of the plan.
    as_json, quiet
        Whether to print JSON, and whether to hide the progress.

    """
    # Imported here because it takes seconds to load, which --help should not.
    from howsmooth.study.resource_forecast import forecast

    with shown_progress(quiet=quiet or as_json) as display:
        display.phase("Reading texts and models, and timing trial measurements")
        found = forecast(plan, execution.out, keep_going=keep_going)
    if as_json:
        typer.echo(forecast_as_json(found, execution.out, published=bool(plan.as_published)))
    else:
        show_forecast(found, execution.out, published=bool(plan.as_published))
    return FAILED if found.impossible else 0


def forecast_as_json(found: Forecast, folder: Path, *, published: bool) -> str:
    """Return the expected time and memory of a plan as one JSON object, in seconds and bytes."""
    impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
    described = asdict(found) | {"impossible": impossible, "without_published_values": published}
    return as_json(out=folder, **described)


def show_forecast(found: Forecast, folder: Path, *, published: bool) -> None:
    """Print tables of the expected time and memory of a run, and the totals.

    There is a table for each model, text and scope, with a row for each length.
    """
    for (model, text, scope), parts in groupby(found.parts, key=attrgetter("model", "text", "scope")):
        say(f"{readable(model)}, {readable(text)}, {scope}:")
        rows = [
            [
                str(part.n),
                str(part.measurements),
                short(part.seconds),
                "?" if part.memory is None else amount_of_memory(part.memory),
            ]
            for part in parts
        ]
        show_table(["n", "measurements", "time", "memory"], rows)
    measuring = sum(part.seconds for part in found.parts)
    say(
        f"Reading and loading {short(found.preparing)}, measuring {short(measuring)}, bounds "
        f"{short(found.bounds)}, tables, figures and report {short(found.drawing)}."
    )
    kept = f"; {found.kept} measurements are already in {folder}" if found.kept else ""
    say(
        f"In all about {duration(found.seconds)}, {duration(found.low)} to {duration(found.high)}, and "
        f"{amount_of_memory(found.memory)} of memory{kept}."
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


def short(seconds: float) -> str:
    """Format a time in seconds, with two significant digits if it is below ten seconds.

    Longer times are formatted by :func:`duration`.
    """
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def amount_of_memory(size: float) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{size / 1e6:.0f} MB"
