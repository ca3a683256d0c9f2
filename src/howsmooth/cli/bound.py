"""``howsmooth bound``: every theorem's bound for the attention of a model or of a parameter file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.measure import HOW, OUTPUT, WHAT
from howsmooth.cli.progress import choose

__all__ = ["Scope", "bound"]

Scope = StrEnum("Scope", ["head", "heads", "attention"])

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


def bound(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A built-in model, a local folder, a Hub id, or a .safetensors or .npz file of parameters.",
            show_default=False,
        ),
    ],
    text: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="The text whose tokens a model is given, as for howsmooth measure.",
            rich_help_panel=WHAT,
        ),
    ] = "python-docs",
    layers: Annotated[
        str,
        typer.Option(
            metavar="RANGES", help="all, or a list such as 0,6 or 0:4 or -1 (the last).", rich_help_panel=WHAT
        ),
    ] = "all",
    heads: Annotated[
        str,
        typer.Option(metavar="RANGES", help="Like --layers; only with --scope head.", rich_help_panel=WHAT),
    ] = "all",
    scope: Annotated[
        Scope,
        typer.Option(
            metavar="SCOPE",
            help="head: one head, values only; heads: all, before the output projection; attention: with it.",
            rich_help_panel=WHAT,
        ),
    ] = Scope["attention"],
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Numbers of tokens: start:stop:step or a list. Default: 64, or that of the X of a file.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    radius: Annotated[
        str,
        typer.Option(
            metavar="R|auto",
            help="Of the ball that the tokens lie in. auto: the largest norm that the norm layer before the "
            "attention can give, or else that of the tokens at hand.",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    random_init: Annotated[
        bool,
        typer.Option(
            "--random-init", help="Build the architecture with untrained weights.", rich_help_panel=WHAT
        ),
    ] = False,
    as_decoder: Annotated[
        bool,
        typer.Option(
            "--as-decoder", help="Run an encoder as a decoder, with its causal mask.", rich_help_panel=WHAT
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(help="Of the sequence that is picked, and of random weights.", rich_help_panel=HOW),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads. Default: what PyTorch chooses.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also write bounds.csv there.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON, and nothing else.", rich_help_panel=OUTPUT),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)
    ] = False,
) -> int:
    """Bound the Lipschitz constant of attention by every theorem there is, beside the measured constant."""
    from howsmooth.bounds import table
    from howsmooth.cli.parsing import parse_radius, use_threads
    from howsmooth.cli.tables import bounds_as_json, show_bounds
    from howsmooth.study.bounding import bound_all, bounds_frame
    from howsmooth.study.files import write_table
    from howsmooth.study.ranges import Ranges
    from howsmooth.study.sources import Request, open_source
    from howsmooth.study.tools import default_tools

    request = Request(
        name=source,
        text=text,
        layers=Ranges.parse(layers, "layers"),
        heads=Ranges.parse(heads, "heads"),
        scope=str(scope),
        random_init=random_init,
        as_decoder=as_decoder,
        seed=seed,
    )
    asked = Ranges.parse(lengths, "lengths").values() if lengths is not None else ()
    ball = parse_radius(radius, words=("auto",))
    use_threads(threads)
    display = choose(quiet=quiet)
    with display:
        display.phase("Reading")
        opened = open_source(request, default_tools())
        display.phase("Bounding")
        bounded = list(
            bound_all(
                opened,
                asked,
                None if isinstance(ball, str) else ball,
                table,
                display.advance,
            )
        )
    frame = bounds_frame(opened.label, bounded)
    written = None if out is None else write_table(frame, out, "bounds.csv")
    if json:
        typer.echo(bounds_as_json(opened, bounded, written))
    else:
        show_bounds(opened, bounded, written)
    return 0


bound.__dict__["examples"] = "\n\n".join(_EXAMPLES)
