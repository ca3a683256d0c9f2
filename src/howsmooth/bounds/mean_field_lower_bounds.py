"""Lower bounds on the W_2-Lipschitz constant of mean-field attention, from measures with two atoms.

The measure has mass p at Ru and mass 1 − p at Ru/2 or −Ru, where u is a unit eigenvector of A for its largest
or smallest real eigenvalue, γ_max or γ_min. The scores are ⟨A x_i, x_j⟩ and the values V x_j. The bounds are
functions of g = γ_max R²/8 or g = −γ_min R², evaluated in logarithms. Derivations: documentation page "Worst
inputs, and lower bounds".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from howsmooth.bounds.attention_parameters import Head, log_spectral_norm
from howsmooth.bounds.ball_lower_bounds import is_identity
from howsmooth.bounds.ball_upper_bounds import no_query_bias
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, for_every_length
from howsmooth.bounds.catalogue import OURS, PAPER, Condition, statement
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.worst_case_tokens import real_eigenpairs
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
    Condition[Problem]("A has a real eigenvalue", lambda p: bool(real_eigenpairs(p.head))),
)
_NEEDS_OF_PAPER = (Condition[Problem]("V = I", is_identity), *_NEEDS)


@dataclass(frozen=True, eq=False)
class TwoAtoms(Problem):
    """A problem in which the caller places the atoms, by the arguments of ``two_dirac``."""

    weight: float | None = None
    cluster: str = "paper"


def measures(attention: object, radius: object) -> Problem:
    """Prepare a statement about measures on a ball.

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
    """Prepare a statement about a measure with two given atoms.

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
    if cluster not in ("paper", "half", "opposite"):
        raise ArgumentError("cluster", expected="'paper', 'half' or 'opposite'", got=repr(cluster))
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and 0 < weight < 1):  # type: ignore[operator]
        raise ArgumentError("weight", expected="a number p with 0 < p < 1", got=repr(weight))
    problem = measures(attention, radius)
    return TwoAtoms(problem.attention, radius=problem.radius, weight=weight, cluster=str(cluster))  # type: ignore[arg-type]


@statement(
    measures,
    side="lower",
    quantity=Quantity.MEAN_FIELD,
    source=f"Proposition 3.6 and Lemma C.8, {PAPER}; {_PAGE}",
    masks="none",
    needs=_NEEDS_OF_PAPER,
)
def proposition_3_6(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant from below by Proposition 3.6, in a version for finite R and V = I.

    The bound is √((1−p)/p)/(2−p) · (1 + 2g(1−p)/(2−p)) with p = e^{−2g} and g = R² max(−γ_min, γ_max/8).
    """
    g = _Case.of(p).g
    if g <= 0:
        return Log(-math.inf)
    rest = -math.expm1(-2 * g)  # 1 − p, and 2 − p = 1 + rest
    factor = (1 + 2 * g * rest / (1 + rest)) / (1 + rest)
    return Log.of(rest) ** 0.5 * Log(g - _ERROR_OF_G * g) * factor


@statement(
    measures,
    side="lower",
    quantity=Quantity.MEAN_FIELD,
    source=f"Proposition 3.6, {PAPER}; for every R: {_PAGE}",
    masks="none",
    needs=_NEEDS_OF_PAPER,
)
def proposition_3_6_rate(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant from below by the growth rate in Proposition 3.6, for V = I.

    The rate, for R → ∞, is (g/2) e^g with g = R² max(−γ_min, γ_max/8). It is a lower bound for every R > 0.
    """
    g = max(_Case.of(p).g, 0.0)
    return Log.of(g / 2) * Log(g - _ERROR_OF_G * g)


@statement(measures, side="lower", quantity=Quantity.MEAN_FIELD, source=_PAGE, masks="none", needs=_NEEDS)
def weighted_two_atom_lower_bound(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant from below by measures with two atoms, whose weights are nearly
    optimal.

    The weights give a larger bound than Proposition 3.6 does. The bound is (√3/4) e^g (1 + 3g/2) |Vu| with g
    = R² max(−γ_min, γ_max/8). The weight p = 1/(1 + 3e^{2g}) is optimal as g → ∞.
    """
    case = _Case.of(p)
    g = max(case.g, 0.0)
    return Log(case.log_strength) * Log(g - _ERROR_OF_G * g) * (math.sqrt(3) / 4 * (1 + 1.5 * g))


@statement(placed_atoms, side="lower", quantity=Quantity.MEAN_FIELD, source=_PAGE, masks="none", needs=_NEEDS)
def two_dirac(p: Problem) -> Log:
    """Bound the W_2-Lipschitz constant of attention from below by its local Lipschitz constant at a measure
    with two atoms, the one of Proposition 3.6 of the paper.

    The local constant along the eigenvector u is max(‖M‖, |γ|v_1, |γ|v_2) · |Vu| with M_ij = √(a_i/a_j) [P_ij
    (1 + γ s_i (s_j − m_i)) + δ_ij γ v_i]. Here s_i u are the positions of the atoms, a_i their weights,
    P_ij ∝ a_j e^{γ s_i s_j}, and m_i and v_i the mean and the variance of s under row i of P.
    """
    weight, cluster = (p.weight, p.cluster) if isinstance(p, TwoAtoms) else (None, "paper")
    case = _Case.of(p, cluster)
    if weight is None:
        log_p, log_rest = _shares(math.log(3) + 2 * case.g)
    else:
        log_p, log_rest = math.log(weight), math.log1p(-weight)
    return Log(case.log_strength + _log_two_dirac(case, log_p, log_rest) - _ERROR_OF_G * abs(case.g))


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
    def of(cls, p: Problem, cluster: str = "paper") -> _Case:
        pairs = real_eigenpairs(p.head)
        if not pairs:
            return cls(0.0, -1.0, -math.inf)
        (low, _), (high, _) = pairs[0], pairs[-1]
        half = cluster == "half" or (cluster == "paper" and high / 8 >= -low)
        gamma, u = pairs[-1 if half else 0]
        # γR² is formed from logarithms because R² may overflow.
        log = -math.inf if gamma == 0 else math.log(abs(gamma)) + 2 * math.log(p.radius)
        curvature = math.copysign(math.exp(min(log, math.log(_LARGEST_G))), gamma)
        strength = log_spectral_norm(*p.head.V_factors, u[:, None], upper=False)
        return cls(curvature, 0.5 if half else -1.0, strength)


def _shares(log_odds: float) -> tuple[float, float]:
    """Return the logarithms of 1/(1+e^t) and 1/(1+e^{−t}), the attention weights of two atoms whose scores
    differ by t.
    """
    tail = math.log1p(math.exp(-abs(log_odds)))
    return -max(log_odds, 0.0) - tail, min(log_odds, 0.0) - tail


def _log_two_dirac(case: _Case, log_p: float, log_rest: float) -> float:
    """Return the log of the lower bound of :func:`two_dirac` without its factor |Vu|, the norm of the value
    matrix times the eigenvector u.
    """
    gamma, s = case.curvature, (1.0, case.ratio)
    gap = s[0] - s[1]
    log_a = (log_p, log_rest)
    entries: list[tuple[float, float]] = []  # (factor, log scale) of M_11, M_12, M_21, M_22
    spreads = []
    for i in range(2):
        # Log odds of the second against the first atom in row i of P.
        odds = (log_rest + gamma * s[i] * s[1]) - (log_p + gamma * s[i] * s[0])
        log_weights = _shares(odds)
        share = [math.exp(t) for t in log_weights]
        centred = (share[1] * gap, -share[0] * gap)
        spread = math.exp(log_weights[0] + log_weights[1]) * gap**2
        spreads.append(abs(gamma) * spread)
        for j in range(2):
            factor = 1 + gamma * s[i] * centred[j]
            log_scale = log_weights[j] + (log_a[i] - log_a[j]) / 2
            if i == j:
                factor += gamma * share[1 - j] * gap**2  # γ v_i / P_ii
            entries.append((factor, log_scale))
    top = max(scale for _, scale in entries)
    a, b, c, d = (factor * math.exp(scale - top) for factor, scale in entries)
    # The norm of a 2 × 2 matrix is half the sum of the lengths of its conformal and anticonformal parts.
    norm = (math.hypot(a + d, b - c) + math.hypot(a - d, b + c)) / 2
    log = top + math.log(norm) if norm > 0 else -math.inf
    return max(log, *(math.log(t) if t > 0 else -math.inf for t in spreads))
