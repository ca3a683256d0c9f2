"""The conditional Wasserstein distance for masked attention, in which mass is transported only between atoms
at the same position.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.special import logsumexp

from howsmooth.errors import ArgumentError, check_number
from howsmooth.measures.discrete import DiscreteMeasure
from howsmooth.measures.distance_arguments import Options, check_discrete, check_order, check_same_space
from howsmooth.measures.presolve import Answer, Pair
from howsmooth.measures.transport import Transport, solve, transport_of
from howsmooth.measures.transport_problem import EPSILON, TransportPlan

__all__ = ["conditional_wasserstein"]


def conditional_wasserstein(
    mu: object,
    nu: object,
    p: object = 2,
    *,
    position_tolerance: object = 0.0,
    mass_tolerance: object = 1e-9,
    method: str = "auto",
    regularisation: float | None = None,
    rtol: float | None = None,
    max_iterations: int = 1000,
    gradient: bool = False,
) -> Transport:
    """Compute the conditional Wasserstein distance between two measures whose atoms have positions, with an
    interval.

    The distance is d_p(μ, ν) = (Σ_s θ(s) W_p(μ^s, ν^s)^p)^{1/p}, and the result has an interval for it. θ is
    the marginal distribution of positions, which both measures must share, and μ^s is μ conditioned on
    position s. Mass never moves between positions. If the marginals differ, the distance is infinite. For n
    tokens X and Y at n distinct positions of equal weight, the distance with p = 2 is |X − Y|_F/√n.

    Parameters
    ----------
    mu, nu
        Two discrete measures with positions.
    p
        The order, a finite number p >= 1.
    position_tolerance
        Positions whose difference is at most this number count as equal. With zero, only equal numbers do.
    mass_tolerance
        The masses of a position in μ and in ν count as equal if their logarithms differ by at most this
        number. The distance uses the masses in μ.
    method, regularisation, rtol, max_iterations
        As for :func:`wasserstein`, applied to each position that has several atoms in both measures.
    gradient
        Whether ``value`` is differentiable with respect to points that require gradients.

    Returns
    -------
    Transport
        The distance. Its ``method`` is "conditional", and its ``plan`` covers all atoms. If the marginals
        differ, the distance is infinite and there is no plan.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value, a measure has no positions, or a chain of close positions
        extends over more than the tolerance, so that it is unclear which of them are equal.

    References
    ----------
    Definition 4.1, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024.

    """
    order = check_order(p)
    options = Options.of(method, regularisation, rtol, max_iterations, gradient)
    one, other = (_with_positions(name, measure) for name, measure in (("mu", mu), ("nu", nu)))
    check_same_space(one, other)
    finite = "a finite number >= 0", lambda number: 0 <= number < math.inf
    near = check_number("position_tolerance", position_tolerance, *finite)
    alike = check_number("mass_tolerance", mass_tolerance, *finite)
    groups = _groups(one, other, near)
    pair = Pair.of(one, other, order)
    masses = tuple(
        _log_masses(logs, group) for logs, group in zip((pair.log_a, pair.log_b), groups, strict=True)
    )
    if len(masses[0]) != len(masses[1]) or not bool(np.all(np.abs(masses[0] - masses[1]) <= alike)):
        value = torch.tensor(math.inf, dtype=torch.float64, device=one.device)
        return Transport(value, math.inf, math.inf, None, "conditional", True, order, options.rtol)
    answer = _total(pair, groups, masses, options)
    return transport_of(pair, answer, "conditional", options, (one, other))


def _total(
    pair: Pair,
    groups: tuple[Int[ndarray, " n"], Int[ndarray, " m"]],
    masses: tuple[Float[ndarray, " s"], ...],
    options: Options,
) -> Answer:
    """Combine the costs at all positions, in logarithms so that masses of any size count."""
    members = [_members(group, len(masses[0])) for group in groups]
    log_a = pair.log_a - masses[0][groups[0]]
    log_b = pair.log_b - masses[1][groups[1]]
    # If one of the measures has a single atom at a position, there is only one plan. All such positions are
    # handled together, without a solver.
    forced = np.array([len(here) == 1 or len(there) == 1 for here, there in zip(*members, strict=True)])
    rows, columns, logs = _forced(members, log_a, log_b, masses[0], forced)
    own = np.linalg.norm(pair.x[rows] - pair.y[columns], axis=1)
    slack = (3 * pair.x.shape[1] + 64) * EPSILON
    # Logarithms of θ(s) W_p^p: lower limits, values and upper limits.
    with np.errstate(divide="ignore"):
        terms = [
            np.tile(logs + pair.p * np.log(own), (3, 1)) + pair.p * slack * np.array([[-1.0], [0.0], [1.0]])
        ]
    plans, weights = [TransportPlan(rows, columns, np.exp(logs))], [logs]
    for s in np.flatnonzero(~forced):
        here, there = members[0][s], members[1][s]
        part = Pair(pair.x[here], pair.y[there], log_a[here], log_b[there], pair.p, pair.exponent)
        answer, _ = solve(part, options)
        with np.errstate(divide="ignore"):
            sizes = pair.p * np.log([answer.lower, answer.value, answer.upper])
        terms.append(masses[0][s] + sizes[:, None])
        shares = answer.log_masses + masses[0][s]
        plans.append(TransportPlan(here[answer.plan.rows], there[answer.plan.columns], np.exp(shares)))
        weights.append(shares)
    lower, value, upper = _roots(np.concatenate(terms, axis=1), pair.p)
    whole = TransportPlan(
        np.concatenate([plan.rows for plan in plans]),
        np.concatenate([plan.columns for plan in plans]),
        np.concatenate([plan.masses for plan in plans]),
    )
    return Answer(value, lower, upper, whole, np.concatenate(weights), None, None)


def _forced(
    members: list[list[ndarray]], log_a: ndarray, log_b: ndarray, log_theta: ndarray, forced: ndarray
) -> tuple[ndarray, ndarray, ndarray]:
    """Return the plan at positions where a measure has one atom: rows, columns and log masses."""
    rows, columns, logs = [], [], []
    for s in np.flatnonzero(forced):
        here, there = members[0][s], members[1][s]
        size = max(len(here), len(there))
        rows.append(np.broadcast_to(here, size))
        columns.append(np.broadcast_to(there, size))
        logs.append((log_a[here] if len(there) == 1 else log_b[there]) + log_theta[s])
    if not rows:
        return np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0)
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(logs)


def _roots(terms: Float[ndarray, "3 k"], p: float) -> list[float]:
    """Return the lower limit, value and upper limit, rounded outwards, from log costs with a row for each."""
    logs = logsumexp(terms, axis=1) / p
    slack = [(64 + 4 * abs(log)) * EPSILON if np.isfinite(log) else 0.0 for log in logs]
    return [math.exp(log + sign * one) for log, one, sign in zip(logs, slack, (-1, 0, 1), strict=True)]


def _groups(
    mu: DiscreteMeasure, nu: DiscreteMeasure, tolerance: float
) -> tuple[Int[ndarray, " n"], Int[ndarray, " m"]]:
    """Return the index of each atom's position among the distinct positions, in increasing order."""
    sides = [_positions(measure) for measure in (mu, nu)]
    every = np.concatenate(sides)
    order = np.argsort(every, kind="stable")
    steps = np.diff(every[order])
    starts = np.concatenate(([0], np.flatnonzero(steps > tolerance) + 1))
    ends = np.concatenate((starts[1:], [len(every)])) - 1
    widths = every[order[ends]] - every[order[starts]]
    if np.any(widths > tolerance):
        raise ArgumentError(
            "position_tolerance",
            expected="a tolerance below the steps between positions",
            got=f"{tolerance:g}, which joins a chain of positions that extends over {widths.max():g}",
            remedy="Make it smaller, or give atoms of one position the same number.",
        )
    numbers = np.empty(len(every), dtype=int)
    numbers[order] = np.cumsum(np.isin(np.arange(len(every)), starts)) - 1
    return numbers[: len(sides[0])], numbers[len(sides[0]) :]


def _log_masses(logs: ndarray, group: ndarray) -> ndarray:
    """Return the logarithm of the total mass of a measure at each position, which is −inf for zero mass."""
    masses = np.full(int(group.max()) + 1, -np.inf)
    np.logaddexp.at(masses, group, logs)
    return masses


def _members(group: ndarray, count: int) -> list[ndarray]:
    order = np.argsort(group, kind="stable")
    return np.split(order, np.searchsorted(group[order], np.arange(1, count)))


# ---- checks of arguments


def _with_positions(name: str, measure: object) -> DiscreteMeasure:
    checked = check_discrete(name, measure)
    if checked.positions is None:
        raise ArgumentError(
            name,
            expected="a measure with positions",
            got="a measure without positions",
            remedy="Give positions in [0, 1]; DiscreteMeasure.sequence(X) puts tokens in their order.",
        )
    return checked


def _positions(measure: DiscreteMeasure) -> ndarray:
    assert measure.positions is not None
    positions: ndarray = measure.positions.detach().cpu().numpy()
    return positions
