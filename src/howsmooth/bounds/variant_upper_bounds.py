"""Upper bounds for L2, scaled cosine, Sinkhorn and LipschitzNorm attention, and for the softmax.

All bounds hold on the whole space, except the bound for Sinkhorn attention, which holds on a ball. Proofs:
documentation page "Other attentions".
"""

from __future__ import annotations

import math

from scipy.special import wrightomega
from torch import Tensor

from howsmooth.attention.map import as_parameter
from howsmooth.bounds.attention_parameters import log_largest_weight
from howsmooth.bounds.ball_upper_bounds import (
    log,
    log_product,
    log_sum,
    one_head,
    score_sizes,
    unmasked,
    upper,
)
from howsmooth.bounds.bound import Bound, Quantity, check_length, check_radius
from howsmooth.errors import ArgumentError
from howsmooth.rounding import spectral_norm_above

__all__ = [
    "l2_attention",
    "l2_attention_upper_bound",
    "lipschitz_norm",
    "lipschitz_norm_upper_bound",
    "scaled_cosine",
    "scaled_cosine_upper_bound",
    "sinkhorn",
    "softmax_upper_bound",
]

_OURS = 'howsmooth documentation, "Other attentions"'


# ---- L2 attention


def l2_attention(query: object, value: object, output: object, length: object) -> Bound:
    """Bound Lip(f) of L2 attention by the corrected Theorem 3.2 of Kim, Papamakarios and Mnih (2021).

    The bound is √N/√k (4Φ+1) √(Σ_h ‖Q_h‖⁴‖V_h‖²) ‖W_O‖, where Φ e^{Φ+1} = N − 1. Head h has the weights
    P_ij ∝ exp(−|Q_h x_i − Q_h x_j|²/√k), with the same matrix for queries and keys, and the output V_h
    Q_hᵀQ_h Σ_j P_ij x_j / √k. The published formula has ‖Q_h‖² instead of ‖Q_h‖⁴ and is no bound: for one
    token, k = 2, V = I and Q = 10 I the Lipschitz constant is 70.7, the published formula 7.07.

    Parameters
    ----------
    query
        Q_h, (heads, k, d).
    value
        V_h, (heads, value_dim, d).
    output
        W_O, (d_out, heads · value_dim), or None for the heads concatenated.
    length
        Number N >= 1 of tokens.

    Returns
    -------
    Bound
        Upper bound on Lip(f) on all of R^{N×d}.

    Raises
    ------
    ArgumentError
        If shapes do not fit or the length is no whole number >= 1.
    NonFiniteError
        If an entry is NaN or infinite.

    References
    ----------
    Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021, Theorem 3.2. The
    correction is proved on the documentation page "Other attentions".

    """
    q, v, log_output = _l2_parameters(query, value, output)
    n = check_length(length)
    phi = _phi(n)
    heads = [
        4 * log(spectral_norm_above(q_h)) + 2 * log(spectral_norm_above(v_h))
        for q_h, v_h in zip(q, v, strict=True)
    ]
    return upper(
        "l2_attention",
        Quantity.EVERYWHERE,
        "Kim et al., The Lipschitz Constant of Self-Attention, ICML 2021, Theorem 3.2, corrected",
        log_product(
            0.5 * (math.log(n) - math.log(q.shape[1])), math.log1p(4 * phi), 0.5 * log_sum(*heads), log_output
        ),
    )


def l2_attention_upper_bound(query: object, value: object, output: object, length: object) -> Bound:
    """Bound Lip(f) of L2 attention by a number that is never larger than the bound of :func:`l2_attention`.

    The bound is ‖W_O‖/√k √(Σ_h ‖Q_h‖²‖V_h Q_hᵀ‖²) (√N(1+2Φ) + 2Φ), where Φ e^{Φ+1} = N − 1. The attention is
    defined in :func:`l2_attention`.

    Parameters
    ----------
    query, value, output, length
        As for :func:`l2_attention`.

    Returns
    -------
    Bound
        Upper bound on Lip(f) on all of R^{N×d}; it is at most :func:`l2_attention`.

    Raises
    ------
    ArgumentError, NonFiniteError
        As for :func:`l2_attention`.

    References
    ----------
    Documentation page "Other attentions".

    """
    q, v, log_output = _l2_parameters(query, value, output)
    n = check_length(length)
    phi = _phi(n)
    heads = [
        2 * (log(spectral_norm_above(q_h)) + log(spectral_norm_above(v_h @ q_h.mT)))
        for q_h, v_h in zip(q, v, strict=True)
    ]
    core = log_sum(0.5 * math.log(n) + math.log1p(2 * phi), log(2 * phi))
    return upper(
        "l2_attention_upper_bound",
        Quantity.EVERYWHERE,
        _OURS,
        log_product(log_output, -0.5 * math.log(q.shape[1]), 0.5 * log_sum(*heads), core),
    )


def _l2_parameters(query: object, value: object, output: object) -> tuple[Tensor, Tensor, float]:
    """Check the arguments of the bounds on L2 attention. Return the query and value matrices in float64, and
    the log of the norm of the output projection.
    """
    q = as_parameter("query", query, ("heads", "key_dim", "d"))
    v = as_parameter("value", value, (q.shape[0], "value_dim", q.shape[2]))
    if output is None:
        return q.double(), v.double(), 0.0
    w = as_parameter("output", output, ("d_out", v.shape[0] * v.shape[1]))
    return q.double(), v.double(), log(spectral_norm_above(w))


def _phi(n: int) -> float:
    """Solve Φ e^{Φ+1} = n − 1 for the number Φ that appears in the bounds on L2 attention.

    The solution is W₀((n−1)/e) with the Lambert function W₀. n may have any size.
    """
    return 0.0 if n == 1 else float(wrightomega(math.log(n - 1) - 1.0))


# ---- scaled cosine attention


def scaled_cosine(
    query: object,
    key: object,
    value: object,
    length: object,
    *,
    temperature: object,
    gain: object = 1.0,
    eps: object,
) -> Bound:
    """Bound Lip(f) of scaled cosine attention by the theorem of Qi et al. (2023).

    The bound is νε^{-1/2} (2N(N−1)τ‖W_K‖ + 2(N−1)τ‖W_Q‖ + 2N‖W_V‖). The attention is f(X) = ν softmax(τ q kᵀ)
    v. Its queries, keys and values are the vectors u = W_Q x, W_K x and W_V x after the normalisation
    u/√(|u|² + ε).

    Parameters
    ----------
    query, key
        W_Q and W_K, (k, d).
    value
        W_V, (value_dim, d).
    length
        Number N >= 1 of tokens.
    temperature
        Factor τ of the scores.
    gain
        Factor ν of the output.
    eps
        ε > 0 of the normalisation.

    Returns
    -------
    Bound
        Upper bound on Lip(f) on all of R^{N×d}.

    Raises
    ------
    ArgumentError
        If shapes do not fit, or a number is not finite or out of range.
    NonFiniteError
        If an entry is NaN or infinite.

    References
    ----------
    Qi, Wang, Chen, Shi, Zhang, *LipsFormer: Introducing Lipschitz Continuity to Vision Transformers*, ICLR
    2023. Proof: documentation page "Other attentions", section "Scaled cosine attention".

    """
    n = check_length(length)
    log_q, log_k, log_v, tau, log_factor = _cosine(query, key, value, temperature, gain, eps)
    log_n, log_before = math.log(n), math.log(n - 1) if n > 1 else -math.inf
    terms = (
        log_product(log_n, log_before, log(tau), log_k),
        log_product(log_before, log(tau), log_q),
        log_product(log_n, log_v),
    )
    return upper(
        "scaled_cosine",
        Quantity.EVERYWHERE,
        "Qi et al., LipsFormer, ICLR 2023",
        log_product(log_factor, math.log(2) + log_sum(*terms)),
    )


def scaled_cosine_upper_bound(
    query: object,
    key: object,
    value: object,
    length: object,
    *,
    temperature: object,
    gain: object = 1.0,
    eps: object,
) -> Bound:
    """Bound Lip(f) of scaled cosine attention by a number that is never larger than the bound of
    :func:`scaled_cosine`.

    The bound is νε^{-1/2} (c‖W_V‖ + τ‖W_Q‖ + min(√(N/2), c) τ‖W_K‖). The attention is defined in
    :func:`scaled_cosine`. c = √(N P̄(N, τ)) <= min(√N, e^τ) with P̄(N, τ) = 1/(1 + (N−1)e^{−2τ}), so the
    bound stays below a limit as N grows. For one token it is νε^{-1/2}‖W_V‖.

    Parameters
    ----------
    query, key, value, length, temperature, gain, eps
        As for :func:`scaled_cosine`.

    Returns
    -------
    Bound
        Upper bound on Lip(f) on all of R^{N×d}; it is at most :func:`scaled_cosine`.

    Raises
    ------
    ArgumentError, NonFiniteError
        As for :func:`scaled_cosine`.

    References
    ----------
    Documentation page "Other attentions".

    """
    n = check_length(length)
    log_q, log_k, log_v, tau, log_factor = _cosine(query, key, value, temperature, gain, eps)
    log_c = 0.5 * (math.log(n) + log_largest_weight(n, tau))
    terms = [log_product(log_c, log_v)]
    if n > 1:  # a single token has weight 1 for all scores
        log_rows = min(0.5 * (math.log(n) - math.log(2)), log_c)
        terms += [log_product(log(tau), log_q), log_product(log_rows, log(tau), log_k)]
    return upper(
        "scaled_cosine_upper_bound",
        Quantity.EVERYWHERE,
        _OURS,
        log_product(log_factor, log_sum(*terms)),
    )


def _cosine(
    query: object, key: object, value: object, temperature: object, gain: object, eps: object
) -> tuple[float, float, float, float, float]:
    """Check the arguments of the bounds on scaled cosine attention, and compute the norms that these bounds
    use.

    They are log ‖W_Q‖, log ‖W_K‖, log ‖W_V‖, |τ| and log(|ν|/√ε), with the temperature τ and the gain ν.
    """
    q = as_parameter("query", query, ("key_dim", "d"))
    k = as_parameter("key", key, tuple(q.shape))
    v = as_parameter("value", value, ("value_dim", q.shape[1]))
    epsilon = _number("eps", eps)
    if epsilon <= 0:
        raise ArgumentError(
            "eps",
            expected="a number > 0",
            got=repr(eps),
            remedy="With eps = 0 the normalisation is not Lipschitz at zero.",
        )
    return (
        log(spectral_norm_above(q)),
        log(spectral_norm_above(k)),
        log(spectral_norm_above(v)),
        abs(_number("temperature", temperature)),
        log_product(log(abs(_number("gain", gain))), -0.5 * math.log(epsilon)),
    )


# ---- Sinkhorn attention


def sinkhorn(attention: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) of Sinkhorn attention at convergence, for every number n of tokens.

    The bound is ‖V‖ (1 + 2‖A‖R²). The attention matrix is the doubly stochastic matrix diag(α) e^S diag(β),
    the limit of Sinkhorn's iterations for the scores S. The bound does not hold for few iterations. It does
    not depend on the query bias.

    Parameters
    ----------
    attention
        One head that gives A and V: a :class:`~howsmooth.bounds.Head`, an unmasked
        :class:`~howsmooth.attention.SelfAttention` or a captured site.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n) for every n. Hypothesis: no mask.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or the radius does not fit.

    References
    ----------
    Documentation page "Other attentions". The attention is from Sander, Ablin, Blondel, Peyré,
    *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022.

    """
    parameters, head = one_head(attention, "sinkhorn")
    a, _ = score_sizes(head, check_radius(radius))
    return upper(
        "sinkhorn",
        Quantity.GLOBAL,
        _OURS,
        log_product(head.log_V_norm, math.log1p(2 * a)),
        unmasked(attention, parameters),
    )


# ---- LipschitzNorm


def lipschitz_norm(queries: object, keys: object) -> Bound:
    """Bound the Lipschitz constant of LipschitzNorm attention with m queries and n keys by e^{√3} √(m/n) +
    2√6.

    The scores are ⟨q_i, k_j⟩ / max{uv, uw, vw} with u = ‖Q‖_F, v = max_j |k_j| and w = max_j |v_j|. The
    map is (Q, K, V) ↦ f.

    Parameters
    ----------
    queries
        Number m >= 1 of queries.
    keys
        Number n >= 1 of keys and of values.

    Returns
    -------
    Bound
        Upper bound on the Lipschitz constant of (Q, K, V) ↦ f in Frobenius norms.

    Raises
    ------
    ArgumentError
        If a number is not whole or below 1.

    References
    ----------
    Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers with Application to Graph
    Neural Networks*, ICML 2021. Proof: documentation page "Other attentions", section "LipschitzNorm".

    """
    m, n = _count("queries", queries), _count("keys", keys)
    return upper(
        "lipschitz_norm",
        Quantity.EVERYWHERE,
        "Dasoulas, Scaman, Virmaux, Lipschitz Normalization for Self-Attention Layers, ICML 2021",
        log_sum(math.sqrt(3) + 0.5 * (math.log(m) - math.log(n)), math.log(2 * math.sqrt(6))),
    )


def lipschitz_norm_upper_bound(queries: object, keys: object) -> Bound:
    """Bound the Lipschitz constant of LipschitzNorm attention, more sharply than :func:`lipschitz_norm`.

    The bound is √max{(κ+1)² + 9/2, κ² + 4 + (1+√½)²} with κ = √(m P̄(n, 1)). The attention is defined in
    :func:`lipschitz_norm`, P̄(n, 1) = 1/(1 + (n−1)e^{−2}), and κ <= e √(m/n). For one key the bound is √m,
    which is the Lipschitz constant.

    Parameters
    ----------
    queries, keys
        As for :func:`lipschitz_norm`.

    Returns
    -------
    Bound
        Upper bound on the Lipschitz constant of (Q, K, V) ↦ f in Frobenius norms, below
        :func:`lipschitz_norm`.

    Raises
    ------
    ArgumentError
        If a number is not whole or below 1.

    References
    ----------
    Documentation page "Other attentions".

    """
    m, n = _count("queries", queries), _count("keys", keys)
    log_kappa = 0.5 * (math.log(m) + log_largest_weight(n, 1.0))
    squares = max(
        log_sum(2 * log_sum(log_kappa, 0.0), math.log(4.5)),
        log_sum(2 * log_kappa, math.log(4 + (1 + math.sqrt(0.5)) ** 2)),
    )
    return upper(
        "lipschitz_norm_upper_bound",
        Quantity.EVERYWHERE,
        _OURS,
        log_kappa if n == 1 else 0.5 * squares,
    )


# ---- softmax


def softmax_upper_bound(inverse_temperature: object) -> Bound:
    """Bound the Lipschitz constant of x ↦ softmax(λx) by |λ|/2, in every norm ℓ_p, 1 <= p <= ∞.

    Parameters
    ----------
    inverse_temperature
        The factor λ; its absolute value is used.

    Returns
    -------
    Bound
        Upper bound on the Lipschitz constant on all of R^n, for every n. It is the exact constant for n >= 2:
        for n = 2 the derivative at x = 0 attains it, for n > 2 a limit of points.

    Raises
    ------
    ArgumentError
        If λ is not a finite number.

    References
    ----------
    Nair, *Softmax is 1/2-Lipschitz*, 2025. Proof: documentation page "Other attentions", section "Softmax".

    """
    size = abs(_number("inverse_temperature", inverse_temperature))
    return upper(
        "softmax_upper_bound",
        Quantity.EVERYWHERE,
        "Nair, Softmax is 1/2-Lipschitz, 2025",
        log_product(log(size), -math.log(2)),
    )


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ArgumentError(name, expected="a finite number", got=repr(value))
    return number


def _count(name: str, value: object) -> int:
    try:
        return check_length(value)
    except ArgumentError as error:
        raise ArgumentError(name, expected="a whole number >= 1", got=error.got) from None
