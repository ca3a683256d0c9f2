"""Solvers of optimal transport problems from the library POT, each with proved limits of the optimal cost."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import ot
import torch
from jaxtyping import Float
from numpy import ndarray

from howsmooth.measures.transport_problem import EPSILON, TransportPlan, TransportProblem

__all__ = ["Solution", "entropic", "network_simplex", "on_the_line"]

# A network simplex needs about n log n pivots; this limit only stops runs that would not terminate.
_PIVOTS = 100_000_000

# The regularisation is divided by _FALL when _STEPS iterations have narrowed the interval by less than the
# fraction _PROGRESS.
_FALL = 2.0
_STEPS = 50
_PROGRESS = 0.1

# Sinkhorn has converged at one regularisation when the error of the marginals (Euclidean norm) is below this.
_MARGINS = 1e-9

# Entries of an entropic plan below this share of their row are set to zero; the repair restores their mass.
_SHARE = 1e-10


@dataclass(frozen=True)
class Solution:
    """The transport plan that a solver found, a lower and an upper limit of the optimal cost, and dual
    potentials if available.
    """

    plan: TransportPlan
    below: float
    above: float
    left: Float[ndarray, " n"] | None = None
    right: Float[ndarray, " m"] | None = None


def network_simplex(problem: TransportProblem) -> Solution:
    """Solve a transport problem by the network simplex algorithm of POT, with a lower and an upper limit of
    its optimal cost.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the width of the interval tells whether the solver finished
        matrix, log = ot.emd(problem.a, problem.b, problem.costs, numItermax=_PIVOTS, log=True)
    plan = problem.repaired(TransportPlan.of_matrix(matrix))
    # For atoms that move to their nearest point, potentials g = 0 lose fewer digits than the solver's.
    starts = (log["v"], np.zeros(len(problem.b)))
    below, left, right = max((problem.cost_below(start) for start in starts), key=lambda found: found[0])
    return Solution(plan, below, problem.cost_above(plan), left, right)


def entropic(
    problem: TransportProblem, regularisation: float | None, rtol: float, max_iterations: int
) -> Solution:
    """Solve a transport problem by the Sinkhorn algorithm of POT. The entropic regularisation is decreased
    step by step.

    The regularisation starts at the mean cost. It falls to ``regularisation`` or, if that is None, until the
    upper limit of the cost is at most (1 + rtol)^p times the lower limit.
    """
    costs, a, b = (torch.from_numpy(array) for array in (problem.costs, problem.a, problem.b))
    strength = float(a @ costs @ b) or 1.0
    floor = strength * EPSILON if regularisation is None else regularisation
    warm: tuple[torch.Tensor, torch.Tensor] | None = None
    best: Solution | None = None
    used = 0
    while used < max_iterations:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the width of the interval tells whether it converged
            # Every stage starts from the potentials of the last one.
            matrix, log = ot.bregman.sinkhorn_log(
                a,
                b,
                costs,
                max(strength, floor),
                numItermax=min(_STEPS, max_iterations - used),
                stopThr=_MARGINS,
                log=True,
                warn=False,
                warmstart=warm,
            )
        used += log["niter"] + 1
        warm = (log["log_u"], log["log_v"])
        before = best
        # Each stage gives an upper and a lower limit; the best of all stages count.
        best = _tighter(best, _of_entropic(problem, matrix, max(strength, floor) * log["log_v"]))
        settled = float(log["err"][-1]) < _MARGINS
        if regularisation is None and best.above <= best.below * (1 + rtol) ** problem.p:
            break
        if strength <= floor:
            if settled:
                break
        elif settled or (before is not None and _width(before) - _width(best) < _PROGRESS * _width(best)):
            # POT's warm start holds potentials divided by the regularisation, so it is rescaled when the
            # regularisation falls.
            fall = min(_FALL, strength / floor)
            warm = (warm[0] * fall, warm[1] * fall)
            strength /= _FALL
    assert best is not None
    return best


def _of_entropic(problem: TransportProblem, matrix: torch.Tensor, right: torch.Tensor) -> Solution:
    rows = matrix.numpy()
    rows = np.where(rows >= _SHARE / rows.shape[1] * problem.a[:, None], rows, 0.0)
    plan = problem.repaired(TransportPlan.of_matrix(rows))
    below, f, g = problem.cost_below(right.numpy())
    return Solution(plan, below, problem.cost_above(plan), f, g)


def _width(solution: Solution) -> float:
    return solution.above - solution.below


def _tighter(one: Solution | None, other: Solution) -> Solution:
    """Combine the plan with the lower cost and the potentials with the higher value."""
    if one is None:
        return other
    above = one if one.above <= other.above else other
    below = one if one.below >= other.below else other
    return Solution(above.plan, below.below, above.above, below.left, below.right)


def on_the_line(problem: TransportProblem) -> Solution:
    """Solve a transport problem between points on a line by sorting the points, which is optimal for all
    orders p >= 1.

    A plan along which both coordinates increase is optimal for its own marginals. Changing its marginals to
    the wanted ones costs at most 1, the largest cost, per unit of mass. The lower limit is the better of this
    bound and of the cost of moving every atom to the nearest point.
    """
    x, y = problem.x[:, 0], problem.y[:, 0]
    found = ot.emd_1d(x, y, problem.a, problem.b, metric="sqeuclidean", dense=False).tocoo()
    plan = TransportPlan(found.row, found.col, found.data)
    costs = problem.costs_of(plan)
    # The plan is monotone if targets increase whenever sources increase.
    order = np.lexsort((y[plan.columns], x[plan.rows]))
    monotone = bool(np.all(np.diff(y[plan.columns][order]) >= 0))
    missing = 0.0
    for places, wanted in ((plan.rows, problem.a), (plan.columns, problem.b)):
        carried = np.bincount(places, plan.masses, len(wanted))
        # A sum of k masses has at most k rounding errors.
        rounding = 2 * EPSILON * np.bincount(places, minlength=len(wanted)) * carried
        missing += math.fsum(np.abs(carried - wanted) + rounding)
    below = math.fsum(plan.masses * costs) * (1 - problem.rounding) - missing if monotone else 0.0
    nearest = problem.nearest_below()
    plan = problem.repaired(plan)
    return Solution(plan, max(below, nearest), problem.cost_above(plan))
