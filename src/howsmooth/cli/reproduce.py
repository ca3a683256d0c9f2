"""``howsmooth reproduce``: the paper's figures from one command."""

from __future__ import annotations

import json as json_format
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howsmooth.cli.measure import TYPED
from howsmooth.cli.options import (
    HOW,
    OUTPUT,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    QuietOption,
    ThreadsOption,
)
from howsmooth.cli.progress import Display, choose
from howsmooth.cli.watch import INTERRUPTED
from howsmooth.errors import ArgumentError
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.reproduce.experiment import Request, Step
    from howsmooth.reproduce.produce import Produced
    from howsmooth.study.plan import ModelSpec

__all__ = ["PARTLY", "reproduce"]

PARTLY = 3
"""The exit code if one figure could not be made and others were."""

WHAT = "What to reproduce"
_VARIANTS = {"random-init": "random_init", "as-decoder": "as_decoder"}

_EXAMPLES = (
    "Into --out go reproduce.html, which puts everything together, and a folder for each figure with its "
    "PDF, its tables and all that was measured for it.",
    "Examples:",
    "[cyan]howsmooth reproduce[/]  everything, without a network",
    "[cyan]howsmooth reproduce --list[/]  what there is",
    "[cyan]howsmooth reproduce figure-1 --lengths 4:32:4 --samples 3[/]  a quick look",
    "[cyan]howsmooth reproduce figure-1 --as-published[/]  beside what the paper's code computes",
    "[cyan]howsmooth reproduce figure-1 --model bert-base-uncased --model bert-base-uncased,as-decoder "
    "--model gpt2,random-init --text alice --text ag_news[/]  the paper's own, with a network",
    "[cyan]howsmooth reproduce --model ./my-model --text book.txt[/]  all figures of another model",
    "The same command again continues where it was interrupted, and repeats nothing.",
)


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIGURE", help="As --list names them. Default: all.", show_default=False),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Say which figures there are, and do nothing else.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A built-in model, a local folder, or a Hub id, instead of the figure's own; with "
            ",random-init or ,as-decoder behind it for this model alone. May be repeated.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    as_decoder: Annotated[
        bool,
        typer.Option(
            "--as-decoder",
            help="Run each --model as a decoder, with its causal mask.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    random_init: Annotated[
        bool,
        typer.Option(
            "--random-init", help="Build each --model with untrained weights.", rich_help_panel=WHAT
        ),
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A path (.txt, or AG_NEWS-format .csv), python-docs, python-code, alice or ag_news. May be "
            "repeated. Default: python-docs python-code.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="all, or a list such as 0,6 or 0:4 or -1 (the last), instead of the figure's own.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Numbers of tokens, start:stop:step or a list, instead of the figure's own.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences a length, instead of the figure's own.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Show beside it what the paper's published code computes. Takes several times as long.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="From which all randomness derives.", rich_help_panel=HOW)
    ] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = Dtype.float32,
    threads: ThreadsOption = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder for the page, the figures and what is measured.", rich_help_panel=OUTPUT),
    ] = Path("howsmooth-reproduced"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Reproduce the figures of the paper: measured, drawn, and put on one page with what is seen in them."""
    from howsmooth.cli.parsing import use_threads
    from howsmooth.reproduce.experiment import TEXTS, Request
    from howsmooth.reproduce.produce import choose_experiments, produce
    from howsmooth.reproduce.registry import EXPERIMENTS
    from howsmooth.study.ranges import Ranges
    from howsmooth.study.tools import default_tools

    if listed:
        if json:
            typer.echo(
                json_format.dumps([{"name": e.name, "paper": e.paper, "title": e.title} for e in EXPERIMENTS])
            )
        else:
            for one in EXPERIMENTS:
                typer.echo(f"{one.name:<18} {one.paper}: {one.title}")
        return 0
    chosen = choose_experiments(figures or [])
    command = encodable(shlex.join(["howsmooth", *TYPED.get()]))
    request = Request(
        models=_models(model or [], as_decoder=as_decoder, random_init=random_init),
        texts=tuple(text or TEXTS),
        lengths=None if lengths is None else Ranges.parse(lengths, "lengths").values(),
        samples=samples,
        layers=None if layers is None else Ranges.parse(layers, "layers"),
        seed=seed,
        device=device,
        dtype=str(dtype),
        as_published=as_published,
        command=command,
    )
    use_threads(threads)
    display = choose(quiet=quiet)
    watch = _Watch(display)
    try:
        with display:
            made = produce(chosen, request, out, default_tools(), on_phase=watch.phase, on_step=watch.step)
    except KeyboardInterrupt:
        typer.echo(watch.interrupted(out, command), err=True)
        return INTERRUPTED
    if json:
        typer.echo(_as_json(made, request, out))
    elif not quiet:
        _show(made)
    return PARTLY if made.refused else 0


def _models(names: list[str], *, as_decoder: bool, random_init: bool) -> tuple[ModelSpec, ...]:
    """Read the models that are asked for, with the variants behind their names."""
    from howsmooth.study.plan import ModelSpec

    if not names and (as_decoder or random_init):
        raise ArgumentError(
            "model",
            expected="a --model together with --as-decoder or --random-init",
            got="none",
            remedy="Give --model, or leave them out.",
        )
    found = []
    for name in names:
        base, options = name, {"as_decoder": as_decoder, "random_init": random_init}
        while (variant := base.rpartition(",")[2]) in _VARIANTS and "," in base:
            base = base.rpartition(",")[0]
            options[_VARIANTS[variant]] = True
        spec = ModelSpec(base, as_decoder=options["as_decoder"], random_init=options["random_init"])
        if spec in found:
            raise ArgumentError("model", expected="each only once", got=f"{spec.label!r} twice")
        found.append(spec)
    return tuple(found)


class _Watch:
    """Shows how far it is, and knows what to say after Ctrl-C."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._measured = False

    def phase(self, words: str) -> None:
        self._display.phase(words)

    def step(self, step: Step) -> None:
        self._measured = True
        self._display.advance(step.done, step.planned, step.words)

    def interrupted(self, folder: Path, command: str) -> str:
        if not self._measured:
            return "interrupted: nothing had been measured yet."
        return (
            f"interrupted: what was measured is kept in {encodable(str(folder))}. Continue with the same "
            f"command:\n  {command}"
        )


def _show(made: Produced) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    for section in made.sections:
        if section.name not in made.seconds:
            continue
        console.print(Text(f"\n{section.paper}: {section.title}", style="bold"))
        for words in section.finding.seen if section.finding else [f"Not made: {section.refused}"]:
            console.print(Padding(Text(f"- {readable(words, longest=2000)}"), (0, 0, 0, 2)))
    # Not through rich, which would break a long path in two.
    print(encodable(f"\nPage: {made.page}"))
    print(
        encodable(f"Also in {made.page.parent}: a folder for each figure, with PDF, tables and measurements")
    )


def _as_json(made: Produced, request: Request, folder: Path) -> str:
    from howsmooth.cli.result import package_version, records

    written = {
        "howsmooth": package_version(),
        "out": str(folder),
        "page": str(made.page),
        "settings": {
            "seed": request.seed,
            "device": request.device,
            "dtype": request.dtype,
            "as_published": request.as_published,
            "texts": list(request.texts),
        },
        "refused": made.refused,
        "figures": [
            {
                "name": section.name,
                "paper": section.paper,
                "title": section.title,
                "seconds": round(made.seconds[section.name], 3),
                "seen": section.finding.seen,
                "pictures": [
                    {"pdf": str(one.pdf), "png": str(one.png), "alt": one.alt}
                    for one in section.finding.pictures
                ],
                "tables": [
                    {"caption": caption, "rows": records(table)} for caption, table in section.finding.tables
                ],
            }
            for section in made.sections
            if section.finding is not None and section.name in made.seconds
        ],
    }
    return json_format.dumps(written, indent=2, allow_nan=False)


reproduce.__dict__["examples"] = "\n\n".join(_EXAMPLES)
