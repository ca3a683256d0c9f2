"""Quantities that say how far tokens have clustered: number of clusters, rank, interaction energy, distance
to a limit.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist
from torch import Tensor

from howsmooth.attention.map import AbstractMeasure, as_parameter
from howsmooth.dynamics.trajectory import State, Trajectory
from howsmooth.errors import ArgumentError, NonFiniteError, check_number
from howsmooth.measures import DiscreteMeasure, wasserstein

__all__ = [
    "cluster_labels",
    "cluster_metrics",
    "effective_rank",
    "log_interaction_energy",
    "number_of_clusters",
    "numerical_rank",
]

# Distances and scores are computed for blocks of rows with at most this many pairs of tokens.
_PAIRS = 1 << 20


def cluster_labels(state: State, tolerance: float) -> Int[Tensor, " n"]:
    """Return for each token the index of its cluster, where tokens at distance at most ``tolerance`` are in
    the same cluster.

    The clusters are the connected components of the graph that joins any two tokens whose distance is at most
    ``tolerance``.

    Parameters
    ----------
    state
        Tokens (n, d), or a measure with atoms; the weights of the atoms are ignored.
    tolerance
        A distance >= 0. There is no default because the number of clusters depends on it.

    Raises
    ------
    ArgumentError
        If an argument does not fit.

    """
    check_number("tolerance", tolerance, "a finite number >= 0", lambda number: 0 <= number < math.inf)
    points = _atoms(state)[0].cpu().numpy()
    n = len(points)
    labels = np.arange(n, dtype=np.int64)
    # Labels of connected tokens are merged block by block, without the whole n × n distance matrix.
    rows = max(1, _PAIRS // n)
    for first in range(0, n, rows):
        # Earlier blocks have compared the columns before ``first`` with these rows.
        i, j = np.nonzero(cdist(points[first : first + rows], points[first:]) <= tolerance)
        a, b = labels[first + i], labels[first + j]
        # Pairs that already share a label would add nothing to the graph of labels.
        apart = a != b
        if apart.any():
            edges = (np.ones(int(apart.sum()), dtype=bool), (a[apart], b[apart]))
            merged = connected_components(coo_array(edges, shape=(n, n)), directed=False)[1]
            labels = merged.astype(np.int64)[labels]
    return torch.as_tensor(labels)


def number_of_clusters(state: State, tolerance: float) -> int:
    """Return the number of clusters of tokens, where tokens at distance at most ``tolerance`` are in the same
    cluster.

    Parameters
    ----------
    state
        Tokens (n, d) or a measure.
    tolerance
        A distance >= 0.

    """
    return int(cluster_labels(state, tolerance).max()) + 1


def log_interaction_energy(state: State, matrix: Tensor | None = None, *, beta: float = 1.0) -> float:
    """Return the logarithm of the interaction energy of tokens, which is the mean of exp(β⟨Ax, y⟩)/(2β) over
    all pairs of tokens x and y.

    The energy is E = 1/(2β) ∬ e^{β⟨Ax, y⟩} dμ(x) dμ(y), where A is ``matrix`` and μ the measure of the
    tokens. For A = I this is the interaction energy of Geshkovski, Letrouit, Polyanskiy and Rigollet (*A
    mathematical perspective on Transformers*, 2023). It increases along the flow of unmasked attention on the
    sphere if V is symmetric and equals βA up to a positive factor (documentation page "Growth along a flow,
    clusters, rescaled tokens", section "Energy"). The function returns the logarithm because E overflows for
    long tokens.

    Parameters
    ----------
    state
        Tokens (n, d), each with weight 1/n, or a measure with atoms.
    matrix
        The matrix A, (d, d); the identity by default. For the scores of one attention head, give scale · KᵀQ
        and beta = 1.
    beta
        The inverse temperature, > 0.

    Raises
    ------
    ArgumentError
        If an argument does not fit.
    """
    check_number("beta", beta)
    points, logs = _atoms(state)
    images = points
    if matrix is not None:
        images = points @ as_parameter("matrix", matrix, (points.shape[1],) * 2).to(points).mT
    rows = max(1, _PAIRS // len(points))
    total = -math.inf
    for i in range(0, len(points), rows):
        exponents = beta * (images[i : i + rows] @ points.mT) + logs[i : i + rows, None] + logs
        # Sums of exponentials are accumulated in logarithms, over blocks of rows.
        total = float(np.logaddexp(total, float(torch.logsumexp(exponents, (0, 1)))))
    return total - math.log(2 * beta)


def effective_rank(state: State) -> float:
    """Return the effective rank of tokens (n, d): the exponential of the entropy of their normalised singular
    values.

    The effective rank lies between 1 (all tokens on one line through the origin) and the rank. It is 0 if all
    tokens are zero. Tokens are not centred, and each atom of a measure is multiplied by the square root of
    its weight. Source: Roy and Vetterli, *The effective rank*, 2007.

    Parameters
    ----------
    state
        Tokens (n, d) or a measure.

    """
    sigma = _singular_values(state)
    total = sigma.sum()
    if total == 0:
        return 0.0
    p = sigma[sigma > 0] / total
    return float(torch.exp(-(p * p.log()).sum()))


def numerical_rank(state: State, tolerance: float = 1e-6) -> int:
    """Return how many singular values of the tokens (n, d), or of the atoms of a measure, are larger than
    ``tolerance`` times the largest one. Raise ArgumentError unless ``tolerance`` is in [0, 1).
    """
    check_number("tolerance", tolerance, "a number from 0 up to 1", lambda number: 0 <= number < 1)
    sigma = _singular_values(state)
    return int((sigma > tolerance * sigma.max()).sum())


def cluster_metrics(
    trajectory: Trajectory,
    *,
    tolerance: float,
    matrix: Tensor | None = None,
    beta: float = 1.0,
    rank_tolerance: float = 1e-6,
    limit: State | None = None,
    transport: str | None = "auto",
) -> pd.DataFrame:
    """Return a table of quantities that say how far tokens have clustered, with one row for each time of a
    trajectory.

    The columns are ``time``; ``clusters`` (:func:`number_of_clusters`); ``spread``, the root mean square
    distance of the tokens from their mean; ``effective_rank``; ``numerical_rank``; ``log_energy``
    (:func:`log_interaction_energy`); and ``to_limit``, the distance W₂ to the limit, with its interval from
    ``to_limit_lower`` to ``to_limit_upper``.

    Parameters
    ----------
    trajectory
        Trajectory of one sequence of tokens or of one discrete measure.
    tolerance
        Distance up to which two tokens belong to one cluster.
    matrix, beta
        The matrix A and the inverse temperature β of the energy.
    rank_tolerance
        As for ``numerical_rank``.
    limit
        Tokens or measure to which the distance is measured; by default the last state of the trajectory.
    transport
        Method by which :func:`howsmooth.measures.wasserstein` computes W₂; None leaves the three columns out.

    Raises
    ------
    ArgumentError
        If an argument does not fit, or the trajectory is of a batch or of Gaussians.

    """
    if trajectory.points.ndim != 3:
        raise ArgumentError(
            "trajectory",
            expected="a trajectory of one sequence",
            got=f"states of shape {tuple(trajectory.points.shape[1:])}",
            remedy="Flow one member of the batch at a time.",
        )
    rows = []
    end = _measure(trajectory.final if limit is None else limit)
    for time, state in zip(trajectory.times.tolist(), trajectory.states, strict=True):
        row: dict[str, float] = {
            "time": time,
            "clusters": number_of_clusters(state, tolerance),
            "spread": _spread(state),
            "effective_rank": effective_rank(state),
            "numerical_rank": numerical_rank(state, rank_tolerance),
            "log_energy": log_interaction_energy(state, matrix, beta=beta),
        }
        if transport is not None:
            distance = wasserstein(_measure(state), end, method=transport)
            row["to_limit"] = float(distance.value)
            row["to_limit_lower"], row["to_limit_upper"] = float(distance.lower), float(distance.upper)
        rows.append(row)
    return pd.DataFrame(rows)


def _measure(state: State) -> DiscreteMeasure:
    points, logs = _atoms(state)
    return DiscreteMeasure(points, log_weights=logs)


def _spread(state: State) -> float:
    points, logs = _atoms(state)
    weights = logs.exp()
    centred = points - weights @ points
    return math.sqrt(float(weights @ centred.square().sum(dim=1)))


def _singular_values(state: State) -> Float[Tensor, " k"]:
    points, logs = _atoms(state)
    values: Tensor = torch.linalg.svdvals((logs / 2).exp()[:, None] * points)
    return values


def _atoms(state: object) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    if isinstance(state, AbstractMeasure):
        points, weighting = state.weighted_tokens()
        return points.detach().double(), weighting.log_weights.detach().double()
    if not isinstance(state, Tensor) or state.ndim != 2 or state.numel() == 0:
        got = f"shape {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
        raise ArgumentError("state", expected="tokens (n, d) or a measure with atoms", got=got)
    if not bool(torch.isfinite(state).all()):
        raise NonFiniteError("state", expected="finite numbers", got="NaN or infinity")
    points = state.detach().double()
    return points, points.new_full((len(points),), -math.log(len(points)))
