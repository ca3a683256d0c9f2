"""The command ``howsmooth flow``, which moves tokens through attention and draws their paths."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from howsmooth.cli.plan_execution import resumable, rows_kept
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, heading, paragraph, say, show_table
from howsmooth.cli.typer_command import ONE_PROCESS, ShownOrQuiet, as_typed, command
from howsmooth.study.execution_options import Execution
from howsmooth.study.flows.flow_plan import FlowPlan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.text_formatting import readable, sentence

if TYPE_CHECKING:
    import pandas as pd

    from howsmooth.study.flows.flow_outputs import FlowOutputs
    from howsmooth.study.flows.flow_system import System
    from howsmooth.study.records import Ending

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
def flow(plan: FlowPlan, execution: Execution, shown: ShownOrQuiet) -> int:
    """Move tokens by the flow dX/dt = f(X) of attention f, and watch them form clusters."""
    from howsmooth.study.flows.flow_outputs import write_flow_outputs
    from howsmooth.study.flows.flow_run import run_flow
    from howsmooth.study.flows.flow_system import load_system
    from howsmooth.study.runner import Means

    out = execution.out
    with resumable(lambda: rows_kept(out), as_typed()), shown_progress(quiet=shown.quiet) as display:
        display.phase("Reading")
        system = load_system(plan)
        outcome, ending = run_flow(plan, system, out, Means(display, as_typed()))
        published = write_flow_outputs(out, plan, system, display)
    if shown.json:
        typer.echo(_as_json(system, outcome, ending, published, out))
    elif not shown.quiet:
        _show(plan, system, outcome, ending, published, out)
    return 0 if ending is None else ENDED_EARLY


_ROWS = 6
# All times are printed if they are no more than this.
_MOST_ROWS = 12
_COLUMNS = {
    "time": "time",
    "clusters": "clusters",
    "spread": "spread",
    "effective_rank": "effective rank",
    "log_energy": "log energy",
}


def _as_json(
    system: System, outcome: Outcome, ending: Ending | None, published: FlowOutputs, folder: Path
) -> str:
    """Return the metrics, the growth of perturbations and the files of a flow as one JSON object."""
    from howsmooth.study.records import FrameRow, plain_rows
    from howsmooth.study.store import STORE_NAME

    frames = FrameRow.table
    return as_json(
        out=folder,
        seconds=round(outcome.seconds, 3),
        source=system.label,
        description=system.title,
        text=system.text or None,
        norms=system.norms,
        tokens=system.x.shape[0],
        dimension=system.x.shape[1],
        fingerprint=system.fingerprint,
        frames={"made": outcome.made[frames], "kept": outcome.kept[frames]},
        status="finished" if ending is None else ending.status,
        ending=None if ending is None else asdict(ending),
        last_time=_last(published),
        tolerance=published.tolerance,
        metrics=plain_rows(published.metrics),
        growth=plain_rows(published.growth) if len(published.growth) else None,
        files={
            "store": folder / STORE_NAME,
            "trajectory": published.trajectory,
            "metrics": published.table,
            "figures": published.figures,
            "animation": published.animation,
        },
    )


def _show(
    plan: FlowPlan,
    system: System,
    outcome: Outcome,
    ending: Ending | None,
    published: FlowOutputs,
    folder: Path,
) -> None:
    """Print how the tokens cluster at several times, how the flow ended, and the written files."""
    from howsmooth.study.records import FrameRow
    from howsmooth.study.store import STORE_NAME

    n, d = system.x.shape
    heading(f"\n{readable(system.label)}: {readable(system.title, longest=200)}")
    on_sphere = f" on the sphere of radius {system.radius:.4g}" if plan.sphere else ""
    paragraph(f"{n} tokens in dimension {d}{on_sphere}, until t = {_last(published):.6g}\n")
    count = len(published.metrics)
    rows = count if count <= _MOST_ROWS else _ROWS
    places = sorted({round((count - 1) * k / max(rows - 1, 1)) for k in range(rows)})
    shown = published.metrics.iloc[places].to_dict("records")
    show_table(list(_COLUMNS.values()), [[f"{row[name]:.4g}" for name in _COLUMNS] for row in shown])
    if len(places) < count:
        paragraph(f"\n{len(places)} of {count} times; metrics.csv has all.")
    if len(published.growth):
        paragraph(f"\n{_growth(published.growth)}")
    made, kept = (count[FrameRow.table] for count in (outcome.made, outcome.kept))
    before = f", {kept} were already there" if kept else ""
    paragraph(f"\n{made} frames made in {outcome.seconds:.1f} s{before}.")
    if ending is not None:
        ended = f"The {ending.what} {ending.status}: {ending.reason}"
        paragraph(sentence(readable(ended, longest=400)))
    say(f"Figure: {published.figures[0]}")
    if published.animation is not None:
        say(f"Animation: {published.animation}")
    say(f"Also in {folder}: flow.pdf, trajectory.npz, metrics.csv, {STORE_NAME}")


def _last(published: FlowOutputs) -> float:
    return float(published.metrics["time"].iloc[-1])


def _growth(table: pd.DataFrame) -> str:
    """Return a sentence on how much perturbations of the initial tokens have grown at the final time."""
    import pandas as pd

    from howsmooth.roundoff import interval_in_digits

    last = table.iloc[-1]
    words = f"Perturbations have grown by a factor of {last['value']:.5g}"
    words += f" {interval_in_digits(last['lower'], last['upper'], 5)}"
    if not pd.isna(last["discretisation_error"]):
        error = last["discretisation_error"]
        words += f", with a discretisation error of about {error:.1e} by the step of {last['method']}"
    return f"{words}; the product of the steps' constants is {last['product']:.5g}."
