"""A flow for people and for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth.cli.result import package_version, records
from howsmooth.study.flows.opening import System
from howsmooth.study.flows.publish import PublishedFlow
from howsmooth.study.names import encodable, readable, sentence
from howsmooth.study.progress import Outcome
from howsmooth.study.records import Ending, FrameRow
from howsmooth.study.store import STORE_NAME

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
    system: System, outcome: Outcome, ending: Ending | None, published: PublishedFlow, folder: Path
) -> str:
    """Describe the flow as one JSON object; what is not a number is null."""
    frames = FrameRow.table
    described = {
        "howsmooth": package_version(),
        "out": str(folder),
        "seconds": round(outcome.seconds, 3),
        "source": system.label,
        "description": system.title,
        "text": system.text or None,
        "norms": system.norms,
        "tokens": system.x.shape[0],
        "dimension": system.x.shape[1],
        "fingerprint": system.fingerprint,
        "frames": {"made": outcome.made[frames], "kept": outcome.kept[frames]},
        "status": "finished" if ending is None else ending.status,
        "ending": None if ending is None else asdict(ending),
        "last_time": _last(published),
        "tolerance": published.tolerance,
        "metrics": records(published.metrics),
        "growth": records(published.growth) if len(published.growth) else None,
        "files": {
            "store": str(folder / STORE_NAME),
            "trajectory": str(published.trajectory),
            "metrics": str(published.table),
            "figures": [str(path) for path in published.figures],
            "animation": None if published.animation is None else str(published.animation),
        },
    }
    return json.dumps(described, indent=2, allow_nan=False)


def show_flow(
    system: System, outcome: Outcome, ending: Ending | None, published: PublishedFlow, folder: Path
) -> None:
    """Print what was measured at some of the times, how the flow ended, and where everything is."""
    console = Console()
    n, d = system.x.shape
    words = f"{readable(system.label)}: {readable(system.title, longest=200)}"
    console.print(Text(f"\n{words}", style="bold"))
    console.print(Text(f"{n} tokens in dimension {d}, until t = {_last(published):.6g}"))
    console.print(Padding(_table(published), (1, 0, 0, 2), expand=False))
    if len(published.growth):
        console.print(Text(f"\n{_growth(published.growth)}"))
    made, kept = (count[FrameRow.table] for count in (outcome.made, outcome.kept))
    before = f", {kept} were there already" if kept else ""
    console.print(Text(f"\n{made} frames made in {outcome.seconds:.1f} s{before}."))
    if ending is not None:
        ended = f"The {ending.what} {ending.status}: {ending.reason}"
        console.print(Text(sentence(readable(ended, longest=400))))
    # Not through rich, which would break a long path in two.
    print(encodable(f"Figure: {published.figures[0]}"))
    if published.animation is not None:
        print(encodable(f"Animation: {published.animation}"))
    print(encodable(f"Also in {folder}: flow.pdf, trajectory.npz, metrics.csv, {STORE_NAME}"))


def _last(published: PublishedFlow) -> float:
    return float(published.metrics["time"].iloc[-1])


def _growth(table: pd.DataFrame) -> str:
    """Say how much perturbations have grown in the end."""
    last = table.iloc[-1]
    words = f"Perturbations have grown {last['value']:.5g} times"
    words += f" [{last['lower']:.5g}, {last['upper']:.5g}]"
    if not pd.isna(last["discretisation_error"]):
        words += f", up to about {last['discretisation_error']:.1e} by the step of {last['method']}"
    return f"{words}; the product of the steps' constants is {last['product']:.5g}."


def _table(published: PublishedFlow) -> Table:
    """Tabulate a few of the frames, the first and the last among them."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for words in _COLUMNS.values():
        table.add_column(words, justify="right", no_wrap=True)
    last = len(published.metrics) - 1
    for place in sorted({round(last * k / (_ROWS - 1)) for k in range(_ROWS)}):
        row = published.metrics.iloc[place]
        table.add_row(*(f"{row[name]:.4g}" for name in _COLUMNS))
    return table
