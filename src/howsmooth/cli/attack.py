"""``howsmooth attack``: the tokens at which attention is steepest, and how near they come to the bounds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.measure import TYPED
from howsmooth.cli.options import (
    HOW,
    OUTPUT,
    AsDecoderOption,
    JsonOption,
    LayersOption,
    QuietOption,
    RandomInitOption,
    Scope,
    ScopeOption,
    SeedOption,
    SourceArgument,
    TextOption,
    ThreadsOption,
    under,
)
from howsmooth.cli.progress import Display, choose
from howsmooth.cli.watch import INTERRUPTED
from howsmooth.study.names import encodable

__all__ = ["attack"]

WHAT = "What to attack"

_EXAMPLES = (
    "Into --out go a store, summary.csv with one row an attention and length, attacks.csv with everything "
    "tried, exponents.csv, figures, and the tokens found in inputs/, each with its attention, for "
    "howsmooth bound or howsmooth.models.parameter_files.read_parameter_file.",
    "Examples:",
    "[cyan]howsmooth attack builtin-encoder --layers 0 --lengths 12,24,48 --steps 20 --restarts 4[/]  quick",
    "[cyan]howsmooth attack builtin-decoder --heads all --out worst[/]  all heads of all layers; takes long",
    "[cyan]howsmooth attack gpt2 --random-init --layers 0,6 --radius data[/]  as long as real tokens are",
    "[cyan]howsmooth attack ./head.npz --radius 4 --lengths 10,100[/]  parameters of your own",
    "The same command again continues where it was interrupted; lengths, layers and heads can be added.",
)


def attack(
    source: SourceArgument,
    text: Annotated[str, under(WHAT, TextOption)] = "python-docs",
    layers: Annotated[str, under(WHAT, LayersOption)] = "all",
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Like --layers; only with --scope head. Default: 0.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    scope: Annotated[Scope, under(WHAT, ScopeOption)] = Scope["head"],
    lengths: Annotated[
        str,
        typer.Option(
            metavar="RANGES",
            help="Numbers of tokens, at least 2: start:stop:step or a list.",
            rich_help_panel=WHAT,
        ),
    ] = "12:392:76",
    radius: Annotated[
        str,
        typer.Option(
            metavar="R|auto|data",
            help="Of the ball in which tokens are sought. auto: the largest norm that the norm layer before "
            "the attention can give, or else as data; data: the norm of the longest token at hand.",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    random_init: Annotated[bool, under(WHAT, RandomInitOption)] = False,
    as_decoder: Annotated[bool, under(WHAT, AsDecoderOption)] = False,
    steps: Annotated[
        int,
        typer.Option(
            help="Steps of gradient ascent over whole inputs; three times as many among inputs of few "
            "distinct tokens.",
            rich_help_panel=HOW,
        ),
    ] = 30,
    restarts: Annotated[
        int,
        typer.Option(help="Random restarts among inputs of few distinct tokens.", rich_help_panel=HOW),
    ] = 48,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the store, tables, figures and inputs.", rich_help_panel=OUTPUT)
    ] = Path("howsmooth-attack"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Look for the tokens at which attention is steepest, within the ball that its tokens lie in."""
    from howsmooth.cli.parsing import parse_radius, use_threads
    from howsmooth.cli.tables import attacks_as_json, show_attacks
    from howsmooth.study.attack_plan import AttackPlan, attack_tools
    from howsmooth.study.attack_tables import publish_attacks
    from howsmooth.study.attacks import attack as carry_out
    from howsmooth.study.environment import environment
    from howsmooth.study.ranges import Ranges
    from howsmooth.study.sources import Request, open_source
    from howsmooth.study.tools import default_tools

    chosen = heads if heads is not None else "0" if scope == Scope["head"] else "all"
    request = Request(
        name=source,
        text=text,
        layers=Ranges.parse(layers, "layers"),
        heads=Ranges.parse(chosen, "heads"),
        scope=str(scope),
        random_init=random_init,
        as_decoder=as_decoder,
        seed=seed,
    )
    plan = AttackPlan(
        request=request,
        lengths=Ranges.parse(lengths, "lengths").values(),
        radius=parse_radius(radius, words=("auto", "data")),
        steps=steps,
        restarts=restarts,
    )
    use_threads(threads)
    command = encodable(shlex.join(["howsmooth", *TYPED.get()]))
    display = choose(quiet=quiet)
    watch = _Watch(display)
    try:
        with display:
            display.phase("Reading")
            opened = open_source(request, default_tools())
            outcome = carry_out(
                plan,
                opened,
                out,
                attack_tools(),
                command=command,
                environment=environment("cpu"),
                on_progress=watch,
            )
            display.phase("Drawing figures")
            published = publish_attacks(
                out, lambda done, total: display.advance(float(done), float(total), f"{done} of {total}")
            )
    except KeyboardInterrupt:
        typer.echo(watch.interrupted(out, command), err=True)
        return INTERRUPTED
    if json:
        typer.echo(attacks_as_json(published, outcome, out))
    elif not quiet:
        show_attacks(published, outcome, out)
    return 0


class _Watch:
    """Hears how far the attack is, shows it, and remembers it for the message after Ctrl-C."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._finished: int | None = None

    def __call__(self, progress: object) -> None:
        from howsmooth.study.attack_plan import AttackProgress

        assert isinstance(progress, AttackProgress)
        if self._finished is None:
            kept = f" ({progress.kept} more are in the store already)" if progress.kept else ""
            things = "attention at one length" if progress.planned == 1 else "attentions and lengths"
            self._display.phase(f"Attacking {progress.planned} {things}{kept}")
        self._finished = progress.done + progress.kept
        words = f"{progress.done} of {progress.planned}, {progress.words}".rstrip(", ")
        self._display.advance(progress.cost_done, progress.cost_planned, words)

    def interrupted(self, folder: Path, command: str) -> str:
        """Say what was kept, and how to go on."""
        if self._finished is None:
            return "interrupted: nothing had been attacked yet."
        return (
            f"interrupted: {self._finished} finished attacks are kept in {folder}. "
            f"Continue with the same command:\n  {command}"
        )


attack.__dict__["examples"] = "\n\n".join(_EXAMPLES)
