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
    PartOption,
    RandomInitOption,
    ThreadsOption,
)
from howsmooth.cli.progress import choose

__all__ = ["inspect"]


_MOST_WEIGHTS = 10**9

_EXAMPLES = (
    "Every layer is captured once and held against the model's own numbers, in every scope. What is refused "
    "is named with its reason: cross-attention, layers that mix tokens without a softmax, masks that depend "
    "on the tokens. The exit code is 0 if some layer is captured; 2 if none is, or there is no such model.",
    "Examples:",
    "[cyan]howsmooth inspect builtin-encoder[/]  a model with its weights",
    "[cyan]howsmooth inspect gpt2 --random-init[/]  an architecture, without its weights",
    "[cyan]howsmooth inspect ./folder --random-init --as-decoder[/]  a config.json is enough",
    "[cyan]howsmooth inspect t5 --random-init[/]  encoder and decoder",
    "[cyan]howsmooth inspect vit --random-init[/]  a vision model, on an image made by code",
    "[cyan]howsmooth inspect clip --random-init --part vision[/]  one of a model's parts",
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
    part: PartOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Length of the input, of token ids at random; of a text model only. A window shows in the "
            "mask if it is shorter. Default: 16, or as many as the model takes.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    all_layers: Annotated[
        bool,
        typer.Option(
            "--all-layers",
            help="With --random-init: build every layer. By default a configuration of more than a billion "
            "weights is built with as few layers as show every kind that it names, at least 2, and the "
            "result says so.",
            rich_help_panel=HOW,
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random weights.", rich_help_panel=HOW)] = 0,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)
    ] = False,
) -> int:
    """List the attention layers of a model: heads, mask, positions, norms, and what can be measured."""
    from howsmooth.cli.inspect_result import inspection_as_json, show_inspection
    from howsmooth.cli.parsing import use_threads
    from howsmooth.models import inspect_model, load_model

    use_threads(threads)
    display = choose(quiet=quiet)
    with display:
        display.phase("Reading")
        loaded = load_model(
            model,
            random_init=random_init,
            as_decoder=as_decoder,
            part=part,
            seed=seed,
            most_weights=None if all_layers else _MOST_WEIGHTS,
        )
        display.phase("Inspecting")
        found = inspect_model(
            loaded,
            tokens=tokens,
            on_layer=lambda done, total: display.advance(float(done), float(total), f"layer {done}"),
        )
    if json:
        typer.echo(inspection_as_json(loaded, found))
    else:
        show_inspection(loaded, found)
    return 0 if any(site.scopes for site in found.sites) else 2


inspect.__dict__["examples"] = "\n\n".join(_EXAMPLES)
