"""``howsmooth bound``: every theorem's bound for the attention of a model or of a parameter file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.options import OUTPUT, JsonOption, SilentOption, command
from howsmooth.cli.progress import shown_progress
from howsmooth.study.plan import BoundPlan, Execution

__all__ = ["bound"]

_EXAMPLES = (
    "One table a layer: bounds at the tokens of the text, beside the measured constant; and bounds over all "
    "sequences of n tokens in the ball of radius R.",
    "Examples:",
    "[cyan]howsmooth bound builtin-encoder --layers 0[/]  the first layer, all heads together",
    "[cyan]howsmooth bound builtin-decoder --layers 0 --scope head --heads 0,1 --lengths 16,64[/]  two heads",
    "[cyan]howsmooth bound ./head.safetensors --lengths 100 --radius 4[/]  parameters of your own",
    "[cyan]howsmooth bound gpt2 --random-init --layers 6 --json[/]  for a machine",
    "A parameter file holds query, key, value and so on with the shapes of howsmooth.SelfAttention, or A, V "
    "and b of the paper; and tokens X, if bounds at them are wanted.",
)


@command(*_EXAMPLES, without=("out", "executor", "workers", "scheduler"))
def bound(
    plan: BoundPlan,
    execution: Execution,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also write bounds.csv there.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: SilentOption = False,
) -> int:
    """Bound the Lipschitz constant of attention by every theorem there is, beside the measured constant."""
    from howsmooth.cli.tables import bounds_as_json, show_bounds
    from howsmooth.study.bounding import bound_all, bounds_frame
    from howsmooth.study.files import write_table
    from howsmooth.study.sources import open_source

    with shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        source = open_source(plan)
        display.phase("Bounding")
        bounded = list(bound_all(plan, source, display))
    written = None if out is None else write_table(bounds_frame(source.label, bounded), out, "bounds.csv")
    if json:
        typer.echo(bounds_as_json(source, bounded, written))
    else:
        show_bounds(source, bounded, written)
    return 0
