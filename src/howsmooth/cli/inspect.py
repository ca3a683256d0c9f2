"""``howsmooth inspect``: the attention layers of a model, and what of them can be measured."""

from __future__ import annotations

from typing import Annotated

import typer

from howsmooth.cli.options import (
    HOW,
    OUTPUT,
    WHAT,
    AsDecoderOption,
    JsonOption,
    RandomInitOption,
    ThreadsOption,
)
from howsmooth.cli.progress import choose

__all__ = ["inspect"]


_EXAMPLES = (
    "Every layer is captured in every scope and held against the model's own numbers. What is refused is "
    "named with its reason, and the exit code is 0; it is 2 if there is no such model, or none of its "
    "attention can be seen.",
    "Examples:",
    "[cyan]howsmooth inspect builtin-encoder[/]  a model with its weights",
    "[cyan]howsmooth inspect gpt2 --random-init[/]  an architecture, without its weights",
    "[cyan]howsmooth inspect ./folder --random-init --as-decoder[/]  a config.json is enough",
    "[cyan]howsmooth inspect ./folder --tokens 200 --json[/]  for a machine",
)


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A built-in model, a local folder or a Hub id; with --random-init also a model type.",
            show_default=False,
        ),
    ],
    random_init: RandomInitOption = False,
    as_decoder: AsDecoderOption = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Length of the input, of token ids at random. A window shows in the mask if it is shorter. "
            "Default: 16, or as many as the model takes.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.", rich_help_panel=HOW)] = 0,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)
    ] = False,
) -> int:
    """List the attention layers of a model: heads, dimensions, mask, norm, and what can be measured."""
    from howsmooth.cli.inspect_result import inspection_as_json, show_inspection
    from howsmooth.cli.parsing import use_threads
    from howsmooth.models import inspect_model, load_model

    use_threads(threads)
    display = choose(quiet=quiet)
    with display:
        display.phase("Reading")
        loaded = load_model(model, random_init=random_init, as_decoder=as_decoder, seed=seed)
        display.phase("Inspecting")
        found = inspect_model(loaded, tokens=tokens)
    if json:
        typer.echo(inspection_as_json(loaded, found))
    else:
        show_inspection(loaded, found)
    return 0


inspect.__dict__["examples"] = "\n\n".join(_EXAMPLES)
