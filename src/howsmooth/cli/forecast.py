"""``--dry-run``: what a plan would take, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howsmooth.cli.options import OUTPUT
from howsmooth.cli.printing import as_json, say, show_table
from howsmooth.cli.progress import duration, shown_progress
from howsmooth.study.names import readable

if TYPE_CHECKING:
    from howsmooth.study.forecast import Forecast
    from howsmooth.study.plan import Execution, Plan

__all__ = ["DryRunOption", "tell_forecast"]

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Measure and write nothing: load and check everything, and print the time and the memory that "
        "each length would take.",
        rich_help_panel=OUTPUT,
    ),
]


def tell_forecast(
    plan: Plan, execution: Execution, *, as_json: bool, quiet: bool, keep_going: bool = False
) -> None:
    """Predict what a plan takes, and print it.

    Parameters
    ----------
    plan, execution, keep_going
        As for a run.
    as_json, quiet
        As the options of the command.

    """
    # Only now what takes seconds to load.
    from howsmooth.study.forecast import forecast

    with shown_progress(quiet=quiet or as_json) as display:
        display.phase("Reading texts and models, and trying a little of each")
        found = forecast(plan, execution.out, keep_going=keep_going)
    if as_json:
        typer.echo(forecast_as_json(found, execution.out, published=bool(plan.as_published)))
    else:
        show_forecast(found, execution.out, published=bool(plan.as_published))


def forecast_as_json(found: Forecast, folder: Path, *, published: bool) -> str:
    """Describe a forecast as one JSON object: seconds and bytes."""
    impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
    described = asdict(found) | {"impossible": impossible, "without_published_values": published}
    return as_json(out=folder, **described)


def show_forecast(found: Forecast, folder: Path, *, published: bool) -> None:
    """Print a table for each model, text and scope, then what comes beside, and the sum."""
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
    kept = f"; {found.kept} measurements are in {folder} already" if found.kept else ""
    say(
        f"In all about {duration(found.seconds)}, {duration(found.low)} to {duration(found.high)}, and "
        f"{amount_of_memory(found.memory)} of memory{kept}."
    )
    for part in found.parts:
        if not part.fits:
            say(
                f"{part.n} tokens do not fit in the memory that one measurement may use: they are refused. "
                "Raise --memory."
            )
    if published:
        say("Published values are not part of this.")
    for label, source, error in found.impossible:
        where = label if source is None else f"{label} on {source}"
        say(f"Cannot be measured: {readable(where)}: {readable(error, longest=300)}")
    say("Nothing was written.")


def short(seconds: float) -> str:
    """Write a time with two digits, also if it is less than a second."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def amount_of_memory(size: float) -> str:
    """Write a number of bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{size / 1e6:.0f} MB"
