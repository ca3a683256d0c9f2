"""Lower bounds on the W_2-Lipschitz constant of mean-field attention, from measures with two atoms.

The measure has mass p at Ru and mass 1 − p at Ru/2 or −Ru, where u is a unit eigenvector of A for its largest
or smallest real eigenvalue, γ_max or γ_min. The scores are ⟨A x_i, x_j⟩ and the values V x_j. The bounds are
functions of g = γ_max R²/8 or g = −γ_min R², evaluated in logarithms. Derivations: documentation page "Worst
inputs, and lower bounds".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from howsmooth.bounds.attention_parameters import Head, log_spectral_norm, parameters_of
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_radius
from howsmooth.bounds.worst_case_tokens import real_eigenpairs
from howsmooth.errors import ArgumentError

__all__ = [
    "proposition_3_6",
    "proposition_3_6_rate",
    "two_dirac",
    "weighted_two_atom_lower_bound",
]

_PAPER = "Castin, Ablin, Peyré, ICML 2024"
_PAGE = 'howsmooth documentation, "Worst inputs, and lower bounds"'

# A larger g is replaced by this value, for which the float64 logarithm g still has an error below 1e-4. The
# bound remains valid, because it is the bound for a smaller radius.
_LARGEST_G = 1e12


def two_dirac(
    attention: object, radius: float, *, weight: float | None = None, cluster: str = "paper"
) -> Bound:
    """Bound the W_2-Lipschitz constant of attention from below by its local Lipschitz constant at a measure
    with two atoms.

    The local constant along the eigenvector u is max(‖M‖, |γ|v_1, |γ|v_2) · |Vu| with M_ij = √(a_i/a_j) [P_ij
    (1 + γ s_i (s_j − m_i)) + δ_ij γ v_i]. Here s_i u are the positions of the atoms, a_i their weights,
    P_ij ∝ a_j e^{γ s_i s_j}, and m_i and v_i the mean and the variance of s under row i of P.

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.
    weight
        Mass p of the atom at Ru, 0 < p < 1; default 1/(1 + 3e^{2g}).
    cluster
        Position of the other atom: "half" for Ru/2 with u for γ_max, "opposite" for −Ru with u for γ_min,
        "paper" for "half" if γ_max/8 >= −γ_min and "opposite" otherwise.

    Returns
    -------
    Bound
        Lower bound on Lip_W2(F on P(B_R)). Hypotheses: no mask, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Documentation page "Worst inputs, and lower bounds", section "Mean field: two Diracs". The measure is the
    one of Proposition 3.6 of Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024.

    """
    case = _Case.of(attention, radius, cluster)
    if weight is None:
        log_p, log_rest = _shares(math.log(3) + 2 * case.g)
    else:
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < 1:
            raise ArgumentError("weight", expected="a number p with 0 < p < 1", got=repr(weight))
        log_p, log_rest = math.log(weight), math.log1p(-weight)
    log = case.log_strength + _log_two_dirac(case, log_p, log_rest) - 4e-15 * abs(case.g)
    return Bound.lower("two_dirac", Quantity.MEAN_FIELD, _PAGE, log_formula=log, hypotheses=case.hypotheses())


def proposition_3_6(attention: object, radius: float) -> Bound:
    """Bound the W_2-Lipschitz constant from below by Proposition 3.6, in a version for finite R and V = I.

    The bound is √((1−p)/p)/(2−p) · (1 + 2g(1−p)/(2−p)) with p = e^{−2g} and g = R² max(−γ_min, γ_max/8).

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.

    Returns
    -------
    Bound
        Lower bound on Lip_W2(F on P(B_R)). Hypotheses: no mask, V = I, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Proposition 3.6 and Lemma C.8, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024. The
    finite-R form is derived on the documentation page "Worst inputs, and lower bounds".

    """
    case = _Case.of(attention, radius, "paper")
    g = case.g
    log = -math.inf
    if g > 0:
        rest = -math.expm1(-2 * g)  # 1 − p, and 2 − p = 1 + rest
        log = 0.5 * math.log(rest) + g - math.log1p(rest) + math.log1p(2 * g * rest / (1 + rest)) - 4e-15 * g
    return Bound.lower(
        "proposition_3_6",
        Quantity.MEAN_FIELD,
        f"Proposition 3.6 and Lemma C.8, {_PAPER}; {_PAGE}",
        log_formula=log,
        hypotheses=case.hypotheses(needs_identity=True),
    )


def weighted_two_atom_lower_bound(attention: object, radius: float) -> Bound:
    """Bound the W_2-Lipschitz constant from below by measures with two atoms, whose weights are nearly
    optimal.

    The weights give a larger bound than Proposition 3.6 does. The bound is (√3/4) e^g (1 + 3g/2) |Vu| with g
    = R² max(−γ_min, γ_max/8). The weight p = 1/(1 + 3e^{2g}) is optimal as g → ∞.

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.

    Returns
    -------
    Bound
        Lower bound on Lip_W2(F on P(B_R)). Hypotheses: no mask, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Documentation page "Worst inputs, and lower bounds", section "Mean field: two Diracs".

    """
    case = _Case.of(attention, radius, "paper")
    g = max(case.g, 0.0)
    log = case.log_strength + 0.5 * math.log(3) - math.log(4) + g + math.log1p(1.5 * g) - 4e-15 * g
    return Bound.lower(
        "weighted_two_atom_lower_bound",
        Quantity.MEAN_FIELD,
        _PAGE,
        log_formula=log,
        hypotheses=case.hypotheses(),
    )


def proposition_3_6_rate(attention: object, radius: float) -> Bound:
    """Bound the W_2-Lipschitz constant from below by the growth rate in Proposition 3.6, for V = I.

    The rate, for R → ∞, is (g/2) e^g with g = R² max(−γ_min, γ_max/8). It is a lower bound for every R > 0.

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.

    Returns
    -------
    Bound
        Lower bound on Lip_W2(F on P(B_R)). Hypotheses: no mask, V = I, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Proposition 3.6, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024. The proof
    for every R is on the documentation page "Worst inputs, and lower bounds".

    """
    case = _Case.of(attention, radius, "paper")
    log = math.log(case.g / 2) + case.g * (1 - 4e-15) if case.g > 0 else -math.inf
    return Bound.lower(
        "proposition_3_6_rate",
        Quantity.MEAN_FIELD,
        f"Proposition 3.6, {_PAPER}; for every R: {_PAGE}",
        log_formula=log,
        hypotheses=case.hypotheses(needs_identity=True),
    )


@dataclass(frozen=True)
class _Case:
    """An eigenvalue γ of the score matrix A, with the other numbers that enter the lower bounds at a measure
    with two atoms.

    The other numbers describe the positions of the atoms and the hypotheses of the bound.
    """

    #: γ R².
    curvature: float
    #: Position of the second atom in units of the first: 1/2 or −1.
    ratio: float
    #: log |Vu|, rounded down.
    log_strength: float
    unmasked: bool
    identity: bool
    biased: bool
    real: bool

    @property
    def g(self) -> float:
        """Half the difference between the attention scores of the two atoms.

        It is γ_max R²/8 or −γ_min R², half of ⟨A x_2, x_1 − x_2⟩.
        """
        return self.curvature * self.ratio * (1 - self.ratio) / 2

    def hypotheses(self, *, needs_identity: bool = False) -> tuple[Hypothesis, ...]:
        return (
            Hypothesis("no mask", self.unmasked),
            *([Hypothesis("V = I", self.identity)] if needs_identity else []),
            Hypothesis("no query bias", not self.biased),
            Hypothesis("A has a real eigenvalue", self.real),
        )

    @classmethod
    def of(cls, attention: object, radius: object, cluster: str) -> _Case:
        R = check_radius(radius)
        if cluster not in ("paper", "half", "opposite"):
            raise ArgumentError("cluster", expected="'paper', 'half' or 'opposite'", got=repr(cluster))
        if isinstance(attention, int | float) and not isinstance(attention, bool):
            if not math.isfinite(attention):
                raise ArgumentError("attention", expected="a finite number γ", got=repr(attention))
            gamma = float(attention)
            high = low = gamma
            logs = (0.0, 0.0)
            unmasked, identity, biased, real = True, True, False, True
        else:
            parameters = parameters_of(attention)
            head = parameters.one_head("the two-Dirac bound")
            pairs = real_eigenpairs(head)
            real = bool(pairs)
            (low, u_low), (high, u_high) = (pairs[0], pairs[-1]) if real else ((0.0, None), (0.0, None))

            def log_size_of(u: torch.Tensor | None) -> float:
                return -math.inf if u is None else log_spectral_norm(head.V, u[:, None])

            logs = (log_size_of(u_low), log_size_of(u_high))
            unmasked, identity, biased = parameters.masking == "none", _is_identity(head), bool(head.b.any())
        half = cluster == "half" or (cluster == "paper" and high / 8 >= -low)
        gamma, log_size, ratio = (high, logs[1], 0.5) if half else (low, logs[0], -1.0)
        # γR² is formed from logarithms because R² may overflow.
        log = -math.inf if gamma == 0 else math.log(abs(gamma)) + 2 * math.log(R)
        curvature = math.copysign(math.exp(min(log, math.log(_LARGEST_G))), gamma)
        # Rounded down: the norm was rounded up by some 1e-12
        return cls(curvature, ratio, log_size - 4e-12, unmasked, identity, biased, real)


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


def _is_identity(head: Head) -> bool:
    eye = torch.eye(head.d, dtype=torch.float64)
    return head.V.shape == eye.shape and bool((eye == head.V).all())
