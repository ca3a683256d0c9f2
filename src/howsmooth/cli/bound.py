"""``howsmooth bound``: every theorem's bound for the attention of a model or of a parameter file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.options import (
    HOW,
    OUTPUT,
    WHAT,
    AsDecoderOption,
    HeadsOption,
    JsonOption,
    LayersOption,
    RandomInitOption,
    Scope,
    ScopeOption,
    SourceArgument,
    TextOption,
    ThreadsOption,
)
from howsmooth.cli.progress import choose

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


def bound(
    source: SourceArgument,
    text: TextOption = "python-docs",
    layers: LayersOption = "all",
    heads: HeadsOption = "all",
    scope: ScopeOption = Scope["attention"],
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
    random_init: RandomInitOption = False,
    as_decoder: AsDecoderOption = False,
    seed: Annotated[
        int,
        typer.Option(help="Of the sequence that is picked, and of random weights.", rich_help_panel=HOW),
    ] = 0,
    threads: ThreadsOption = None,
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
