"""Lower bounds on the W_2-Lipschitz constant of mean-field attention, from two Dirac masses.

Mass p at Ru and 1 − p at Ru/2 or −Ru, u a unit eigenvector of A for γ. Everything is a function of
g = γ_max R²/8 or g = −γ_min R², evaluated in logarithms. Derivations: docs/theory/worst-inputs.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_radius
from howsmooth.bounds.parameters import Head, parameters_of
from howsmooth.bounds.witness import real_eigenpairs
from howsmooth.errors import ArgumentError

__all__ = [
    "proposition_3_6",
    "proposition_3_6_asymptotic",
    "proposition_3_6_better_weight",
    "two_dirac",
]

_PAPER = "Castin, Ablin, Peyré, ICML 2024"
_PAGE = "docs/theory/worst-inputs.md"

# Beyond this g float64 does not hold e^g's exponent to 1e-4. A smaller radius gives a valid bound too.
_LARGEST_G = 1e12


def two_dirac(attention: object, radius: float, weight: float | None = None, cluster: str = "paper") -> Bound:
    """Local W_2-Lipschitz constant along u at two Diracs, exactly: max(‖M‖, |γ|v_1, |γ|v_2) · |Vu|.

    With positions s_i on the line Ru, weights a_i, P_ij ∝ a_j e^{γ s_i s_j}, m_i and v_i mean and variance of
    s under P_i: M_ij = √(a_i/a_j) [P_ij (1 + γ s_i (s_j − m_i)) + δ_ij γ v_i].

    Parameters
    ----------
    attention
        One head, with a real eigenvalue and no query bias; or a number γ for A = γI, V = I.
    radius
        Radius R > 0.
    weight
        Mass p of the Dirac at Ru, 0 < p < 1; 1/(1 + 3e^{2g}) by default.
    cluster
        "half": the other Dirac at Ru/2, u for γ_max. "opposite": at −Ru, u for γ_min. "paper": the first
        if γ_max/8 >= −γ_min.

    Returns
    -------
    Bound
        Lower, on the mean-field constant. Hypotheses: no mask, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md; the configuration is that of Proposition 3.6, Castin,
    Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024.

    """
    case = _Case.of(attention, radius, cluster)
    if weight is None:
        log_p, log_rest = _shares(math.log(3) + 2 * case.g)
    else:
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < 1:
            raise ArgumentError(
                "weight", expected="a mass between 0 and 1, neither of them", got=repr(weight)
            )
        log_p, log_rest = math.log(weight), math.log1p(-weight)
    log = case.log_strength + _log_two_dirac(case, log_p, log_rest) - 4e-15 * abs(case.g)
    return Bound.lower(
        "two_dirac", Quantity.MEAN_FIELD, f"howsmooth, {_PAGE}", log_formula=log, hypotheses=case.hypotheses()
    )


def proposition_3_6(attention: object, radius: float) -> Bound:
    """Lip ≥ √((1−p)/p)/(2−p) · (1 + 2g(1−p)/(2−p)), p = e^{−2g}, g = R² max(−γ_min, γ_max/8).

    The finite-R form of the proposition, for V = I.

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.

    Returns
    -------
    Bound
        Lower, on the mean-field constant. Hypotheses: no mask, V = I, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Proposition 3.6 and Lemma C.8, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024; the
    finite-R form is derived in docs/theory/worst-inputs.md.

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


def proposition_3_6_better_weight(attention: object, radius: float) -> Bound:
    """Lip ≥ (√3/4) e^g (1 + 3g/2) |Vu|: the two Diracs with p = 1/(1 + 3e^{2g}), optimal as g grows.

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.

    Returns
    -------
    Bound
        Lower, on the mean-field constant. Hypotheses: no mask, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    case = _Case.of(attention, radius, "paper")
    g = max(case.g, 0.0)
    log = case.log_strength + 0.5 * math.log(3) - math.log(4) + g + math.log1p(1.5 * g) - 4e-15 * g
    return Bound.lower(
        "proposition_3_6_better_weight",
        Quantity.MEAN_FIELD,
        f"howsmooth, {_PAGE}",
        log_formula=log,
        hypotheses=case.hypotheses(),
    )


def proposition_3_6_asymptotic(attention: object, radius: float) -> Bound:
    """Lip ≥ (g/2) e^g, g = R² max(−γ_min, γ_max/8): the proposition's equivalent, a bound at every R.

    The proposition states the rate as R → ∞; that it holds for all R > 0 is shown on the page.

    Parameters
    ----------
    attention
        One head, or a number γ for A = γI, V = I.
    radius
        Radius R > 0.

    Returns
    -------
    Bound
        Lower, on the mean-field constant. Hypotheses: no mask, V = I, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Proposition 3.6, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024; for all R:
    docs/theory/worst-inputs.md.

    """
    case = _Case.of(attention, radius, "paper")
    log = math.log(case.g / 2) + case.g * (1 - 4e-15) if case.g > 0 else -math.inf
    return Bound.lower(
        "proposition_3_6_asymptotic",
        Quantity.MEAN_FIELD,
        f"Proposition 3.6, {_PAPER}; for every R: {_PAGE}",
        log_formula=log,
        hypotheses=case.hypotheses(needs_identity=True),
    )


@dataclass(frozen=True)
class _Case:
    """An eigenvalue with its two positions, in units of R, and what the statements depend on."""

    #: γ R²
    curvature: float
    #: Position of the light Dirac over that of the heavy one: 1/2 or −1.
    ratio: float
    log_strength: float
    unmasked: bool
    identity: bool
    biased: bool
    real: bool

    @property
    def g(self) -> float:
        """Half the gap of scores ⟨A x_light, x_heavy − x_light⟩."""
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
            sizes = (1.0, 1.0)
            unmasked, identity, biased, real = True, True, False, True
        else:
            parameters = parameters_of(attention)
            head = parameters.one_head("the two-Dirac bound")
            pairs = real_eigenpairs(head)
            real = bool(pairs)
            (low, u_low), (high, u_high) = (pairs[0], pairs[-1]) if real else ((0.0, None), (0.0, None))

            def size_of(u: torch.Tensor | None) -> float:
                return 0.0 if u is None else float(torch.linalg.vector_norm(head.V @ u))

            sizes = (size_of(u_low), size_of(u_high))
            unmasked, identity, biased = parameters.masking == "none", _is_identity(head), bool(head.b.any())
        half = cluster == "half" or (cluster == "paper" and high / 8 >= -low)
        gamma, size, ratio = (high, sizes[1], 0.5) if half else (low, sizes[0], -1.0)
        # log γ R²: R² may overflow
        log = -math.inf if gamma == 0 else math.log(abs(gamma)) + 2 * math.log(R)
        curvature = math.copysign(math.exp(min(log, math.log(_LARGEST_G))), gamma)
        log_strength = math.log(size) - 1e-12 if size > 0 else -math.inf
        return cls(curvature, ratio, log_strength, unmasked, identity, biased, real)


def _shares(log_odds: float) -> tuple[float, float]:
    """Logarithms of 1/(1+e^t) and of 1/(1+e^{−t})."""
    tail = math.log1p(math.exp(-abs(log_odds)))
    return -max(log_odds, 0.0) - tail, min(log_odds, 0.0) - tail


def _log_two_dirac(case: _Case, log_p: float, log_rest: float) -> float:
    """Logarithm of max(‖M‖, |γ|v_1, |γ|v_2), positions in units of R (γ then stands for γR²)."""
    gamma, s = case.curvature, (1.0, case.ratio)
    gap = s[0] - s[1]
    log_a = (log_p, log_rest)
    entries: list[tuple[float, float]] = []  # (factor, log scale) of M_11, M_12, M_21, M_22
    spreads = []
    for i in range(2):
        # log odds of the second atom against the first, for a query at s_i
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
    # σ_max of a 2 × 2 matrix, as (|E| + |F|)/2 of its conformal parts
    norm = (math.hypot(a + d, b - c) + math.hypot(a - d, b + c)) / 2
    log = top + math.log(norm) if norm > 0 else -math.inf
    return max(log, *(math.log(t) if t > 0 else -math.inf for t in spreads))


def _is_identity(head: Head) -> bool:
    eye = torch.eye(head.d, dtype=torch.float64)
    return head.V.shape == eye.shape and bool((eye == head.V).all())
