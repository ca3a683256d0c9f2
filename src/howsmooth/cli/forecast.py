"""``--dry-run``: what a plan would take, for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from howsmooth.cli.options import OUTPUT
from howsmooth.cli.progress import choose, duration
from howsmooth.errors import ArgumentError
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.forecast import Forecast, Part
    from howsmooth.study.plan import Plan

__all__ = ["CalibrateOption", "DryRunOption", "check_calibrate", "tell_forecast"]

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Measure and write nothing: load and check everything, and print the time and the memory that "
        "each length would take.",
        rich_help_panel=OUTPUT,
    ),
]
CalibrateOption = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="With --dry-run: time this machine anew. Otherwise that is done once a month, and kept.",
        rich_help_panel=OUTPUT,
    ),
]


def check_calibrate(*, calibrate: bool, dry_run: bool) -> None:
    """Refuse ``--calibrate`` without ``--dry-run``."""
    if calibrate and not dry_run:
        raise ArgumentError("calibrate", expected="it together with --dry-run", got="it alone")


def tell_forecast(
    plan: Plan,
    folder: Path,
    *,
    calibrate: bool,
    as_json: bool,
    quiet: bool,
    keep_going: bool = False,
    published: bool = False,
) -> None:
    """Predict what a plan takes, and print it.

    Parameters
    ----------
    plan, folder, keep_going
        As for a run.
    calibrate
        Time the machine anew.
    as_json, quiet
        As the options of the command.
    published
        Whether published values are asked for as well, which are not predicted.

    """
    # Only now what takes seconds to load.
    from howsmooth.study.calibration import calibrated
    from howsmooth.study.forecast import forecast
    from howsmooth.study.tools import default_tools

    display = choose(quiet=quiet or as_json)
    with display:
        display.phase("Timing this machine")
        rates = calibrated(plan.device, fresh=calibrate)
        display.phase("Reading texts and models, and trying a little of each")
        found = forecast(plan, folder, default_tools(), rates, keep_going=keep_going)
    if as_json:
        typer.echo(forecast_as_json(found, folder, published=published))
    else:
        show_forecast(found, folder, published=published)


def forecast_as_json(found: Forecast, folder: Path, *, published: bool) -> str:
    """Describe a forecast as one JSON object: seconds and bytes."""
    described = asdict(found)
    steps = [
        {"model": model, "text": text, "scope": scope, **asdict(one)}
        for (model, text, scope), one in found.steps.items()
    ]
    impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
    described |= {"steps": steps, "impossible": impossible, "without_published_values": published}
    return json.dumps({"out": encodable(str(folder)), **described}, indent=2, allow_nan=False)


def show_forecast(found: Forecast, folder: Path, *, published: bool) -> None:
    """Print a table for each model, text and scope, then what comes beside, and the sum."""
    console = Console()
    for (model, text, scope), steps in found.steps.items():
        parts = [part for part in found.parts if (part.model, part.text, part.scope) == (model, text, scope)]
        if not parts:
            continue
        print(
            encodable(
                f"{readable(model)}, {readable(text)}, {scope}: about {steps.likely:.0f} steps a "
                f"measurement, {steps.low:.0f} to {steps.high:.0f} (from {steps.source})"
            )
        )
        console.print(_table(parts))
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
    for name in ("n", "measurements", "time", "from", "to", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        times = (short(seconds) for seconds in (part.seconds, part.low, part.high))
        table.add_row(str(part.n), str(part.measurements), *times, amount_of_memory(part.memory))
    return Padding(table, (0, 0, 0, 2), expand=False)


def short(seconds: float) -> str:
    """Write a time with two digits, also if it is less than a second."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def amount_of_memory(size: float) -> str:
    """Write a number of bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{size / 1e6:.0f} MB"
