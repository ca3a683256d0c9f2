"""The command ``howsmooth bound``: evaluate all bounds for the attention of a model or a parameter file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import ONE_PROCESS, JsonOption, SilentOption, command, folder_option
from howsmooth.study.execution_options import Execution
from howsmooth.study.plans import BoundPlan

__all__ = ["bound"]

_EXAMPLES = (
    "Print one table for each attention. It lists bounds on the local constant at the tokens of the input, "
    "beside the measured constant, and bounds over all sequences of n tokens in the ball of radius R.",
    "Examples:",
    "[cyan]howsmooth bound builtin-encoder --layers 0[/]  the first layer, with all heads",
    "[cyan]howsmooth bound builtin-decoder --scope head --heads 0,1 --lengths 16,64[/]  two heads",
    "[cyan]howsmooth bound ./my-llama --tokens ids.txt --layers -1[/]  token ids instead of a text",
    "[cyan]howsmooth bound ./head.safetensors --lengths 100 --radius 4[/]  your own parameters",
    "[cyan]howsmooth bound gpt2 --random-init --layers 6 --json[/]  JSON for another program",
    "A parameter file holds the arrays query, key, value and so on, with the shapes that "
    "howsmooth.SelfAttention documents, or the matrices A and V and the vector b of the paper. It may also "
    "hold tokens X, at which local bounds are then computed.",
)


@command(*_EXAMPLES, without=("out", *ONE_PROCESS))
def bound(
    plan: BoundPlan,
    execution: Execution,
    out: Annotated[
        Path | None,
        folder_option("Also write bounds.csv into this folder."),
    ] = None,
    json: JsonOption = False,
    quiet: SilentOption = False,
) -> int:
    """Compare every available bound on the Lipschitz constant of attention with the measured constant."""
    from howsmooth.cli.bound_result import bounds_as_json, show_bounds
    from howsmooth.study.attention_sources import open_attention_source
    from howsmooth.study.bound_tables import bound_all, bounds_frame
    from howsmooth.study.file_writing import write_table

    with shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        source = open_attention_source(plan)
        display.phase("Bounding")
        bounded = list(bound_all(plan, source, display))
    written = None if out is None else write_table(bounds_frame(source.label, bounded), out, "bounds.csv")
    if json:
        typer.echo(bounds_as_json(source, bounded, written))
    else:
        show_bounds(source, bounded, written)
    return 0
