"""Write the outputs of a flow beside its store: trajectory, metrics, a figure and an animation."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.dynamics import cluster_labels, effective_rank, log_interaction_energy
from howsmooth.study.figures.flows import FlowView, animate_flow, draw_flow
from howsmooth.study.file_writing import write_table, written_beside
from howsmooth.study.flows.flow_plan import FlowPlan
from howsmooth.study.flows.flow_run import ending, frames, gaussian_of, tokens_of
from howsmooth.study.flows.flow_system import System
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.records import FrameRow, GrowthRow
from howsmooth.study.store import Store
from howsmooth.study.text_formatting import readable

__all__ = ["FlowOutputs", "measure_frames", "view_of", "write_flow_outputs"]

_PART_OF_SPREAD = 0.05
_MOST_SHOWN = 3


@dataclass(frozen=True)
class FlowOutputs:
    """The files written by :func:`write_flow_outputs`, and the tables in them.

    ``metrics`` comes from :func:`measure_frames`. ``growth`` is the growth of perturbations at some times,
    and empty if it was not measured. ``tolerance`` is the distance below which tokens are in one cluster.
    ``figures`` are the paths of the figure as PNG and PDF, ``trajectory`` and ``table`` of ``trajectory.npz``
    and ``metrics.csv``.
    """

    metrics: pd.DataFrame
    growth: pd.DataFrame
    tolerance: float
    figures: tuple[Path, Path]
    animation: Path | None
    trajectory: Path
    table: Path


def write_flow_outputs(
    folder: str | os.PathLike[str], plan: FlowPlan, system: System, listener: Listener = SILENT
) -> FlowOutputs:
    """Write ``trajectory.npz``, ``metrics.csv``, ``flow.png``, ``flow.pdf`` and an animation beside a store.

    Raises
    ------
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    folder = Path(folder)
    with written_beside(folder, "frames"):
        with Store.open(folder, write=False) as store:
            listener.phase("Measuring clusters")
            found = frames(store)
            tolerance = plan.tolerance or _PART_OF_SPREAD * _spread(tokens_of(found[0]))
            metrics = measure_frames(found, tolerance, plan.beta, listener)
            growth = store.table(GrowthRow, ["time"])[list(GrowthRow.columns())]
            view = view_of(store, plan, system, metrics, tolerance)
        trajectory, partial = folder / "trajectory.npz", folder / ".trajectory.partial.npz"
        numbers: dict[str, Any] = _numbers(found)
        np.savez(partial, **numbers)
        partial.replace(trajectory)
        table = write_table(metrics, folder, "metrics.csv")
        if len(growth):
            write_table(growth, folder, "growth.csv")
        listener.phase("Drawing")
        figures = draw_flow(view, folder)
        moving = animate_flow(view, folder, listener) if plan.animation == "gif" else None
    return FlowOutputs(metrics, growth, tolerance, figures, moving, trajectory, table)


def _numbers(found: Sequence[FrameRow]) -> dict[str, Float64[np.ndarray, "..."]]:
    """Return the arrays of ``trajectory.npz``: times and states, and the Gaussian measure if there is one."""
    numbers = {
        "times": np.array([frame.time for frame in found]),
        "states": np.stack([tokens_of(frame).numpy() for frame in found]),
    }
    gaussians = [gaussian for frame in found if (gaussian := gaussian_of(frame)) is not None]
    if gaussians:
        numbers["mean"], numbers["covariance"] = (
            np.stack([part.numpy() for part in parts]) for parts in zip(*gaussians, strict=True)
        )
    return numbers


# ---- Metrics


def measure_frames(
    found: Sequence[FrameRow], tolerance: float, beta: float, listener: Listener
) -> pd.DataFrame:
    """Measure the clustering of tokens in each stored state (frame) of a flow; return a row for each frame.

    ``time`` is the time of the frame, and ``clusters`` the number of clusters; tokens nearer than
    ``tolerance`` are in one cluster. ``effective_rank`` and ``log_energy`` are
    :func:`howsmooth.dynamics.effective_rank` and :func:`howsmooth.dynamics.log_interaction_energy` with A = I
    and the inverse temperature β. ``spread`` is the root mean square distance of the tokens from their mean.
    ``to_last`` is the root mean square distance of each token from its position in the last frame, an upper
    bound on the distance W₂ to that frame. ``evaluations`` and ``seconds`` are as in the frame.
    """
    last = tokens_of(found[-1])
    rows = []
    for frame in found:
        x = tokens_of(frame)
        rows.append(
            {
                "time": frame.time,
                "clusters": int(cluster_labels(x, tolerance).max()) + 1,
                "effective_rank": effective_rank(x),
                "log_energy": log_interaction_energy(x, beta=beta),
                "spread": _spread(x),
                "to_last": _distance(x, last),
                "evaluations": frame.evaluations,
                "seconds": frame.seconds,
            }
        )
        listener.advance(float(len(rows)), float(len(found)), f"{len(rows)} of {len(found)}")
    return pd.DataFrame(rows)


def _spread(x: Float64[Tensor, "n d"]) -> float:
    """Return the root mean square distance of tokens from their mean."""
    return _distance(x, x.mean(dim=0).expand_as(x))


def _distance(x: Tensor, y: Tensor) -> float:
    # Scale before squaring: squares of numbers beyond 1e154 overflow.
    difference = (x - y).numpy()
    size = float(np.abs(difference).max())
    if size == 0 or not math.isfinite(size):
        return size
    return size * float(np.sqrt(np.square(difference / size).sum(axis=1).mean()))


# ---- The view to draw


def view_of(
    store: Store, plan: FlowPlan, system: System, metrics: pd.DataFrame, tolerance: float
) -> FlowView:
    """Choose the points, colours and labels with which a flow is drawn.

    In at most three dimensions, the points are the tokens. In more dimensions, the tokens are projected onto
    two principal directions.
    """
    numbers = _numbers(frames(store))
    states, d = numbers["states"], system.x.shape[1]
    if d <= _MOST_SHOWN:
        basis, names = np.eye(d), tuple(f"coordinate {i + 1}" for i in range(d))
    else:
        basis, share = _principal(states)
        names = tuple(f"principal direction {i + 1} ({100 * part:.0f} %)" for i, part in enumerate(share))
    growth = store.table(GrowthRow, ["time"])
    mean, covariance = numbers.get("mean"), numbers.get("covariance")
    return FlowView(
        title=f"{readable(system.label)}: {system.title}",
        below=_below(store, plan, system),
        times=numbers["times"],
        points=states @ basis,
        axes=names,
        metrics=_shown(plan, metrics, tolerance),
        ordered=system.in_order,
        clusters=cluster_labels(torch.from_numpy(states[-1]), tolerance).numpy(),
        mean=None if mean is None else mean @ basis,
        covariance=None if covariance is None else basis.T @ covariance @ basis,
        sphere=system.radius if plan.sphere and d in (2, 3) else None,
        growth=growth if len(growth) else None,
    )


def _below(store: Store, plan: FlowPlan, system: System) -> str:
    n, d = system.x.shape
    words = [f"{n} tokens in dimension {d}", plan.method]
    if plan.step is not None:
        words[-1] += f", step {plan.step:g}"
    if plan.sphere:
        words.append(f"on the sphere of radius {system.radius:.4g}")
    if plan.rescale:
        words.append("rescaled by exp(\N{MINUS SIGN}tV)")
    ended = ending(store)
    if ended is not None:
        words.append(f"{ended.status} at t = {ended.lower:.4g}")
    return "; ".join(words)


def _shown(plan: FlowPlan, metrics: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return the columns of metrics to draw, renamed to the titles of their panels."""
    words = {"clusters": f"clusters (nearer than {tolerance:.3g})"}
    if plan.sphere:
        words["log_energy"] = "log of the interaction energy"
    else:
        words["spread"] = "distance from the mean (rms)"
    words["effective_rank"] = "effective rank"
    return metrics[list(words)].rename(columns=words)


def _principal(
    states: Float64[np.ndarray, "frames n d"],
) -> tuple[Float64[np.ndarray, "d 2"], Float64[np.ndarray, " 2"]]:
    """Return two principal directions of the tokens at all times, and each direction's share of variance."""
    tiny = np.finfo(np.float64).tiny
    total = np.zeros(states.shape[2:] * 2)
    for x in states:
        x = x / max(float(np.abs(x).max()), tiny)
        x = x - x.mean(axis=0)
        spread = x.T @ x
        total += spread / max(float(np.trace(spread)), tiny)
    values, vectors = np.linalg.eigh(total)
    basis = vectors[:, ::-1][:, :2]
    basis = basis * np.sign(basis[np.abs(basis).argmax(axis=0), [0, 1]])
    return basis, values[::-1][:2] / max(float(values.sum()), tiny)
