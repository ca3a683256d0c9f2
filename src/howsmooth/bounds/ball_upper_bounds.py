"""Upper bounds on the Lipschitz constant of one unmasked attention head on the ball of radius R.

Lip(f on B_R^n) is the Lipschitz constant of f, in Frobenius norms, on all sequences of n tokens of norm at
most R. The scores are ⟨A x_i + b, x_j⟩ and the values V x_j. In the formulas a = ‖A‖R² and a₃ = (‖A‖R +
|b|)R, which equals a without a query bias b. Formulas are evaluated in logarithms, so that e^{2a} may
overflow and lengths may have hundreds of digits. Proofs: documentation page "Bounds on a ball".
"""

from __future__ import annotations

import math
import sys

import numpy as np

from howsmooth.bounds.attention_parameters import Head, Parameters, log_largest_weight, parameters_of
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length, check_radius, exp

__all__ = [
    "ball_upper_bound",
    "mean_field_upper_bound",
    "row_norm_maximum",
    "theorem_3_3",
    "theorem_3_5",
    "theorem_e_3",
]

PAPER = "Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024"
OURS = 'howsmooth documentation, "Bounds on a ball"'


def theorem_3_3(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) from above by Theorem 3.3 of the paper; the bound grows like R²√n.

    The bound is √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^{1/2}.

    Parameters
    ----------
    attention
        One head: a :class:`~howsmooth.bounds.Head`, a :class:`~howsmooth.attention.SelfAttention` or a
        captured site.
    length
        Number n >= 1 of tokens.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n). Hypotheses: no mask, no query bias.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or length or radius do not fit.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem 3.3.

    """
    parameters, head = one_head(attention, "theorem_3_3")
    n, R = check_length(length), check_radius(radius)
    return upper(
        "theorem_3_3",
        Quantity.GLOBAL,
        f"{PAPER}, Theorem 3.3",
        log_theorem_3_3(head, n, R),
        unmasked(attention, parameters),
        no_query_bias(head, "ball_upper_bound"),
    )


def theorem_3_5(attention: object, radius: object) -> Bound:
    """Bound the W₂-Lipschitz constant of mean-field attention from above by Theorem 3.5 of the paper.

    The bound is ‖V‖ (1 + 3a) e^{2a} with a = ‖A‖R².

    Parameters
    ----------
    attention
        One head, as for :func:`theorem_3_3`.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip_W2(F on P(B_R)), and so on Lip(f on B_R^n) for every n. Hypotheses: no mask, no
        query bias.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_3_3`.

    References
    ----------
    Castin, Ablin, Peyré, ICML 2024, Theorem 3.5, after Geshkovski, Letrouit, Polyanskiy, Rigollet, *The
    emergence of clusters in self-attention dynamics*, 2023.

    """
    parameters, head = one_head(attention, "theorem_3_5")
    a, _ = score_sizes(head, check_radius(radius))
    return upper(
        "theorem_3_5",
        Quantity.MEAN_FIELD,
        f"{PAPER}, Theorem 3.5 (after Geshkovski et al. 2023)",
        log_product(head.log_V_norm, math.log1p(3 * a) + 2 * a),
        unmasked(attention, parameters),
        no_query_bias(head, "mean_field_upper_bound"),
    )


def theorem_e_3(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) from above by Theorem E.3 of the paper, which allows a query bias.

    The bound is √3 ‖V‖ (‖A‖²R⁴ + 4nR²(‖A‖R + |b|)² + n)^{1/2}, where b is the query bias.

    Parameters
    ----------
    attention, length, radius
        As for :func:`theorem_3_3`.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n). Hypothesis: no mask.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_3_3`.

    References
    ----------
    Castin, Ablin, Peyré, ICML 2024, Theorem E.3.

    """
    parameters, head = one_head(attention, "theorem_e_3")
    n, R = check_length(length), check_radius(radius)
    a, a3 = score_sizes(head, R)
    inside = log_sum(2 * log(a), math.log(4 * n) + 2 * log(a3), math.log(n))
    return upper(
        "theorem_e_3",
        Quantity.GLOBAL,
        f"{PAPER}, Theorem E.3",
        log_product(head.log_V_norm, 0.5 * (math.log(3) + inside)),
        unmasked(attention, parameters),
    )


def ball_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) from above by Theorem A of the documentation, which is sharper than Theorem 3.3
    and allows a query bias.

    The bound is ‖V‖ (a + √(n·min{h*(a₃), (1 + a₃²) P̄(n, a₃)})). a = ‖A‖R², a₃ = (‖A‖R + |b|)R, h* is
    ``row_norm_maximum``, and P̄(n, a) = 1/(1 + (n−1)e^{−2a}) bounds a single attention weight. Theorem A
    is below Theorems 3.3, 3.5 and E.3 for all parameters. For n = 1 it is ‖V‖, which is the Lipschitz
    constant.

    Parameters
    ----------
    attention, length, radius
        As for :func:`theorem_3_3`.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n). Hypothesis: no mask.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_3_3`.

    References
    ----------
    Documentation page "Bounds on a ball", Theorem A.

    """
    parameters, head = one_head(attention, "ball_upper_bound")
    n, R = check_length(length), check_radius(radius)
    a, a3 = score_sizes(head, R)
    factor = 0.0 if n == 1 else log_sum(log(a), 0.5 * (math.log(n) + log_row(n, a3)))
    return upper(
        "ball_upper_bound",
        Quantity.GLOBAL,
        f"{OURS}, Theorem A",
        log_product(head.log_V_norm, factor),
        unmasked(attention, parameters),
    )


def mean_field_upper_bound(attention: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of one head on the ball of radius R by a number that holds for all lengths
    n.

    The bound is ‖V‖ (a + e^{a₃} √(1 + a₃²)). a = ‖A‖R² and a₃ = (‖A‖R + |b|)R. The bound is also one for the
    mean-field map in W₂, and its exponent is half that of Theorem 3.5.

    Parameters
    ----------
    attention
        One head, as for :func:`theorem_3_3`.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip_W2(F on P(B_R)), and so on Lip(f on B_R^n) for every n. Hypothesis: no mask.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_3_3`.

    References
    ----------
    Documentation page "Bounds on a ball", section "For all lengths: the mean-field map".

    """
    parameters, head = one_head(attention, "mean_field_upper_bound")
    a, a3 = score_sizes(head, check_radius(radius))
    return upper(
        "mean_field_upper_bound",
        Quantity.MEAN_FIELD,
        f"{OURS}, Theorem A for all n",
        log_product(head.log_V_norm, log_sum(log(a), a3 + math.log(math.hypot(1.0, a3)))),
        unmasked(attention, parameters),
    )


# ---- the function h* and the norm of one row


def row_norm_maximum(a: float) -> float:
    """Return h*(a), an upper bound on the squared norm of a block row of the Jacobian for V = I and a query
    that is held fixed. The scores of the row must lie in an interval of length 2a.

    h*(a) is the maximum over p in [0, 1] of p²(1 + 2a(1−p))² + (1−p)²(1 − 2ap)². It is 1 for a <= 1/2, and at
    most 1 + a²/2. It bounds Σ_j P_j²(1 + t_j)² for all probability vectors P and all numbers t_j in an
    interval of length 2a with Σ_j P_j t_j = 0 (documentation page "Bounds on a ball", Lemma 2).

    Parameters
    ----------
    a
        A number >= 0.

    Returns
    -------
    float
        The maximum h*(a), inf if it overflows.

    """
    if a > 1e8:  # h* = 1 + a²/2 up to the last digit
        return 1.0 + 0.5 * a * a
    w = h_star_maximiser(a)
    return 1.0 + 0.5 * (1 - w) * (1 + w) * (a - 1 + a * w) * (a + 1 - a * w)


def h_star_maximiser(a: float) -> float:
    """Return the number w = 2p − 1 for the p at which the polynomial in ``row_norm_maximum`` is largest.

    The result is 0 for a > 1e8 or NaN.
    """
    if a <= 0.5:
        return 1.0
    if not a <= 1e8:  # also true for NaN
        return 0.0
    # In terms of w = 2p − 1 the function is 1 + (1 − w²)(a² − (1 − aw)²)/2. The cubic below is its
    # derivative up to a factor, so the maximum is at one of its roots or at w = 0.
    roots = np.roots([2.0, -3.0 / a, 1.0 / (a * a) - 2.0, 1.0 / a])
    candidates = [min(max(float(root.real), 0.0), 1.0) for root in roots] + [0.0]
    return max(candidates, key=lambda w: (1 - w) * (1 + w) * (a - 1 + a * w) * (a + 1 - a * w))


def log_h_star(a: float) -> float:
    """Return the logarithm of the number h*(a) that ``row_norm_maximum`` computes.

    It is finite also where h*(a) overflows.
    """
    return 2 * math.log(a) - math.log(2) if a > 1e100 else math.log(row_norm_maximum(a))


def log_row(n: int, a3: float) -> float:
    """Return the logarithm of an upper bound on the squared norm of a block row of the Jacobian for V = I and
    a query that is held fixed.

    The row is that of a query that sees n tokens. The bound is min{h*(a₃), (1 + a₃²) P̄(n, a₃)}, with h* of
    ``row_norm_maximum`` and P̄ of :func:`log_largest_weight`.
    """
    if n <= 1:
        return 0.0  # a row that sees one token is the identity
    return min(log_h_star(a3), 2 * math.log(math.hypot(1.0, a3)) + log_largest_weight(n, a3))


# ---- helpers shared with the other modules


def one_head(attention: object, needed_by: str) -> tuple[Parameters, Head]:
    """Return the parameters of an attention and its only head; raise ArgumentError if it has
    several heads.
    """
    parameters = parameters_of(attention)
    return parameters, parameters.one_head(needed_by)


def score_sizes(head: Head, radius: float) -> tuple[float, float]:
    """Return two upper bounds on the scores of a head on the ball of radius R. The first leaves the query
    bias out, the second includes it.

    The first is a = ‖A‖R², the second a₃ = (‖A‖R + |b|)R with the query bias b.
    """
    # In logarithms, because ‖A‖ may underflow and R² overflow where their product does neither.
    a = exp(head.log_A_norm + 2 * math.log(radius))
    return a, a + exp(log(head.b_norm) + math.log(radius))


def log_theorem_3_3(head: Head, n: int, radius: float) -> float:
    """Return the logarithm of the bound √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^{1/2} of Theorem 3.3."""
    a, _ = score_sizes(head, radius)
    inside = log_sum(2 * log(a) + math.log(4 * n + 1), math.log(n))
    return log_product(head.log_V_norm, 0.5 * (math.log(3) + inside))


def unmasked(attention: object, parameters: Parameters) -> Hypothesis:
    """Return the hypothesis that the attention has no mask, together with whether it holds.

    A bare :class:`Head` is taken as unmasked.
    """
    return Hypothesis("no mask", isinstance(attention, Head) or parameters.masking == "none")


def no_query_bias(head: Head, other: str = "") -> Hypothesis:
    """Return the hypothesis that the head has no query bias, together with whether it holds.

    ``other`` is the name of a bound that allows a query bias. A query bias that changes no scores is allowed.
    """
    return Hypothesis("no query bias" + (f", which {other} allows" if other else ""), head.b_norm == 0)


def upper(name: str, quantity: Quantity, source: str, log_formula: float, *hypotheses: Hypothesis) -> Bound:
    """Return an upper bound as a :class:`Bound`, given the logarithm of its value, which is rounded up."""
    if math.isfinite(log_formula):
        log_formula += 8 * sys.float_info.epsilon * abs(log_formula)
    return Bound.upper(name, quantity, source, log_formula=log_formula, hypotheses=hypotheses)


def log(x: float) -> float:
    """Return log x for x > 0, and −inf for x = 0."""
    return math.log(x) if x > 0 else -math.inf


def softplus(t: float) -> float:
    """Return log(1 + e^t)."""
    return max(t, 0.0) + math.log1p(math.exp(-abs(t)))


def log_product(*logs: float) -> float:
    """Return the logarithm of a product from the logarithms of its factors, where zero times infinity is
    zero.
    """
    return -math.inf if -math.inf in logs else math.fsum(logs)


def log_sum(*logs: float) -> float:
    """Return the logarithm of a sum from the logarithms of its terms."""
    largest = max(logs)
    if math.isinf(largest):
        return largest
    return largest + math.log(math.fsum(math.exp(term - largest) for term in logs))
