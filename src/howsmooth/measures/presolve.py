"""Preparation of two discrete measures for an optimal transport solver: scaling of atoms, and removal of
atoms of negligible weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.spatial import cKDTree
from scipy.special import logsumexp

from howsmooth.errors import ArgumentError
from howsmooth.measures.discrete import DiscreteMeasure
from howsmooth.measures.transport_problem import EPSILON, TINY, TransportPlan, TransportProblem
from howsmooth.measures.transport_solvers import Solution

__all__ = ["Answer", "Pair", "in_units"]

# An upper limit below this fraction of the points' extent counts as zero distance.
NEGLIGIBLE = 1e-6

# Solvers do not see lighter atoms, because POT computes in float64, which cannot divide such masses. The
# interval is widened to allow for them.
_LIGHTEST = math.log(1e-300)


@dataclass(frozen=True)
class Answer:
    """The distance W_p between two discrete measures with scaled atoms, with a lower and an upper limit.

    It also holds the data for the derivative of the distance. ``plan`` moves mass between the atoms numbered
    by its rows and columns, and ``log_masses`` are the logarithms of its masses. ``left`` and ``right`` are
    the dual potentials of all atoms, if the solver has them.
    """

    value: float
    lower: float
    upper: float
    plan: TransportPlan
    log_masses: Float[ndarray, " e"]
    left: Float[ndarray, " n"] | None
    right: Float[ndarray, " m"] | None


@dataclass(frozen=True)
class Pair:
    """Two discrete measures whose atoms are scaled so that no distance between two atoms exceeds one.

    The atoms ``x`` and ``y`` are multiplied by ``2**-exponent``. ``log_a`` and ``log_b`` are the logarithms
    of the weights.
    """

    x: Float[ndarray, "n d"]
    y: Float[ndarray, "m d"]
    log_a: Float[ndarray, " n"]
    log_b: Float[ndarray, " m"]
    p: float
    exponent: int

    @classmethod
    def of(cls, mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> Pair:
        """Scale the atoms of two measures by the same power of two, so that no distance between two atoms
        exceeds one.
        """
        x, y = (measure.points.detach().double().cpu().numpy() for measure in (mu, nu))
        log_a, log_b = (measure.log_weights.detach().cpu().numpy() for measure in (mu, nu))
        # Scaling by powers of two rounds nothing. The first scaling brings coordinates below one, so that
        # their differences cannot overflow.
        size = _exponent(max(np.abs(x).max(), np.abs(y).max()))
        x, y = np.ldexp(x, -size), np.ldexp(y, -size)
        span = np.maximum(x.max(0), y.max(0)) - np.minimum(x.min(0), y.min(0))
        reach = _exponent(float(span.max()) * math.sqrt(x.shape[1]) * (1 + 4 * EPSILON))
        return cls(np.ldexp(x, -reach), np.ldexp(y, -reach), log_a, log_b, p, size + reach)

    @cached_property
    def kept(self) -> tuple[Bool[ndarray, " n"], Bool[ndarray, " m"]]:
        """Boolean arrays that are True for the atoms of the two measures whose weight is not negligible."""
        return self.log_a >= _LIGHTEST, self.log_b >= _LIGHTEST

    @cached_property
    def problem(self) -> TransportProblem:
        """The optimal transport problem between the two measures without their atoms of negligible weight."""
        here, there = self.kept
        a, b = np.exp(self.log_a[here]), np.exp(self.log_b[there])
        return TransportProblem(self.x[here], self.y[there], a / math.fsum(a), b / math.fsum(b), self.p)

    def matched(self) -> Answer | None:
        """Return the distance W_p if a simple test proves that moving each atom x_i to y_i is optimal, and
        None otherwise.

        This is so if both measures have the same weights in the same order, and each y_i is the atom of ``y``
        that is nearest to x_i. Then W_p^p = Σ a_i |x_i − y_i|^p. The potentials are min_j |x_i − y_j|^p and
        zero. Sums are formed from logarithms, so weights of any size count.
        """
        if not np.array_equal(self.log_a, self.log_b):
            return None
        own = np.linalg.norm(self.x - self.y, axis=1)
        if not self._own_is_nearest(own):
            return None
        moved = own > 0
        # Atoms that do not move have no logarithm of a cost; they are left out of the sum.
        log_cost = self.p * np.log(own[moved])
        log_value = float(logsumexp(self.log_a[moved] + log_cost)) / self.p if moved.any() else -math.inf
        if moved.any() and log_value < math.log(TINY):
            raise _below_float64(f"exp({log_value:.6g}) times the extent of the points")
        value = math.exp(log_value)
        # Rounding of the distances, of the sum of logarithms, and of the exponential.
        slack = (3 * self.x.shape[1] + 64 + 4 * abs(log_value) if moved.any() else 0) * EPSILON
        n = len(own)
        plan = TransportPlan(np.arange(n), np.arange(n), np.exp(self.log_a))
        return Answer(
            value, value * (1 - slack), value * (1 + slack), plan, self.log_a, own**self.p, np.zeros(n)
        )

    def _own_is_nearest(self, own: Float[ndarray, " n"]) -> bool:
        """Return True if y_i is the atom of ``y`` nearest to x_i for every i, up to rounding."""
        if self.x.shape[1] == 1:
            # In one dimension a tree avoids the matrix of all distances.
            nearest, _ = cKDTree(self.y).query(self.x)
        else:
            # p-th powers of small distances may underflow, so distances are compared.
            nearest = TransportProblem(self.x, self.y, self.log_a, self.log_b, 1.0).costs.min(axis=1)
        return bool(np.all(own <= nearest * (1 + (self.x.shape[1] + 16) * EPSILON)))

    def answer(self, solution: Solution) -> Answer:
        """Convert the solution of a solver to the distance between the two whole measures. The solver has
        ignored all atoms of negligible weight.
        """
        here, there = (np.flatnonzero(kept) for kept in self.kept)
        plan = TransportPlan(here[solution.plan.rows], there[solution.plan.columns], solution.plan.masses)
        # No distance exceeds one, so leaving out atoms of total mass m changes W_p by at most m^{1/p}.
        measures = zip((self.log_a, self.log_b), self.kept, strict=True)
        light = [float(logsumexp(logs[~kept])) for logs, kept in measures if not kept.all()]
        slack = math.fsum(math.exp(log / self.p) for log in light)
        # The p-th roots of the cost's limits are rounded outwards, and light atoms widen the interval.
        above = solution.above ** (1 / self.p)
        with np.errstate(divide="ignore"):
            log_masses = np.log(plan.masses)
        return Answer(
            value=above,
            lower=max(max(solution.below, 0.0) ** (1 / self.p) * (1 - 4 * EPSILON) - slack, 0.0),
            upper=above * (1 + 4 * EPSILON) + slack,
            plan=plan,
            log_masses=log_masses,
            left=None if solution.left is None else _spread(solution.left, here, len(self.x)),
            right=None if solution.right is None else _spread(solution.right, there, len(self.y)),
        )

    @property
    def noise(self) -> float:
        """The size below which a distance W_p between scaled measures counts as a rounding error of their
        weights.

        Between equal measures, the rounding error is at most ((n + m) ε)^{1/p}. For large p this number is
        not small. It is therefore limited to 1e-6 (``NEGLIGIBLE``).
        """
        return min(float(((len(self.x) + len(self.y)) * EPSILON) ** (1 / self.p)), NEGLIGIBLE)

    def in_units(self, scaled: float) -> float:
        """Convert a distance between the scaled atoms to the units of the atoms that the user gave."""
        return in_units(scaled, self.exponent)


def in_units(scaled: float, exponent: int) -> float:
    """Return ``scaled · 2**exponent``, which converts a distance between scaled atoms to the units of the
    user.

    Raise ArgumentError if float64 cannot hold the number.
    """
    try:
        distance = math.ldexp(scaled, exponent)
    except OverflowError:
        raise ArgumentError(
            "mu, nu",
            expected="a distance below 1.8e308",
            got=f"{scaled:g} · 2^{exponent}",
            remedy="Scale the points down; W_p scales with them.",
        ) from None
    if distance < TINY and scaled > 0:
        raise _below_float64(f"{scaled:g} · 2^{exponent}")
    return distance


def _exponent(size: float) -> int:
    """Return the exponent of the least power of two that is at least ``size``, or zero for size zero."""
    mantissa, exponent = math.frexp(size)
    return exponent - (mantissa == 0.5) if size > 0 else 0


def _spread(values: ndarray, places: ndarray, n: int) -> ndarray:
    """Return an array of length n that has ``values`` at the indices ``places``, and zeros elsewhere."""
    spread = np.zeros(n)
    spread[places] = values
    return spread


def _below_float64(got: str) -> ArgumentError:
    return ArgumentError(
        "mu, nu",
        expected="a distance that float64 can hold",
        got=got,
        remedy="Scale the points up, or ask for a larger p.",
    )
