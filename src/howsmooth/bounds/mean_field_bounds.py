"""Lower bounds on the W_2-Lipschitz constant of mean-field attention, from measures with two atoms.

The measure has mass p at Ru and mass 1 − p at Ru/2 or −Ru, where u is a unit eigenvector of A for its largest
or smallest real eigenvalue, γ_max or γ_min. The scores are ⟨A x_i, x_j⟩ and the values V x_j. The bounds are
functions of g = γ_max R²/8 or g = −γ_min R², evaluated in logarithms. Derivations: documentation page "Worst
inputs, and lower bounds".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import log_expit

from howsmooth.bounds.attention_parameters import Head, log_spectral_norm
from howsmooth.bounds.ball_lower_bounds import VALUES_ARE_TOKENS
from howsmooth.bounds.ball_upper_bounds import no_query_bias
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, for_every_length
from howsmooth.bounds.catalogue import OURS, PAPER, Condition, statement
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.worst_case_tokens import two_cluster_line
from howsmooth.errors import ArgumentError
from howsmooth.rounding import gamma

__all__ = [
    "proposition_3_6",
    "proposition_3_6_rate",
    "two_dirac",
    "weighted_two_atom_lower_bound",
]

_PAGE = f'{OURS}"Worst inputs, and lower bounds"'

# A larger g is replaced by this value, for which the float64 logarithm g still has an error below 1e-4. The
# bound remains valid, because it is the bound for a smaller radius.
_LARGEST_G = 1e12
# Relative rounding error of g, to which e^g is sensitive: a few elementary functions and products.
_ERROR_OF_G = gamma(40)

_NEEDS = (
    no_query_bias(),
    Condition[Problem]("A has a real eigenvalue", lambda p: bool(p.head.real_eigenpairs)),
)
_NEEDS_OF_PAPER = (VALUES_ARE_TOKENS, *_NEEDS)


@dataclass(frozen=True, eq=False)
class TwoAtoms(Problem):
    """A problem for :func:`two_dirac`, with the caller's choice of the masses and positions of two atoms."""

    weight: float | None = None
    choice: str = "paper"


def measures(attention: object, radius: object) -> Problem:
    """Return the problem of bounding the W_2-Lipschitz constant of attention for measures on a ball.

    Other Parameters
    ----------------
    attention
        One head: a :class:`~howsmooth.bounds.Head`, a :class:`~howsmooth.attention.SelfAttention` or a
        captured site; or a number γ for A = γI, V = I.

    """
    if isinstance(attention, int | float) and not isinstance(attention, bool):
        if not math.isfinite(attention):
            raise ArgumentError("attention", expected="a finite number γ", got=repr(attention))
        attention = Head([[float(attention)]], [[1.0]])
    return for_every_length(attention, radius)


def placed_atoms(
    attention: object, radius: object, *, weight: object = None, cluster: object = "paper"
) -> Problem:
    """Return the problem of bounding the Lipschitz constant of attention at a measure with two given atoms.

    Other Parameters
    ----------------
    attention
        One head: a :class:`~howsmooth.bounds.Head`, a :class:`~howsmooth.attention.SelfAttention` or a
        captured site; or a number γ for A = γI, V = I.
    weight
        Mass p of the atom at Ru, 0 < p < 1; default 1/(1 + 3e^{2g}).
    cluster
        Position of the other atom: "half" for Ru/2 with u for γ_max, "opposite" for −Ru with u for γ_min,
        "paper" for "half" if γ_max/8 >= −γ_min and "opposite" otherwise.

    """
    choice = {"paper": "paper", "half": "max", "opposite": "min"}.get(str(cluster))
    if choice is None:
        raise ArgumentError("cluster", expected="'paper', 'half' or 'opposite'", got=repr(cluster))
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and 0 < weight < 1):  # type: ignore[operator]
        raise ArgumentError("weight", expected="a number p with 0 < p < 1", got=repr(weight))
    problem = measures(attention, radius)
    return TwoAtoms(problem.attention, radius=problem.radius, weight=weight, choice=choice)  # type: ignore[arg-type]


_measures = partial(statement, measures, side="lower", quantity=Quantity.MEAN_FIELD, masks="none")


@_measures(source=f"Proposition 3.6 and Lemma C.8, {PAPER}; {_PAGE}", needs=_NEEDS_OF_PAPER)
def proposition_3_6(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant from below by Proposition 3.6, in a version for finite R and V = I.

    The bound is √((1−p)/p)/(2−p) · (1 + 2g(1−p)/(2−p)) with p = e^{−2g} and g = R² max(−γ_min, γ_max/8).
    """
    g = _Case.of(p).g
    rest = -math.expm1(-2 * g)  # 1 − p, and 2 − p = 1 + rest
    factor = (1 + 2 * g * rest / (1 + rest)) / (1 + rest)
    return Log.of(rest) ** 0.5 * Log(g - _ERROR_OF_G * g) * factor


@_measures(source=f"Proposition 3.6, {PAPER}; for every R: {_PAGE}", needs=_NEEDS_OF_PAPER)
def proposition_3_6_rate(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant from below by the growth rate in Proposition 3.6, for V = I.

    The rate, for R → ∞, is (g/2) e^g with g = R² max(−γ_min, γ_max/8). It is a lower bound for every R > 0.
    """
    g = _Case.of(p).g
    return Log.of(g / 2) * Log(g - _ERROR_OF_G * g)


@_measures(source=_PAGE, needs=_NEEDS)
def weighted_two_atom_lower_bound(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant from below by measures with two atoms, whose weights are nearly
    optimal.

    The weights give a larger bound than Proposition 3.6 does. The bound is (√3/4) e^g (1 + 3g/2) |Vu| with g
    = R² max(−γ_min, γ_max/8). The weight p = 1/(1 + 3e^{2g}) is optimal as g → ∞.
    """
    case = _Case.of(p)
    g = case.g
    return Log(case.log_strength) * Log(g - _ERROR_OF_G * g) * (math.sqrt(3) / 4 * (1 + 1.5 * g))


@statement(placed_atoms, side="lower", quantity=Quantity.MEAN_FIELD, source=_PAGE, masks="none", needs=_NEEDS)
def two_dirac(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant of attention from below by its local Lipschitz constant at the measure
    with two atoms of Proposition 3.6 of the paper.

    The local constant along the eigenvector u is max(‖M‖, |γ|v_1, |γ|v_2) · |Vu| with M_ij = √(a_i/a_j) [P_ij
    (1 + γ s_i (s_j − m_i)) + δ_ij γ v_i]. Here s_i u are the positions of the atoms, a_i their weights,
    P_ij ∝ a_j e^{γ s_i s_j}, and m_i and v_i the mean and the variance of s under row i of P.
    """
    weight, choice = (p.weight, p.choice) if isinstance(p, TwoAtoms) else (None, "paper")
    case = _Case.of(p, choice)
    odds = math.log(3) + 2 * case.g
    log_weights = log_expit([-odds, odds])
    if weight is not None:
        log_weights = np.array([math.log(weight), math.log1p(-weight)])
    return Log(case.log_strength + _log_two_dirac(case, log_weights) - _ERROR_OF_G * abs(case.g))


@dataclass(frozen=True)
class _Case:
    """An eigenvalue γ of A, and the positions of two atoms on the line of its eigenvector."""

    #: γ R².
    curvature: float
    #: Position of the second atom in units of the first: 1/2 or −1.
    ratio: float
    #: log |Vu|, rounded down.
    log_strength: float

    @property
    def g(self) -> float:
        """Half the difference between the attention scores of the two atoms.

        It is γ_max R²/8 or −γ_min R², half of ⟨A x_2, x_1 − x_2⟩.
        """
        return self.curvature * self.ratio * (1 - self.ratio) / 2

    @classmethod
    def of(cls, p: Problem, choice: str = "paper") -> _Case:
        line = two_cluster_line(p.head, choice)
        if line is None:
            return cls(0.0, -1.0, -math.inf)
        eigenvalue, u, ratio = line
        # γR² is formed from logarithms because R² may overflow.
        log = -math.inf if eigenvalue == 0 else math.log(abs(eigenvalue)) + 2 * math.log(p.radius)
        curvature = math.copysign(math.exp(min(log, math.log(_LARGEST_G))), eigenvalue)
        return cls(curvature, ratio, log_spectral_norm(*p.head.V_factors, u[:, None], upper=False))


def _log_two_dirac(case: _Case, log_a: np.ndarray) -> float:
    """Return the log of :func:`two_dirac` over |Vu|; ``log_a`` are the logs of the atoms' masses."""
    s, gap = np.array([1.0, case.ratio]), 1 - case.ratio
    # Log odds of the second against the first atom in each row of P.
    odds = (log_a[1] + case.curvature * s * s[1]) - (log_a[0] + case.curvature * s * s[0])
    log_P = np.stack([log_expit(-odds), log_expit(odds)], axis=1)
    P = np.exp(log_P)
    centred = gap * np.stack([P[:, 1], -P[:, 0]], axis=1)
    factors = 1 + case.curvature * s[:, None] * centred
    factors += np.diag(case.curvature * gap**2 * np.array([P[0, 1], P[1, 0]]))  # γ v_i / P_ii
    scales = log_P + (log_a[:, None] - log_a) / 2
    spreads = abs(case.curvature) * gap**2 * np.exp(log_P.sum(axis=1))
    norm = np.linalg.norm(factors * np.exp(scales - scales.max()), 2)
    with np.errstate(divide="ignore"):
        return float(max(scales.max() + np.log(norm), np.log(spreads).max()))
