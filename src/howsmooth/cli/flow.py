"""``howsmooth flow``: tokens as they move through attention, kept, drawn and animated."""

from __future__ import annotations

import typer

from howsmooth.cli.carrying import resumable
from howsmooth.cli.options import JsonOption, QuietOption, as_typed, command
from howsmooth.cli.progress import shown_progress
from howsmooth.study.flows.plan import FlowPlan
from howsmooth.study.plan import Execution

__all__ = ["ENDED_EARLY", "flow"]

ENDED_EARLY = 3
"""The exit code if the flow ended before its last time, as one that blows up does."""

_EXAMPLES = (
    "Into --out go flow.png, flow.pdf and flow.gif, trajectory.npz with the tokens at all times, metrics.csv "
    "with clusters, rank and energy at each, and a store, study.sqlite.",
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


@command(*_EXAMPLES, without=("executor", "workers", "scheduler"), out="howsmooth-flow")
def flow(plan: FlowPlan, execution: Execution, json: JsonOption = False, quiet: QuietOption = False) -> int:
    """Let tokens flow through attention, x' = f(X), and watch them cluster."""
    from howsmooth.cli.flow_result import flow_as_json, show_flow
    from howsmooth.study.figures.flow_animation import check_animation
    from howsmooth.study.flows.opening import open_system
    from howsmooth.study.flows.publish import publish_flow
    from howsmooth.study.flows.run import run_flow
    from howsmooth.study.runner import Means

    check_animation(plan.animation)
    with resumable(execution.out, as_typed()), shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        system = open_system(plan)
        outcome, ending = run_flow(plan, system, execution.out, Means(display, as_typed()))
        published = publish_flow(execution.out, plan, system, display)
    if json:
        typer.echo(flow_as_json(system, outcome, ending, published, execution.out))
    elif not quiet:
        show_flow(system, outcome, ending, published, execution.out)
    return 0 if ending is None else ENDED_EARLY
