"""The command ``howsmooth flow``: integrate tokens that move through attention, and draw their paths."""

from __future__ import annotations

import typer

from howsmooth.cli.plan_execution import resumable
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import ONE_PROCESS, JsonOption, QuietOption, as_typed, command
from howsmooth.study.execution_options import Execution
from howsmooth.study.flows.flow_plan import FlowPlan

__all__ = ["ENDED_EARLY", "flow"]

ENDED_EARLY = 3
"""The exit code if the flow ended before its last time, for example because it blew up."""

_EXAMPLES = (
    "The folder --out receives flow.png, flow.pdf and flow.gif; trajectory.npz with the tokens at all "
    "times; metrics.csv with the number of clusters, the effective rank and the interaction energy at each "
    "time; and a store, study.sqlite.",
    "Examples:",
    "[cyan]howsmooth flow identity --rescale --tokens 60[/]  clusters at the corners of a polygon",
    "[cyan]howsmooth flow identity --sphere --dimension 3 --beta 4 --until 30[/]  clusters on a sphere",
    "[cyan]howsmooth flow random --causal --sphere --seed 3[/]  with a causal mask",
    "[cyan]howsmooth flow negative --closure --tokens 500 --until 4[/]  tokens beside a Gaussian measure",
    "[cyan]howsmooth flow builtin-encoder --method residual[/]  the attention layers of a model in sequence",
    "[cyan]howsmooth flow builtin-decoder --method residual --norms[/]  also with the norm layers",
    "[cyan]howsmooth flow ./head.npz --start gaussian --tokens 100[/]  your own parameters",
    "Named systems: identity, negative, one-direction, turning, random. Write ./identity for a folder with "
    "such a name.",
    "Run the same command again to continue after an interruption. If the flow ends early, for example "
    "because it blows up in finite time, its states until then are saved and drawn, and the exit code is 3.",
)


@command(*_EXAMPLES, without=ONE_PROCESS, out="howsmooth-flow")
def flow(plan: FlowPlan, execution: Execution, json: JsonOption = False, quiet: QuietOption = False) -> int:
    """Move tokens by the flow x' = f(X) of attention, and watch them form clusters."""
    from howsmooth.cli.flow_result import flow_as_json, show_flow
    from howsmooth.study.figures.flow_animation import check_animation
    from howsmooth.study.flows.flow_outputs import write_flow_outputs
    from howsmooth.study.flows.flow_run import run_flow
    from howsmooth.study.flows.flow_system import load_system
    from howsmooth.study.runner import Means

    check_animation(plan.animation)
    with resumable(execution.out, as_typed()), shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        system = load_system(plan)
        outcome, ending = run_flow(plan, system, execution.out, Means(display, as_typed()))
        published = write_flow_outputs(execution.out, plan, system, display)
    if json:
        typer.echo(flow_as_json(system, outcome, ending, published, execution.out))
    elif not quiet:
        show_flow(system, outcome, ending, published, execution.out)
    return 0 if ending is None else ENDED_EARLY
