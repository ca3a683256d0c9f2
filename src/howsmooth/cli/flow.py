"""``howsmooth flow``: tokens as they move through attention, kept, drawn and animated."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    SeedOption,
    TextOption,
    ThreadsOption,
    under,
)
from howsmooth.cli.progress import Display, choose
from howsmooth.cli.watch import INTERRUPTED
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.flows.run import FlowProgress

__all__ = ["ENDED_EARLY", "flow"]

ENDED_EARLY = 3
"""The exit code if the flow ended before its last time, as one that blows up does."""

WHAT = "What flows"
_OF_A_MODEL = "What flows: models"

Attention = StrEnum("Attention", ["softmax", "l2", "sinkhorn"])
Animation = StrEnum("Animation", ["gif", "mp4", "none"])

_EXAMPLES = (
    "Into --out go flow.png, flow.pdf and flow.gif, trajectory.npz with the tokens at all times, metrics.csv "
    "with clusters, rank and energy at each, and a store, flow.sqlite.",
    "Examples:",
    "[cyan]howsmooth flow identity --rescale --tokens 60[/]  clusters at the corners of a polygon",
    "[cyan]howsmooth flow identity --sphere --dimension 3 --beta 4 --until 30[/]  clusters on a sphere",
    "[cyan]howsmooth flow random --causal --sphere --seed 3[/]  tokens that see those before them only",
    "[cyan]howsmooth flow negative --closure --tokens 500 --until 4[/]  tokens beside a Gaussian measure",
    "[cyan]howsmooth flow builtin-encoder --method residual[/]  the attention layers of a model in sequence",
    "[cyan]howsmooth flow builtin-decoder --method residual --norms[/]  and their norm layers",
    "[cyan]howsmooth flow ./head.npz --start gaussian --tokens 100[/]  parameters of your own",
    "Named systems: identity, negative, one-direction, turning, random; a folder of this name is ./identity.",
    "The same command again continues where it was interrupted. If the flow ends early, as one that blows up "
    "in finite time, all is kept and drawn until then, and the exit code is 3.",
)


def flow(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A named system (identity, negative, one-direction, turning, random), a .safetensors or "
            ".npz file of parameters, a built-in model, a local folder, or a Hub id.",
            show_default=False,
        ),
    ],
    start: Annotated[
        str,
        typer.Option(
            metavar="KIND|FILE",
            help="gaussian or sphere (drawn), text (the tokens of a model at its text), file (the X of a "
            "parameter file), or a .npy or .npz file of tokens X. auto: what the source has, or else "
            "gaussian, or sphere with --sphere.",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(
            help="How many. Default: 40, or 64 of a text.", show_default=False, rich_help_panel=WHAT
        ),
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(help="Of a named system. Default: 2.", show_default=False, rich_help_panel=WHAT),
    ] = None,
    radius: Annotated[
        float,
        typer.Option(
            help="Of the sphere, or the standard deviation of Gaussian tokens.", rich_help_panel=WHAT
        ),
    ] = 1.0,
    attention: Annotated[
        Attention,
        typer.Option(
            metavar="KIND", help="Of a named system: softmax, l2 or sinkhorn.", rich_help_panel=WHAT
        ),
    ] = Attention.softmax,
    beta: Annotated[
        float, typer.Option(help="Of a named system: the factor of its scores.", rich_help_panel=WHAT)
    ] = 1.0,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal",
            help="Of a named system: a token sees itself and those before it.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    sphere: Annotated[
        bool,
        typer.Option(
            "--sphere", help="Keep the tokens on a sphere, as norm layers do.", rich_help_panel=WHAT
        ),
    ] = False,
    rescale: Annotated[
        bool,
        typer.Option(
            "--rescale", help="Follow exp(-tV) x instead of tokens x that run away.", rich_help_panel=WHAT
        ),
    ] = False,
    closure: Annotated[
        bool,
        typer.Option(
            "--closure",
            help="Beside the tokens follow the Gaussian measure that they are drawn from.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    text: Annotated[str, under(_OF_A_MODEL, TextOption)] = "python-docs",
    layers: Annotated[str, under(_OF_A_MODEL, LayersOption)] = "all",
    random_init: Annotated[bool, under(_OF_A_MODEL, RandomInitOption)] = False,
    as_decoder: Annotated[bool, under(_OF_A_MODEL, AsDecoderOption)] = False,
    norms: Annotated[
        bool,
        typer.Option(
            "--norms",
            help="Take attention behind its norm layer, f(N(X)), from the tokens before that, in pre-norm "
            "models. Without: attention alone.",
            rich_help_panel=_OF_A_MODEL,
        ),
    ] = False,
    growth: Annotated[
        bool,
        typer.Option(
            "--growth",
            help="Also measure how much small perturbations of the start have grown, at ten times.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    until: Annotated[
        float | None,
        typer.Option(
            help="The last time. Default: 10, or the number of a model's layers, each of which lasts 1.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    frames: Annotated[int, typer.Option(help="How many states to keep, at most.", rich_help_panel=HOW)] = 100,
    method: Annotated[
        str,
        typer.Option(
            help="dopri5, dopri8 or bosh3, which choose their steps; euler, midpoint or rk4; or residual: "
            "layers X + h f(X).",
            rich_help_panel=HOW,
        ),
    ] = "dopri5",
    step: Annotated[
        float | None,
        typer.Option(
            help="Of a method that does not choose it. Default: one a frame; for residual layers of a model "
            "one a layer.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Relative error of a step that is chosen.", rich_help_panel=HOW)
    ] = 1e-7,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Tokens nearer than this are one cluster. Default: 1/20 of their spread at the start.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    animation: Annotated[
        Animation, typer.Option(metavar="KIND", help="gif, mp4 or none.", rich_help_panel=OUTPUT)
    ] = Animation.gif,
    out: Annotated[
        Path, typer.Option(help="Folder for the store, tables and pictures.", rich_help_panel=OUTPUT)
    ] = Path("howsmooth-flow"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Let tokens flow through attention, x' = f(X), and watch them cluster."""
    from howsmooth.cli.flow_result import flow_as_json, show_flow
    from howsmooth.cli.parsing import use_threads
    from howsmooth.study.environment import environment
    from howsmooth.study.figures.flow_animation import check_animation
    from howsmooth.study.flows.metrics import check_tolerance
    from howsmooth.study.flows.opening import open_system
    from howsmooth.study.flows.plan import FlowPlan
    from howsmooth.study.flows.publish import publish_flow
    from howsmooth.study.flows.run import flow_tools, run_flow
    from howsmooth.study.tools import default_tools

    plan = FlowPlan(
        source=source,
        start=start,
        tokens=tokens,
        dimension=dimension,
        radius=radius,
        until=until,
        frames=frames,
        method=method,
        step=step,
        rtol=rtol,
        sphere=sphere,
        rescale=rescale,
        closure=closure,
        growth=growth,
        attention=str(attention),
        causal=causal,
        beta=beta,
        layers=layers,
        text=text,
        random_init=random_init,
        as_decoder=as_decoder,
        norms=norms,
        seed=seed,
    )
    check_animation(str(animation))
    check_tolerance(tolerance)
    use_threads(threads)
    command = encodable(shlex.join(["howsmooth", *TYPED.get()]))
    display = choose(quiet=quiet)
    watch = _Watch(display)
    try:
        with display:
            display.phase("Reading")
            system = open_system(plan, default_tools())
            outcome = run_flow(
                plan,
                system,
                out,
                flow_tools(),
                command=command,
                environment=environment("cpu"),
                on_progress=watch,
                on_part=display.phase,
            )
            published = publish_flow(
                out,
                title=f"{readable(system.label)}: {system.title}",
                ordered=system.in_order,
                animation=str(animation),
                tolerance=tolerance,
                on_part=display.phase,
                on_progress=lambda done, total: display.advance(
                    float(done), float(total), f"{done} of {total}"
                ),
            )
    except KeyboardInterrupt:
        typer.echo(watch.interrupted(out, command), err=True)
        return INTERRUPTED
    if json:
        typer.echo(flow_as_json(system, outcome, published, out))
    elif not quiet:
        show_flow(system, outcome, published, out)
    return 0 if outcome.ending is None else ENDED_EARLY


class _Watch:
    """Hears how far the flow is, shows it, and remembers it for the message after Ctrl-C."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._last: FlowProgress | None = None

    def __call__(self, progress: FlowProgress) -> None:
        if self._last is None:
            kept = (
                f" ({progress.kept} of {progress.planned} frames are there already)" if progress.kept else ""
            )
            self._display.phase(f"Integrating{kept}")
        self._last = progress
        self._display.advance(
            float(progress.done - progress.kept),
            float(progress.planned - progress.kept),
            f"frame {progress.done} of {progress.planned}, t = {progress.time:.4g}",
        )

    def interrupted(self, folder: Path, command: str) -> str:
        """Say what was kept, and how to go on."""
        if self._last is None:
            return (
                f"interrupted. What was finished before is kept. Continue with the same command:\n  {command}"
            )
        return (
            f"interrupted: {self._last.done} of {self._last.planned} frames are kept in "
            f"{encodable(str(folder))}. Continue with the same command:\n  {command}"
        )


flow.__dict__["examples"] = "\n\n".join(_EXAMPLES)
