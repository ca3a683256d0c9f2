"""Bounds on flows from theorems: how fast tokens cluster on a sphere, and how far two flows can move apart.

All statements and their proofs are howsmooth's own; they stand on the documentation page "Flows: tokens,
measures and Gaussians through depth", section "Rates".
"""

from __future__ import annotations

import math

from howsmooth.attention import SelfAttention
from howsmooth.bounds import Head, mean_field_upper_bound
from howsmooth.bounds.attention_parameters import Parameters, parameters_of
from howsmooth.bounds.bound import exp
from howsmooth.errors import ArgumentError, check_number, check_whole
from howsmooth.rounding import above, below

__all__ = ["clustering_bound", "finite_context_bound", "log_stability_bound"]

# The growth of the ball is followed in so many steps, each with the Lipschitz constant at its end.
_STEPS = 1000

# Exponentials of numbers up to 745 in size, which are sums of a few products: an exponent is wrong by some
# ten roundings of its size.
_ROUNDINGS = 10 * 745


def clustering_bound(beta: float, cosine: float, time: float) -> float:
    """Bound the number 1 − ⟨x_i, x_j⟩ for all pairs of tokens that have flowed through unmasked attention on
    the unit sphere for a given time.

    The flow is x_i' = P_{x_i} Σ_j p_ij x_j, with the softmax weights p_ij of the scores β⟨x_i, x_j⟩ and the
    projection P_x on the tangent space. Let ⟨x_i, x_j⟩ ≥ g > 0 for all pairs at time zero. Then at time t the
    number is at most s/(1 + s) with s = (1/g − 1) exp(−2 e^{−|β|(1 − g)} t). The number of tokens and their
    weights do not matter, so the bound also holds for measures.

    Parameters
    ----------
    beta
        Factor β of the scores, of any sign.
    cosine
        Smallest inner product g of two tokens at time zero, in (0, 1].
    time
        Time t >= 0. Values v·I with v > 0 make the flow v times as fast: pass v t.

    Returns
    -------
    float
        Upper bound on 1 − min ⟨x_i, x_j⟩, which is half of the largest squared distance of two tokens.

    Raises
    ------
    ArgumentError
        If an argument does not fit, such as a cosine that is not positive: nothing is proved then.

    References
    ----------
    Documentation page "Flows: tokens, measures and Gaussians through depth", Theorem H. Asymptotic statements
    of this kind: Geshkovski et al., *A mathematical perspective on Transformers*, 2023.

    """
    beta = check_number("beta", beta, "a finite number", math.isfinite)
    cosine = check_number("cosine", cosine, "a finite number", math.isfinite)
    if not 0 < cosine <= 1:
        raise ArgumentError(
            "cosine",
            expected="a number in (0, 1]: the smallest inner product of two tokens",
            got=f"{cosine:g}",
            remedy="Nothing is proved for tokens that are not within a right angle of each other.",
        )
    time = _time(time)
    if cosine == 1:
        return 0.0
    rate = below(2 * math.exp(-abs(beta) * (1 - cosine)), _ROUNDINGS)
    # s/(1 + s) from log s, as both factors of s may leave the range of float64
    log_s = math.log1p(-cosine) - math.log(cosine) - rate * time
    share = 1 / (1 + math.exp(-abs(log_s)))
    return _up(share if log_s > 0 else math.exp(log_s) * share)


def log_stability_bound(attention: object, radius: float, time: float) -> float:
    """Bound log(W₂(μ_t, ν_t) / W₂(μ_0, ν_0)), where two measures μ_0 and ν_0 flow through the same unmasked
    attention head, and become μ_t and ν_t at time t.

    Both measures start in the ball of radius R. With the Lipschitz constant L(R) of
    :func:`~howsmooth.bounds.mean_field_upper_bound` the number is at most ∫_0^t L(R e^{‖V‖s}) ds. For two
    sequences of n tokens it also bounds log(|X_t − Y_t| / |X_0 − Y_0|).

    Parameters
    ----------
    attention
        One head without mask, biases of values and output, sinks or other scores: a
        :class:`~howsmooth.attention.SelfAttention`, a captured site or a :class:`~howsmooth.bounds.Head`.
    radius
        Largest norm R > 0 of a token at time zero.
    time
        Time t >= 0.

    Returns
    -------
    float
        Upper bound on the logarithm; inf if it overflows.

    Raises
    ------
    ArgumentError
        If an argument does not fit, or the head is masked or has biases of values or output.

    References
    ----------
    Documentation page "Flows: tokens, measures and Gaussians through depth", Theorem G.

    """
    head = _plain_head(attention)
    radius, time = check_number("radius", radius), _time(time)
    if time == 0:
        return 0.0
    constants = []
    for step in range(1, _STEPS + 1):
        # The radius, and so the Lipschitz constant, is largest at the end of the step.
        grown = math.log(radius) + head.V_norm * time * step / _STEPS
        if grown >= 700:
            return math.inf
        constant = mean_field_upper_bound(head, above(math.exp(grown), _ROUNDINGS)).log_value
        if constant == math.inf:
            return math.inf
        constants.append(constant)
    largest = constants[-1]
    if largest == -math.inf:
        return 0.0
    mean = math.fsum(math.exp(constant - largest) for constant in constants) / _STEPS
    return _up(exp(math.log(time) + largest + math.log(mean)))


def finite_context_bound(attention: object, radius: float, time: float, atoms: int, length: int) -> float:
    """Bound the expected distance W₂ between the flow of a measure and the flow of tokens sampled from it.

    The measure has k atoms in the ball of radius R, and n tokens are drawn independently. After time t the
    expectation of W₂(μ_t, μ̂_t) is at most √2 R ((k − 1)/n)^{1/4} times the factor of
    :func:`log_stability_bound`.

    Parameters
    ----------
    attention, radius, time
        As for :func:`log_stability_bound`.
    atoms
        Number k >= 1 of atoms of the measure.
    length
        Number n >= 1 of tokens.

    Returns
    -------
    float
        Upper bound on the expectation; inf if it overflows.

    Raises
    ------
    ArgumentError
        As for :func:`log_stability_bound`.

    References
    ----------
    Documentation page "Flows: tokens, measures and Gaussians through depth", Theorem G. Chen, Lin, Liu and
    Rigollet, *Propagation of chaos in contextual flow maps*, 2026 (arXiv 2605.16747), has the better rate
    n^{−1/2}; its constants are not used here.

    """
    check_whole("atoms", atoms)
    check_whole("length", length)
    growth = log_stability_bound(attention, radius, time)
    if atoms == 1:
        return 0.0
    start = math.log(radius) + math.log(2) / 2 + (math.log(atoms - 1) - math.log(length)) / 4
    return _up(exp(growth + start))


def _up(number: float) -> float:
    """Round a number >= 0 up. The result is positive even if the number has underflowed to zero."""
    return math.nextafter(above(number, _ROUNDINGS), math.inf)


def _plain_head(attention: object) -> Head:
    f = getattr(attention, "map", attention)
    if isinstance(f, SelfAttention) and (f.value_bias is not None or f.output_bias is not None):
        raise ArgumentError(
            "attention", expected="a head without biases of values and output", got="such a bias"
        )
    parameters = attention if isinstance(attention, Head | Parameters) else parameters_of(attention)
    if isinstance(parameters, Head):
        return parameters
    failed = [h.statement for h in mean_field_upper_bound(attention, 1.0).hypotheses if not h.holds]
    if failed:
        raise ArgumentError("attention", expected="; ".join(failed), got=f"masking {parameters.masking!r}")
    return parameters.folded(0)


def _time(time: object) -> float:
    return check_number("time", time, "a finite number >= 0", lambda number: 0 <= number < math.inf)
