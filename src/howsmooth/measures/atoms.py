"""Two discrete measures as solvers take them: scaled, without atoms that are too light for float64."""

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
from howsmooth.measures.problem import EPSILON, TINY, Plan, Problem
from howsmooth.measures.solvers import Solution

__all__ = ["Answer", "Pair", "in_units"]

# Distances that are not known, but below this part of the extent of the points, count as zero.
NEGLIGIBLE = 1e-6

# Lighter atoms are left to the interval: POT's float64 has no room to split such masses.
_LIGHTEST = math.log(1e-300)


@dataclass(frozen=True)
class Answer:
    """W_p with its interval in units of the scaled points, and what its derivative is made of.

    ``log_masses`` are those of the plan, whose rows and columns are atoms of the measures; ``left`` and
    ``right`` are potentials of all atoms.
    """

    value: float
    lower: float
    upper: float
    plan: Plan
    log_masses: Float[ndarray, " e"]
    left: Float[ndarray, " n"] | None
    right: Float[ndarray, " m"] | None


@dataclass(frozen=True)
class Pair:
    """Atoms and log-weights of two measures, scaled by ``2**-exponent``: no distance exceeds one."""

    x: Float[ndarray, "n d"]
    y: Float[ndarray, "m d"]
    log_a: Float[ndarray, " n"]
    log_b: Float[ndarray, " m"]
    p: float
    exponent: int

    @classmethod
    def of(cls, mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> Pair:
        """Return both measures in float64 on the CPU, scaled."""
        x, y = (measure.points.detach().double().cpu().numpy() for measure in (mu, nu))
        log_a, log_b = (measure.log_weights.detach().cpu().numpy() for measure in (mu, nu))
        # Powers of two, so that nothing is rounded; first to one, so that differences do not overflow.
        size = _exponent(max(np.abs(x).max(), np.abs(y).max()))
        x, y = np.ldexp(x, -size), np.ldexp(y, -size)
        span = np.maximum(x.max(0), y.max(0)) - np.minimum(x.min(0), y.min(0))
        reach = _exponent(float(span.max()) * math.sqrt(x.shape[1]) * (1 + 4 * EPSILON))
        return cls(np.ldexp(x, -reach), np.ldexp(y, -reach), log_a, log_b, p, size + reach)

    @cached_property
    def kept(self) -> tuple[Bool[ndarray, " n"], Bool[ndarray, " m"]]:
        """Which atoms the solvers see."""
        return self.log_a >= _LIGHTEST, self.log_b >= _LIGHTEST

    @cached_property
    def problem(self) -> Problem:
        """The transport problem of the atoms that are kept."""
        here, there = self.kept
        a, b = np.exp(self.log_a[here]), np.exp(self.log_b[there])
        return Problem(self.x[here], self.y[there], a / math.fsum(a), b / math.fsum(b), self.p)

    @property
    def reach_of_light_atoms(self) -> float:
        """How far W_p can move when the atoms left out are added: Σ m^{1/p} times the largest distance."""
        here, there = self.kept
        light = [logs[~kept] for logs, kept in ((self.log_a, here), (self.log_b, there)) if not kept.all()]
        return math.fsum(math.exp(float(logsumexp(logs)) / self.p) for logs in light)

    def matched(self) -> Answer | None:
        """Return the answer if equal weights stand in equal order and no atom is nearer than the own image.

        Then W_p^p = Σ a_i |x_i − y_i|^p: the plan is the identity, the potentials are min_j |x_i − y_j|^p and
        zero. In logarithms, so that weights of any size count.
        """
        if not np.array_equal(self.log_a, self.log_b):
            return None
        own = np.linalg.norm(self.x - self.y, axis=1)
        if not self._own_is_nearest(own):
            return None
        moved = own > 0
        log_cost = self.p * np.log(own[moved])
        log_value = float(logsumexp(self.log_a[moved] + log_cost)) / self.p if moved.any() else -math.inf
        if moved.any() and log_value < math.log(TINY):
            raise _below_float64(f"exp({log_value:.6g}) times the extent of the points")
        value = math.exp(log_value)
        slack = (3 * self.x.shape[1] + 64 + 4 * abs(log_value) if moved.any() else 0) * EPSILON
        n = len(own)
        plan = Plan(np.arange(n), np.arange(n), np.exp(self.log_a))
        return Answer(
            value, value * (1 - slack), value * (1 + slack), plan, self.log_a, own**self.p, np.zeros(n)
        )

    def _own_is_nearest(self, own: Float[ndarray, " n"]) -> bool:
        """Whether no atom is nearer to its own image than another's is, to rounding."""
        if self.x.shape[1] == 1:
            nearest, _ = cKDTree(self.y).query(self.x)
        else:
            # Distances, since powers of close ones may underflow.
            nearest = Problem(self.x, self.y, self.log_a, self.log_b, 1.0).costs.min(axis=1)
        return bool(np.all(own <= nearest * (1 + (self.x.shape[1] + 16) * EPSILON)))

    def answer(self, solution: Solution) -> Answer:
        """Return the answer of a solver, in terms of all atoms."""
        here, there = (np.flatnonzero(kept) for kept in self.kept)
        plan = Plan(here[solution.plan.rows], there[solution.plan.columns], solution.plan.masses)
        slack = self.reach_of_light_atoms
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
        """W_p that rounding of the weights alone can make: ((n + m) ε)^{1/p} times the largest distance.

        Of large orders that is no longer small; an answer counts as zero below a millionth only.
        """
        return min(float(((len(self.x) + len(self.y)) * EPSILON) ** (1 / self.p)), NEGLIGIBLE)

    def in_units(self, scaled: float) -> float:
        """Return a distance in the units of the points."""
        return in_units(scaled, self.exponent)


def in_units(scaled: float, exponent: int) -> float:
    """Return ``scaled · 2**exponent``, or raise ArgumentError if that is no number of float64."""
    try:
        distance = math.ldexp(scaled, exponent)
    except OverflowError:
        raise ArgumentError(
            "mu, nu",
            expected="a distance below 1.8e308",
            got=f"{scaled:g} · 2^{exponent}",
            remedy="Scale the points down: W_p scales with them.",
        ) from None
    if distance < TINY and scaled > 0:
        raise _below_float64(f"{scaled:g} · 2^{exponent}")
    return distance


def _exponent(size: float) -> int:
    """Return the least e with size <= 2**e, zero for no size at all."""
    mantissa, exponent = math.frexp(size)
    return exponent - (mantissa == 0.5) if size > 0 else 0


def _spread(values: ndarray, places: ndarray, n: int) -> ndarray:
    """Return ``values`` at their places among n zeros: what is left out has no weight to speak of."""
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
