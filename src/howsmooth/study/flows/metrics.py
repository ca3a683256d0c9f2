"""How far the tokens of each frame have clustered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from torch import Tensor

from howsmooth.dynamics.clusters import cluster_labels, effective_rank, log_interaction_energy
from howsmooth.errors import ArgumentError
from howsmooth.study.flows.store import FlowStore

__all__ = ["Measured", "check_tolerance", "measure_frames", "spread"]

_PART_OF_SPREAD = 0.05


@dataclass(frozen=True, eq=False)
class Measured:
    """What is measured along a flow.

    Attributes
    ----------
    table
        One row a frame.
    shown
        The columns to draw, under words for people.
    clusters
        The cluster of each token in the last frame.
    tolerance
        Tokens nearer than this are one cluster.

    """

    table: pd.DataFrame
    shown: pd.DataFrame
    clusters: Int[np.ndarray, " n"]
    tolerance: float


def measure_frames(
    store: FlowStore,
    tolerance: float | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Measure every frame of a store.

    Parameters
    ----------
    store
        Of the flow.
    tolerance
        Tokens nearer to each other than this are one cluster; ``None`` for a twentieth of the spread at the
        start.
    on_progress
        Told how many frames are measured, of how many.

    Returns
    -------
    Measured
        The table has the columns ``time``; ``clusters``; ``effective_rank`` and ``log_energy``, as
        :func:`howsmooth.dynamics.effective_rank` and :func:`howsmooth.dynamics.log_interaction_energy` with
        A = I; ``spread``, the root mean square distance of the tokens from their mean; ``to_last``, that of
        each token from where it ends, which bounds the distance W₂ to the last frame; ``evaluations`` of the
        field and ``seconds`` of each frame.

    """
    beta = float(store.identity()["beta"])
    count, last = store.count(), store.last().x
    if tolerance is None:
        tolerance = _PART_OF_SPREAD * spread(store.frame(0).x)
    rows = []
    for place in range(count):
        frame = store.frame(place)
        labels = cluster_labels(frame.x, tolerance)
        rows.append(
            {
                "time": frame.time,
                "clusters": int(labels.max()) + 1,
                "effective_rank": effective_rank(frame.x),
                "log_energy": log_interaction_energy(frame.x, beta=beta),
                "spread": spread(frame.x),
                "to_last": _distance(frame.x, last),
                "evaluations": frame.evaluations,
                "seconds": frame.seconds,
            }
        )
        on_progress(place + 1, count)
    table = pd.DataFrame(rows)
    shown = {f"clusters (nearer than {tolerance:.3g})": table["clusters"]}
    if store.identity()["sphere"]:
        shown["log of the interaction energy"] = table["log_energy"]
    else:
        shown["distance from the mean (rms)"] = table["spread"]
    shown["effective rank"] = table["effective_rank"]
    clusters = cluster_labels(last, tolerance).numpy()
    return Measured(table, pd.DataFrame(shown), clusters, tolerance)


def check_tolerance(tolerance: float | None) -> None:
    """Raise ArgumentError unless a tolerance is a length, or ``None``."""
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise ArgumentError("tolerance", expected="a finite number > 0", got=str(tolerance))


def spread(x: Float64[Tensor, "n d"]) -> float:
    """Return the root mean square distance of tokens from their mean."""
    return _distance(x, x.mean(dim=0).expand_as(x))


def _distance(x: Tensor, y: Tensor) -> float:
    # Squares of numbers beyond 1e154 overflow.
    difference = (x - y).numpy()
    size = float(np.abs(difference).max())
    if size == 0 or not math.isfinite(size):
        return size
    return size * float(np.sqrt(np.square(difference / size).sum(axis=1).mean()))
