"""``--dry-run``: what a plan would take, for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from howsmooth.cli.options import OUTPUT
from howsmooth.cli.parsing import use_threads
from howsmooth.cli.progress import choose, duration
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.forecast import Forecast, Part
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

    use_threads(execution.threads)
    display = choose(quiet=quiet or as_json)
    with display:
        display.phase("Reading texts and models, and trying a little of each")
        found = forecast(plan, execution.out, keep_going=keep_going)
    if as_json:
        typer.echo(forecast_as_json(found, execution.out, published=bool(plan.as_published)))
    else:
        show_forecast(found, execution.out, published=bool(plan.as_published))


def forecast_as_json(found: Forecast, folder: Path, *, published: bool) -> str:
    """Describe a forecast as one JSON object: seconds and bytes."""
    described = asdict(found)
    impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
    described |= {"impossible": impossible, "without_published_values": published}
    return json.dumps({"out": encodable(str(folder)), **described}, indent=2, allow_nan=False)


def show_forecast(found: Forecast, folder: Path, *, published: bool) -> None:
    """Print a table for each model, text and scope, then what comes beside, and the sum."""
    console = Console()
    for (model, text, scope), parts in groupby(found.parts, key=attrgetter("model", "text", "scope")):
        print(encodable(f"{readable(model)}, {readable(text)}, {scope}:"))
        console.print(_table(list(parts)))
    measuring = sum(part.seconds for part in found.parts)
    print(
        f"Reading and loading {short(found.preparing)}, measuring {short(measuring)}, bounds "
        f"{short(found.bounds)}, tables, figures and report {short(found.drawing)}."
    )
    kept = f"; {found.kept} measurements are in {folder} already" if found.kept else ""
    print(
        encodable(
            f"In all about {duration(found.seconds)}, {duration(found.low)} to {duration(found.high)}, and "
            f"{amount_of_memory(found.memory)} of memory{kept}."
        )
    )
    for part in found.parts:
        if not part.fits:
            print(
                f"{part.n} tokens do not fit in the memory that one measurement may use: they are refused. "
                "Raise --memory."
            )
    if published:
        print("Published values are not part of this.")
    for label, source, error in found.impossible:
        where = label if source is None else f"{label} on {source}"
        print(encodable(f"Cannot be measured: {readable(where)}: {readable(error, longest=300)}"))
    print("Nothing was written.")


def _table(parts: Sequence[Part]) -> Padding:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("n", "measurements", "time", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        memory = "?" if part.memory is None else amount_of_memory(part.memory)
        table.add_row(str(part.n), str(part.measurements), short(part.seconds), memory)
    return Padding(table, (0, 0, 0, 2), expand=False)


def short(seconds: float) -> str:
    """Write a time with two digits, also if it is less than a second."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def amount_of_memory(size: float) -> str:
    """Write a number of bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{size / 1e6:.0f} MB"
