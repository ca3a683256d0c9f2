"""Upper bounds for L2, scaled cosine, Sinkhorn and LipschitzNorm attention, and for the softmax.

They are about one attention without a mask, on the whole space, or on a ball for Sinkhorn attention. Layers
with several heads, masks and a ball have the bounds of ``differentiable_upper_bounds``; where both have the
same expression, it stands here once, for tensors and for :class:`~howsmooth.bounds.log_numbers.Log`. Proofs:
documentation page "Other attentions".
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from scipy.special import wrightomega
from torch import Tensor

from howsmooth.bounds.attention_parameters import as_matrix, norm
from howsmooth.bounds.ball_upper_bounds import largest_weight
from howsmooth.bounds.bound import Quantity, check_length
from howsmooth.bounds.bound_problem import Problem, for_every_length
from howsmooth.bounds.catalogue import OURS, statement
from howsmooth.bounds.log_numbers import Log, maximum, minimum
from howsmooth.errors import check_number

__all__ = [
    "BY_KEY", "cosine_everywhere", "l2_attention", "l2_attention_upper_bound", "l2_everywhere",
    "lipschitz_norm", "lipschitz_norm_jointly", "lipschitz_norm_upper_bound", "scaled_cosine",
    "scaled_cosine_upper_bound", "sinkhorn", "softmax_upper_bound",
]  # fmt: skip

_PAGE = f'{OURS}"Other attentions"'
_everywhere = partial(statement, quantity=Quantity.EVERYWHERE, heads=None)

N = TypeVar("N", Tensor, Log)


# ---- L2 attention


class L2(NamedTuple):
    """The inputs of the bounds on L2 attention: Q_h and V_h, k, ‖W_O‖, N, and Φ with Φ e^{Φ+1} = N − 1."""

    heads: list[tuple[Tensor, Tensor]]
    k: int
    output: Log
    length: int
    phi: Log


def of_l2(query: object, value: object, output: object, length: object) -> L2:
    """Check the matrices of L2 attention, and return the inputs of its bounds.

    Parameters
    ----------
    query
        Q_h, (heads, k, d): a tensor, an array or nested lists, as all matrices.
    value
        V_h, (heads, value_dim, d).
    output
        W_O, (d_out, heads · value_dim), or None for the heads concatenated.
    length
        Number N >= 1 of tokens.

    """
    q = as_matrix("query", query, ("heads", "key_dim", "d"))
    v = as_matrix("value", value, (q.shape[0], "value_dim", q.shape[2]))
    w = None if output is None else as_matrix("output", output, ("d_out", v.shape[0] * v.shape[1]))
    n = check_length(length)
    # Φ = W₀((N−1)/e) with the Lambert function W₀; N may have any size.
    phi = Log.of(0.0 if n == 1 else float(wrightomega(math.log(n - 1) - 1.0)))
    return L2(list(zip(q, v, strict=True)), q.shape[1], Log(0.0) if w is None else norm(w), n, phi)


@_everywhere(
    of_l2, source="Kim et al., The Lipschitz Constant of Self-Attention, ICML 2021, Theorem 3.2, corrected"
)
def l2_attention(p: L2) -> Log:
    """Bound Lip(f) of L2 attention by the corrected Theorem 3.2 of Kim, Papamakarios and Mnih (2021).

    The bound is √N/√k (4Φ+1) √(Σ_h ‖Q_h‖⁴‖V_h‖²) ‖W_O‖, where Φ e^{Φ+1} = N − 1. Head h has the weights
    P_ij ∝ exp(−|Q_h x_i − Q_h x_j|²/√k), with the same matrix for queries and keys, and the output V_h
    Q_hᵀQ_h Σ_j P_ij x_j / √k. The published formula has ‖Q_h‖² instead of ‖Q_h‖⁴ and is no bound: for one
    token, k = 2, V = I and Q = 10 I the Lipschitz constant is 70.7, the published formula 7.07. The
    correction is proved on the documentation page "Other attentions".
    """
    heads = Log.total((norm(q) ** 2 * norm(v)) ** 2 for q, v in p.heads)
    return p.output * (Log.of(p.length) / p.k * heads) ** 0.5 * (4 * p.phi + 1)


@_everywhere(of_l2, source=_PAGE)
def l2_attention_upper_bound(p: L2) -> Log:
    """Bound Lip(f) of L2 attention by a number that is never larger than the bound of :func:`l2_attention`.

    The bound is ‖W_O‖/√k √(Σ_h ‖Q_h‖²‖V_h Q_hᵀ‖²) (√N(1+2Φ) + 2Φ), where Φ e^{Φ+1} = N − 1. The attention is
    defined in :func:`l2_attention`.
    """
    heads = Log.total((norm(q) * norm(v, q.mT)) ** 2 for q, v in p.heads)
    return p.output * (heads / p.k) ** 0.5 * l2_everywhere(p.length * (1 + 2 * p.phi) ** 2, p.phi)


def l2_everywhere(rows: N, phi: N) -> N:
    """Bound the Lipschitz constant of an L2 head with Q = V Qᵀ/√k = I. Each query i has a number Φ_i, which
    depends on how many keys it sees; ``rows`` is max_j Σ_{i sees j} (1 + 2Φ_i)², and ``phi`` is max_i Φ_i.
    """
    return rows**0.5 + 2 * phi


# ---- scaled cosine attention


class Cosine(NamedTuple):
    """The inputs of the bounds on scaled cosine attention: |τ|‖W_Q‖, |τ|‖W_K‖, ‖W_V‖, N, |τ| and |ν|/√ε."""

    query: Log
    key: Log
    value: Log
    length: int
    temperature: float
    factor: Log


def of_cosine(
    query: object,
    key: object,
    value: object,
    length: object,
    *,
    temperature: object,
    gain: object = 1.0,
    eps: object,
) -> Cosine:
    """Check the parameters of scaled cosine attention, and return the inputs of its bounds.

    Parameters
    ----------
    query
        W_Q, (k, d): a tensor, an array or nested lists, as all matrices.
    key
        W_K, of the same shape.
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

    """
    n = check_length(length)
    q = as_matrix("query", query, ("key_dim", "d"))
    k = as_matrix("key", key, tuple(q.shape))
    v = as_matrix("value", value, ("value_dim", q.shape[1]))
    remedy = "With eps = 0 the normalisation is not Lipschitz at zero."
    root = Log.of(check_number("eps", eps, remedy=remedy)) ** 0.5
    tau = abs(check_number("temperature", temperature, "a finite number", math.isfinite))
    return Cosine(
        tau * norm(q),
        tau * norm(k),
        norm(v),
        n,
        tau,
        abs(check_number("gain", gain, "a finite number", math.isfinite)) / root,
    )


@_everywhere(of_cosine, source="Qi et al., LipsFormer, ICLR 2023")
def scaled_cosine(p: Cosine) -> Log:
    """Bound Lip(f) of scaled cosine attention by the theorem of Qi et al. (2023).

    The bound is νε^{-1/2} (2N(N−1)τ‖W_K‖ + 2(N−1)τ‖W_Q‖ + 2N‖W_V‖). The attention is f(X) = ν softmax(τ q kᵀ)
    v. Its queries, keys and values are the vectors u = W_Q x, W_K x and W_V x after the normalisation
    u/√(|u|² + ε). Proof: documentation page "Other attentions", section "Scaled cosine attention".
    """
    n, others = Log.of(p.length), Log.of(p.length - 1)
    return p.factor * 2 * (n * others * p.key + others * p.query + n * p.value)


@_everywhere(of_cosine, source=_PAGE)
def scaled_cosine_upper_bound(p: Cosine) -> Log:
    """Bound Lip(f) of scaled cosine attention by a number that is never larger than the bound of
    :func:`scaled_cosine`.

    The bound is νε^{-1/2} (c‖W_V‖ + τ‖W_Q‖ + min(√(N/2), c) τ‖W_K‖). The attention is defined in
    :func:`scaled_cosine`. c = √(N P̄(N, τ)) <= min(√N, e^τ) with P̄(N, τ) = 1/(1 + (N−1)e^{−2τ}), so the
    bound stays below a limit as N grows. For one token it is νε^{-1/2}‖W_V‖.
    """
    if p.length == 1:  # a single token has weight 1 for all scores
        return p.factor * p.value
    squares = Log.of(p.length) * largest_weight(p.length, torch.tensor(p.temperature, dtype=torch.float64))
    spread = minimum(Log.of(p.length) / 2, squares)
    return p.factor * cosine_everywhere(squares, spread, p.value, p.query, p.key)


def cosine_everywhere(squares: N, spread: N, value: N, query: N, key: N) -> N:
    """Bound the Lipschitz constant of scaled cosine attention with ε = ν = 1.

    With the largest attention weight p_i of query i, ``squares`` is max_j Σ_{i sees j} p_i, and ``spread``
    the same sum of min(½, p_i). ``value`` is ‖W_V‖; ``query`` and ``key`` are τ‖W_Q‖ and τ‖W_K‖ times the
    sizes of their factors.
    """
    return squares**0.5 * value + query + spread**0.5 * key


# ---- Sinkhorn attention


@statement(for_every_length, quantity=Quantity.GLOBAL, source=_PAGE, masks="none", listed=lambda p: False)
def sinkhorn(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) of Sinkhorn attention at convergence, for every number n of tokens.

    The bound is ‖V‖ (1 + 2‖A‖R²). ``attention`` gives A and V. The attention matrix is the doubly stochastic
    matrix diag(α) e^S diag(β), the limit of Sinkhorn's iterations for the scores S (Sander, Ablin, Blondel,
    Peyré, *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022). The bound does not
    hold for few iterations. It does not depend on the query bias.
    """
    return p.V * (1 + 2 * p.a)


# ---- LipschitzNorm

BY_KEY = 1 + math.sqrt(0.5)
"""Bound on the Lipschitz constant of a head with LipschitzNorm in its keys alone."""


def of_counts(queries: object, keys: object) -> tuple[int, int]:
    """Check the numbers of queries and keys of LipschitzNorm attention, and return them.

    Parameters
    ----------
    queries
        Number m >= 1 of queries.
    keys
        Number n >= 1 of keys and of values.

    """
    return check_length(queries, name="queries"), check_length(keys, name="keys")


@_everywhere(
    of_counts,
    source="Dasoulas, Scaman, Virmaux, Lipschitz Normalization for Self-Attention Layers, ICML 2021",
)
def lipschitz_norm(counts: tuple[int, int]) -> Log:
    """Bound the Lipschitz constant of LipschitzNorm attention with m queries and n keys by e^{√3} √(m/n) +
    2√6.

    The scores are ⟨q_i, k_j⟩ / max{uv, uw, vw} with u = ‖Q‖_F, v = max_j |k_j| and w = max_j |v_j|. The
    map is (Q, K, V) ↦ f, with Frobenius norms. Proof: documentation page "Other attentions", section
    "LipschitzNorm".
    """
    m, n = counts
    return Log(math.sqrt(3)) * (Log.of(m) / n) ** 0.5 + 2 * math.sqrt(6)


@_everywhere(of_counts, source=_PAGE)
def lipschitz_norm_upper_bound(counts: tuple[int, int]) -> Log:
    """Bound the Lipschitz constant of LipschitzNorm attention, more sharply than :func:`lipschitz_norm`.

    The bound is √max{(κ+1)² + 9/2, κ² + 4 + (1+√½)²} with κ = √(m P̄(n, 1)). The attention is defined in
    :func:`lipschitz_norm`, P̄(n, 1) = 1/(1 + (n−1)e^{−2}), and κ <= e √(m/n). For one key the bound is √m,
    which is the Lipschitz constant.
    """
    m, n = counts
    kappa = (Log.of(m) * largest_weight(n, torch.ones((), dtype=torch.float64))) ** 0.5
    return kappa if n == 1 else lipschitz_norm_jointly(kappa)


def lipschitz_norm_jointly(kappa: Log) -> Log:
    """Bound the Lipschitz constant of LipschitzNorm attention as a map of Q, K and V together, given a bound
    κ on the norm ‖P‖ of the attention weights.
    """
    return maximum((kappa + 1) ** 2 + 4.5, kappa**2 + (4 + BY_KEY**2)) ** 0.5


# ---- softmax


def of_softmax(inverse_temperature: object) -> float:
    """Check the inverse temperature λ of a softmax, and return |λ|.

    Parameters
    ----------
    inverse_temperature
        The factor λ; its absolute value is used.

    """
    return abs(check_number("inverse_temperature", inverse_temperature, "a finite number", math.isfinite))


@_everywhere(of_softmax, source="Nair, Softmax is 1/2-Lipschitz, 2025")
def softmax_upper_bound(factor: float) -> Log:
    """Bound the Lipschitz constant of x ↦ softmax(λx) by |λ|/2, in every norm ℓ_p, 1 <= p <= ∞.

    It is the exact constant for n >= 2: for n = 2 the derivative at x = 0 attains it, for n > 2 a limit of
    points. Proof: documentation page "Other attentions", section "Softmax".
    """
    return Log.of(factor) / 2
