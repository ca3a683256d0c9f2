"""Lipschitz constants of other attentions: L2, scaled cosine, Sinkhorn, LipschitzNorm; and of softmax.

All but Sinkhorn's hold on the whole space. Proofs: docs/theory/other-attentions.md.
"""

from __future__ import annotations

import math

from scipy.special import wrightomega
from torch import Tensor

from howsmooth.attention.map import as_parameter
from howsmooth.bounds.bound import Bound, Quantity, check_length, check_radius
from howsmooth.bounds.parameters import log_p_bar, spectral_norm
from howsmooth.bounds.unmasked import (
    log,
    log_product,
    log_sum,
    one_head,
    score_sizes,
    unmasked,
    upper,
)
from howsmooth.errors import ArgumentError

__all__ = [
    "l2_attention",
    "l2_attention_sharp",
    "lipschitz_norm",
    "lipschitz_norm_sharp",
    "scaled_cosine",
    "scaled_cosine_sharp",
    "sinkhorn",
    "softmax_temperature",
]

_OURS = "docs/theory/other-attentions.md"


# ---- L2 attention


def l2_attention(query: object, value: object, output: object, length: object) -> Bound:
    """Bound L2 attention by √N/√k (4Φ+1) √(Σ_h ‖Q_h‖⁴‖V_h‖²) ‖W_O‖, Φ e^{Φ+1} = N − 1.

    Head h has P_ij ∝ exp(−|Q_h x_i − Q_h x_j|²/√k) and gives V_h Q_hᵀQ_h Σ_j P_ij x_j / √k (query and key are
    tied). The usual printed form has ‖Q_h‖² in the place of ‖Q_h‖⁴ and is false: for one token, k = 2,
    V = I and Q = 10 I the constant is 70.7, the printed form gives 7.07.

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
        Upper, of Lip(f) on all of R^{N×d}.

    Raises
    ------
    ArgumentError
        If shapes do not fit or the length is no whole number >= 1.
    NonFiniteError
        If an entry is NaN or infinite.

    References
    ----------
    Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021, Theorem 3.2, corrected
    in docs/theory/other-attentions.md.

    """
    q, v, log_output = _l2_parameters(query, value, output)
    n = check_length(length)
    phi = _phi(n)
    heads = [4 * log(spectral_norm(q_h)) + 2 * log(spectral_norm(v_h)) for q_h, v_h in zip(q, v, strict=True)]
    return upper(
        "l2_attention",
        Quantity.EVERYWHERE,
        "Kim et al., The Lipschitz Constant of Self-Attention, ICML 2021, Theorem 3.2, corrected",
        log_product(
            0.5 * (math.log(n) - math.log(q.shape[1])), math.log1p(4 * phi), 0.5 * log_sum(*heads), log_output
        ),
    )


def l2_attention_sharp(query: object, value: object, output: object, length: object) -> Bound:
    """Bound L2 attention by ‖W_O‖/√k √(Σ_h ‖Q_h‖²‖V_h Q_hᵀ‖²) (√N(1+2Φ) + 2Φ), Φ e^{Φ+1} = N − 1.

    Parameters
    ----------
    query, value, output, length
        As for :func:`l2_attention`.

    Returns
    -------
    Bound
        Upper, of Lip(f) on all of R^{N×d}; never above :func:`l2_attention`.

    Raises
    ------
    ArgumentError, NonFiniteError
        As for :func:`l2_attention`.

    References
    ----------
    This library: docs/theory/other-attentions.md.

    """
    q, v, log_output = _l2_parameters(query, value, output)
    n = check_length(length)
    phi = _phi(n)
    heads = [
        2 * (log(spectral_norm(q_h)) + log(spectral_norm(v_h @ q_h.mT)))
        for q_h, v_h in zip(q, v, strict=True)
    ]
    core = log_sum(0.5 * math.log(n) + math.log1p(2 * phi), log(2 * phi))
    return upper(
        "l2_attention_sharp",
        Quantity.EVERYWHERE,
        f"howsmooth, {_OURS}",
        log_product(log_output, -0.5 * math.log(q.shape[1]), 0.5 * log_sum(*heads), core),
    )


def _l2_parameters(query: object, value: object, output: object) -> tuple[Tensor, Tensor, float]:
    """Return Q and V in float64 and log ‖W_O‖, after checking them."""
    q = as_parameter("query", query, ("heads", "key_dim", "d"))
    v = as_parameter("value", value, (q.shape[0], "value_dim", q.shape[2]))
    if output is None:
        return q.double(), v.double(), 0.0
    w = as_parameter("output", output, ("d_out", v.shape[0] * v.shape[1]))
    return q.double(), v.double(), log(spectral_norm(w))


def _phi(n: int) -> float:
    """Return the Φ with Φ e^{Φ+1} = n − 1, which is W₀((n−1)/e), for n of any size."""
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
    """Bound scaled cosine attention by νε^{-1/2} (2N(N−1)τ‖W_K‖ + 2(N−1)τ‖W_Q‖ + 2N‖W_V‖).

    Queries, keys and values are normalised rows u/√(|u|² + ε) of W_Q x, W_K x, W_V x; the map is
    ν softmax(τ q kᵀ) v.

    Parameters
    ----------
    query, key
        W_Q and W_K, (k, d).
    value
        W_V, (value_dim, d).
    length
        Number N >= 1 of tokens.
    temperature
        τ, the factor of the cosines in the scores.
    gain
        ν, the factor of the output.
    eps
        ε > 0 under the roots.

    Returns
    -------
    Bound
        Upper, of Lip(f) on all of R^{N×d}.

    Raises
    ------
    ArgumentError
        If shapes do not fit, or a number is not finite or out of range.
    NonFiniteError
        If an entry is NaN or infinite.

    References
    ----------
    Qi, Wang, Chen, Shi, Zhang, *LipsFormer: Introducing Lipschitz Continuity to Vision Transformers*, ICLR
    2023; proof: docs/theory/other-attentions.md.

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


def scaled_cosine_sharp(
    query: object,
    key: object,
    value: object,
    length: object,
    *,
    temperature: object,
    gain: object = 1.0,
    eps: object,
) -> Bound:
    """Bound scaled cosine attention by νε^{-1/2} (c‖W_V‖ + τ‖W_Q‖ + min(√(N/2), c) τ‖W_K‖).

    c = √(N P̄(N, τ)) <= min(√N, e^τ), so it is free of N once N exceeds e^{2τ}. For one token it is
    νε^{-1/2}‖W_V‖.

    Parameters
    ----------
    query, key, value, length, temperature, gain, eps
        As for :func:`scaled_cosine`.

    Returns
    -------
    Bound
        Upper, of Lip(f) on all of R^{N×d}; never above :func:`scaled_cosine`.

    Raises
    ------
    ArgumentError, NonFiniteError
        As for :func:`scaled_cosine`.

    References
    ----------
    This library: docs/theory/other-attentions.md.

    """
    n = check_length(length)
    log_q, log_k, log_v, tau, log_factor = _cosine(query, key, value, temperature, gain, eps)
    log_c = 0.5 * (math.log(n) + log_p_bar(n, tau))
    terms = [log_product(log_c, log_v)]
    if n > 1:  # one token has weight 1, whatever the score
        log_rows = min(0.5 * (math.log(n) - math.log(2)), log_c)
        terms += [log_product(log(tau), log_q), log_product(log_rows, log(tau), log_k)]
    return upper(
        "scaled_cosine_sharp",
        Quantity.EVERYWHERE,
        f"howsmooth, {_OURS}",
        log_product(log_factor, log_sum(*terms)),
    )


def _cosine(
    query: object, key: object, value: object, temperature: object, gain: object, eps: object
) -> tuple[float, float, float, float, float]:
    """Return the logarithms of ‖W_Q‖, ‖W_K‖ and ‖W_V‖, then τ and log ν/√ε, after checking them."""
    q = as_parameter("query", query, ("key_dim", "d"))
    k = as_parameter("key", key, tuple(q.shape))
    v = as_parameter("value", value, ("value_dim", q.shape[1]))
    epsilon = _number("eps", eps)
    if epsilon <= 0:
        raise ArgumentError(
            "eps",
            expected="a number > 0",
            got=repr(eps),
            remedy="Without it the normalisation of a vector is not Lipschitz at zero.",
        )
    return (
        log(spectral_norm(q)),
        log(spectral_norm(k)),
        log(spectral_norm(v)),
        abs(_number("temperature", temperature)),
        log_product(log(abs(_number("gain", gain))), -0.5 * math.log(epsilon)),
    )


# ---- Sinkhorn attention


def sinkhorn(attention: object, radius: object) -> Bound:
    """Bound converged Sinkhorn attention on the ball by ‖V‖ (1 + 2‖A‖R²), whatever n and the query bias.

    Its P is the doubly stochastic matrix diag(α) e^S diag(β), the limit of Sinkhorn's iterations on the
    scores S. It is not valid for a few iterations.

    Parameters
    ----------
    attention
        One head, whose A and V are used: a :class:`~howsmooth.bounds.Head`, an unmasked
        :class:`~howsmooth.attention.SelfAttention` or a captured site.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper, of Lip(f on B_R^n) of the attention with the doubly stochastic P, for every n. Needs: no mask.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or the radius does not fit.

    References
    ----------
    This library: docs/theory/other-attentions.md. The attention is that of Sander, Ablin, Blondel, Peyré,
    *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022.

    """
    parameters, head = one_head(attention, "sinkhorn")
    a, _ = score_sizes(head, check_radius(radius))
    return upper(
        "sinkhorn",
        Quantity.GLOBAL,
        f"howsmooth, {_OURS}",
        log_product(log(head.V_norm), math.log1p(2 * a)),
        unmasked(attention, parameters),
    )


# ---- LipschitzNorm


def lipschitz_norm(queries: object, keys: object) -> Bound:
    """Bound attention with LipschitzNorm, jointly in Q, K and V, by e^{√3} √(m/n) + 2√6.

    Its scores are ⟨q_i, k_j⟩ / max{uv, uw, vw}, with u = ‖Q‖_F, v = max_j |k_j| and w = max_j |v_j|.

    Parameters
    ----------
    queries
        Their number m >= 1.
    keys
        Their number n >= 1, which is that of the values.

    Returns
    -------
    Bound
        Upper, of the Lipschitz constant of (Q, K, V) ↦ f in Frobenius norms.

    Raises
    ------
    ArgumentError
        If a number is not whole or below 1.

    References
    ----------
    Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers with Application to Graph
    Neural Networks*, ICML 2021; proof: docs/theory/other-attentions.md.

    """
    m, n = _count("queries", queries), _count("keys", keys)
    return upper(
        "lipschitz_norm",
        Quantity.EVERYWHERE,
        "Dasoulas, Scaman, Virmaux, Lipschitz Normalization for Self-Attention Layers, ICML 2021",
        log_sum(math.sqrt(3) + 0.5 * (math.log(m) - math.log(n)), math.log(2 * math.sqrt(6))),
    )


def lipschitz_norm_sharp(queries: object, keys: object) -> Bound:
    """Bound attention with LipschitzNorm by √max{(κ+1)² + 9/2, κ² + 4 + (1+√½)²}, κ = √(m P̄(n, 1)).

    κ <= e √(m/n). For one key it is √m, the constant itself.

    Parameters
    ----------
    queries, keys
        As for :func:`lipschitz_norm`.

    Returns
    -------
    Bound
        Upper, of the Lipschitz constant of (Q, K, V) ↦ f in Frobenius norms; below :func:`lipschitz_norm`.

    Raises
    ------
    ArgumentError
        If a number is not whole or below 1.

    References
    ----------
    This library: docs/theory/other-attentions.md.

    """
    m, n = _count("queries", queries), _count("keys", keys)
    log_kappa = 0.5 * (math.log(m) + log_p_bar(n, 1.0))
    squares = max(
        log_sum(2 * log_sum(log_kappa, 0.0), math.log(4.5)),
        log_sum(2 * log_kappa, math.log(4 + (1 + math.sqrt(0.5)) ** 2)),
    )
    return upper(
        "lipschitz_norm_sharp",
        Quantity.EVERYWHERE,
        f"howsmooth, {_OURS}",
        log_kappa if n == 1 else 0.5 * squares,
    )


# ---- softmax


def softmax_temperature(inverse_temperature: object) -> Bound:
    """Bound x ↦ softmax(λx) by λ/2, in every norm ℓ_p, 1 <= p <= ∞.

    Parameters
    ----------
    inverse_temperature
        λ; of a negative one the absolute value counts.

    Returns
    -------
    Bound
        Upper, of its Lipschitz constant on all of R^n, for every n. Attained for n >= 2 in the limit, for
        n = 2 at x = 0.

    Raises
    ------
    ArgumentError
        If λ is not a finite number.

    References
    ----------
    Nair, *Softmax is 1/2-Lipschitz*, 2025; proof: docs/theory/other-attentions.md.

    """
    size = abs(_number("inverse_temperature", inverse_temperature))
    return upper(
        "softmax_temperature",
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
