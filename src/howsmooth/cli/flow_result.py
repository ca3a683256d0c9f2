"""Print the result of ``howsmooth flow`` as tables or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from howsmooth.cli.terminal_output import as_json, heading, paragraph, say, show_table
from howsmooth.study.flows.flow_outputs import FlowOutputs
from howsmooth.study.flows.flow_system import System
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import Ending, FrameRow, plain_rows
from howsmooth.study.store import STORE_NAME
from howsmooth.study.text_formatting import readable, sentence

__all__ = ["flow_as_json", "show_flow"]

_ROWS = 6
_COLUMNS = {
    "time": "time",
    "clusters": "clusters",
    "spread": "spread",
    "effective_rank": "effective rank",
    "log_energy": "log energy",
}


def flow_as_json(
    system: System, outcome: Outcome, ending: Ending | None, published: FlowOutputs, folder: Path
) -> str:
    """Return the metrics, growth and files of a flow as one JSON object; NaN and infinity become null."""
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


def show_flow(
    system: System, outcome: Outcome, ending: Ending | None, published: FlowOutputs, folder: Path
) -> None:
    """Print how far the tokens of a flow cluster at several times, and how the flow ended.

    The paths of the written files come last.
    """
    n, d = system.x.shape
    heading(f"\n{readable(system.label)}: {readable(system.title, longest=200)}")
    paragraph(f"{n} tokens in dimension {d}, until t = {_last(published):.6g}\n")
    last = len(published.metrics) - 1
    places = sorted({round(last * k / (_ROWS - 1)) for k in range(_ROWS)})
    shown = published.metrics.iloc[places].to_dict("records")
    show_table(list(_COLUMNS.values()), [[f"{row[name]:.4g}" for name in _COLUMNS] for row in shown])
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
    """Return a sentence on how far perturbations of the initial tokens have grown at the last time."""
    last = table.iloc[-1]
    words = f"Perturbations have grown by a factor of {last['value']:.5g}"
    words += f" [{last['lower']:.5g}, {last['upper']:.5g}]"
    if not pd.isna(last["discretisation_error"]):
        error = last["discretisation_error"]
        words += f", with a discretisation error of about {error:.1e} by the step of {last['method']}"
    return f"{words}; the product of the steps' constants is {last['product']:.5g}."
