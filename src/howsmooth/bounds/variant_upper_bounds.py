"""Upper bounds for L2, scaled cosine, Sinkhorn, LipschitzNorm and sigmoid attention, and for the softmax.

The statements are about one attention without a mask, on the whole space, or on a ball for Sinkhorn
attention. The functions that end in ``_layer`` bound X ↦ W_O · concat_h(head h) + b_O with several heads and
a mask on the ball of radius R, where R = ∞ stands for the whole space. They are differentiable functions of
the parameters, because ``howsmooth.nn`` divides layers by their bounds during training. Where both have the
same expression, it stands once, for tensors and for :class:`~howsmooth.bounds.log_numbers.Log`. Proofs:
documentation pages "Other attentions", and "Enforce: layers with a constant that is proved", section "Other
attentions as layers".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from scipy.special import wrightomega
from torch import Tensor

from howsmooth.bounds.attention_parameters import as_matrix, norm
from howsmooth.bounds.ball_upper_bounds import largest_weight
from howsmooth.bounds.bound import Quantity, check_length
from howsmooth.bounds.bound_problem import Problem, for_every_length
from howsmooth.bounds.catalogue import OURS, statement
from howsmooth.bounds.differentiable_upper_bounds import reach
from howsmooth.bounds.log_numbers import Log, maximum, minimum
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError
from howsmooth.rounding import spectral_norms_above as norms

__all__ = [
    "l2_attention",
    "l2_attention_upper_bound",
    "l2_layer",
    "lipschitz_norm",
    "lipschitz_norm_layer",
    "lipschitz_norm_upper_bound",
    "scaled_cosine",
    "scaled_cosine_layer",
    "scaled_cosine_upper_bound",
    "sigmoid_layer",
    "sinkhorn",
    "sinkhorn_layer",
    "softmax_upper_bound",
]

_PAGE = f'{OURS}"Other attentions"'
_ROOT_HALF = math.sqrt(0.5)

N = TypeVar("N", Tensor, Log)


# ---- L2 attention


@dataclass(frozen=True, eq=False)
class L2:
    """Norms of the matrices of L2 attention, and the number Φ with Φ e^{Φ+1} = N − 1."""

    query: Float[Tensor, "heads key_dim d"]
    value: Float[Tensor, "heads value_dim d"]
    output: Log
    length: int

    @property
    def phi(self) -> Log:
        """Φ = W₀((N−1)/e) with the Lambert function W₀; N may have any size."""
        n = self.length
        return Log.of(0.0 if n == 1 else float(wrightomega(math.log(n - 1) - 1.0)))


def of_l2(query: object, value: object, output: object, length: object) -> L2:
    """Prepare a statement about L2 attention.

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
    return L2(q, v, Log(0.0) if w is None else norm(w), check_length(length))


@statement(
    of_l2,
    heads=None,
    quantity=Quantity.EVERYWHERE,
    source="Kim et al., The Lipschitz Constant of Self-Attention, ICML 2021, Theorem 3.2, corrected",
)
def l2_attention(p: L2) -> Log:
    """Bound Lip(f) of L2 attention by the corrected Theorem 3.2 of Kim, Papamakarios and Mnih (2021).

    The bound is √N/√k (4Φ+1) √(Σ_h ‖Q_h‖⁴‖V_h‖²) ‖W_O‖, where Φ e^{Φ+1} = N − 1. Head h has the weights
    P_ij ∝ exp(−|Q_h x_i − Q_h x_j|²/√k), with the same matrix for queries and keys, and the output V_h
    Q_hᵀQ_h Σ_j P_ij x_j / √k. The published formula has ‖Q_h‖² instead of ‖Q_h‖⁴ and is no bound: for one
    token, k = 2, V = I and Q = 10 I the Lipschitz constant is 70.7, the published formula 7.07. The
    correction is proved on the documentation page "Other attentions".
    """
    heads = [(norm(q) ** 2 * norm(v)) ** 2 for q, v in zip(p.query, p.value, strict=True)]
    factor = (Log.of(p.length) / p.query.shape[1]) ** 0.5 * p.output
    return factor * (4 * p.phi + 1) * Log.total(heads) ** 0.5


@statement(of_l2, heads=None, quantity=Quantity.EVERYWHERE, source=_PAGE)
def l2_attention_upper_bound(p: L2) -> Log:
    """Bound Lip(f) of L2 attention by a number that is never larger than the bound of :func:`l2_attention`.

    The bound is ‖W_O‖/√k √(Σ_h ‖Q_h‖²‖V_h Q_hᵀ‖²) (√N(1+2Φ) + 2Φ), where Φ e^{Φ+1} = N − 1. The attention is
    defined in :func:`l2_attention`.
    """
    heads = [(norm(q) * norm(v @ q.mT)) ** 2 for q, v in zip(p.query, p.value, strict=True)]
    core = _l2_everywhere(p.length * (1 + 2 * p.phi) ** 2, p.phi)
    return p.output * (Log.total(heads) / p.query.shape[1]) ** 0.5 * core


def _l2_everywhere(rows: N, phi: N) -> N:
    """Return L_h on the whole space, given max_j Σ_{i sees j} (1 + 2Φ_i)² and the largest Φ."""
    return rows**0.5 + 2 * phi


def l2_layer(
    query: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    rows: VisibleRows,
    radius: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of multi-head L2 attention on the ball of radius R.

    Query and key matrices Q_h are equal. Let a = ‖Q_h‖²R²/√k. For a row that sees m keys, including the key
    of its token, let Φ e^{Φ+1} = m − 1; for a row that does not see this key, Φ = ∞. With

    - var = min(a, Φ), dist = min(4a, Φ), p = 1/(1 + (m−1)e^{−4a}),
    - r = √p + 2 min{√(var·dist), √(4a·var·p), a√2},
    - L_h = √(max_j Σ_{i sees j} r_i²) + 2 max_i var_i and O_h = W_h V_h Q_hᵀ/√k,

    the bound is min{‖[L_h O_h]_h‖ ‖[Q_h]_h‖, ‖W_O‖ (Σ_h ‖V_h Q_hᵀ‖²‖Q_h‖²L_h²/k)^{1/2}}, a scalar float64
    tensor.
    """
    heads, key_dim, _ = query.shape
    q, v, w = query.double(), value.double(), output.double()
    folded = v @ q.mT / math.sqrt(key_dim)
    sizes = norms(q)
    cores = torch.stack([_l2_core(size, key_dim, rows, radius) for size in sizes])
    blocks = torch.stack([w_h @ f for w_h, f in zip(w.chunk(heads, dim=1), folded, strict=True)])
    beside = (cores[:, None, None] * blocks).movedim(0, 1).flatten(1)
    products = norms(folded) * sizes * cores
    largest = products.detach().amax().clamp(min=1e-300)  # squares of small products underflow
    apart = largest * torch.linalg.vector_norm(products / largest)
    return torch.minimum(norms(beside) * norms(q.flatten(0, 1)), norms(w) * apart)


def _l2_core(size: Tensor, key_dim: int, rows: VisibleRows, radius: float) -> Tensor:
    """Return L_h of :func:`l2_layer` for a head whose query matrix has the norm ``size``."""
    m, phi = rows.counts, rows.phi
    if phi is None:
        phi = torch.where(m > 1, torch.inf, 0.0)
    if not math.isfinite(radius):
        return _l2_everywhere(rows.heaviest((1 + 2 * phi).square()), phi.max())
    # √a, formed without a root because the root of a zero weight has no derivative
    root = key_dim**-0.25 * radius * size
    deviation, distance = torch.minimum(root, phi.sqrt()), torch.minimum(2 * root, phi.sqrt())
    largest = _weights(rows, 2 * root.square()).sqrt()
    by_spread, by_weight = deviation * distance, deviation * 2 * root * largest
    products = torch.stack((by_spread, by_weight, (math.sqrt(2) * root.square()).expand_as(m)))
    blocks = largest + 2 * products.amin(dim=0)
    return rows.heaviest(blocks.square()).sqrt() + 2 * deviation.square().max()


# ---- scaled cosine attention


@dataclass(frozen=True)
class Cosine:
    """‖W_Q‖, ‖W_K‖, ‖W_V‖, N, |τ| and |ν|/√ε of scaled cosine attention."""

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
    """Prepare a statement about scaled cosine attention.

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
    epsilon = _number("eps", eps)
    if epsilon <= 0:
        remedy = "With eps = 0 the normalisation is not Lipschitz at zero."
        raise ArgumentError("eps", expected="a number > 0", got=repr(eps), remedy=remedy)
    tau, factor = abs(_number("temperature", temperature)), abs(_number("gain", gain))
    return Cosine(norm(q), norm(k), norm(v), n, tau, Log.of(factor) / Log.of(epsilon) ** 0.5)


@statement(of_cosine, heads=None, quantity=Quantity.EVERYWHERE, source="Qi et al., LipsFormer, ICLR 2023")
def scaled_cosine(p: Cosine) -> Log:
    """Bound Lip(f) of scaled cosine attention by the theorem of Qi et al. (2023).

    The bound is νε^{-1/2} (2N(N−1)τ‖W_K‖ + 2(N−1)τ‖W_Q‖ + 2N‖W_V‖). The attention is f(X) = ν softmax(τ q kᵀ)
    v. Its queries, keys and values are the vectors u = W_Q x, W_K x and W_V x after the normalisation
    u/√(|u|² + ε). Proof: documentation page "Other attentions", section "Scaled cosine attention".
    """
    n, tau = Log.of(p.length), p.temperature
    others = Log.of(p.length - 1) * tau
    return p.factor * 2 * (n * others * p.key + others * p.query + n * p.value)


@statement(of_cosine, heads=None, quantity=Quantity.EVERYWHERE, source=_PAGE)
def scaled_cosine_upper_bound(p: Cosine) -> Log:
    """Bound Lip(f) of scaled cosine attention by a number that is never larger than the bound of
    :func:`scaled_cosine`.

    The bound is νε^{-1/2} (c‖W_V‖ + τ‖W_Q‖ + min(√(N/2), c) τ‖W_K‖). The attention is defined in
    :func:`scaled_cosine`. c = √(N P̄(N, τ)) <= min(√N, e^τ) with P̄(N, τ) = 1/(1 + (N−1)e^{−2τ}), so the
    bound stays below a limit as N grows. For one token it is νε^{-1/2}‖W_V‖.
    """
    squares = Log.of(p.length) * largest_weight(p.length, torch.tensor(p.temperature, dtype=torch.float64))
    if p.length == 1:  # a single token has weight 1 for all scores
        return p.factor * p.value
    spread, tau = minimum(Log.of(p.length) / 2, squares), p.temperature
    return p.factor * _cosine(squares, spread, p.value, tau * p.query, tau * p.key)


def _cosine(squares: N, spread: N, value: N, query: N, key: N) -> N:
    """Return the bound on scaled cosine attention for ε = ν = 1, given max_j Σ_{i sees j} p_i, the same sum
    of min(½, p_i), ‖W_V‖, and τ‖W_Q‖ and τ‖W_K‖ times the sizes of what they are multiplied with.
    """
    return squares**0.5 * value + query + spread**0.5 * key


def scaled_cosine_layer(
    query: Float[Tensor, "heads key_dim d"],
    key: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    rows: VisibleRows,
    radius: float,
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    temperature: float,
    gain: float,
    eps: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of multi-head scaled cosine attention on the ball of radius R.

    The bound is ‖W_O‖ |ν| ε^{-1/2} (c‖W_V‖ + |τ|ρ_k ρ_v‖W_Q‖ + c'|τ|ρ_q ρ_v‖W_K‖), where W_Q, W_K and W_V
    stack the matrices of all heads, ρ_q, ρ_k and ρ_v are the largest norms of a normalised query, key and
    value on the ball, c² = max_j Σ_{i sees j} p_i, and c'² = max_j Σ min(½, p_i) over the rows i that see j
    and other keys. p_i = 1/(1 + (m_i−1)e^{−2|τ|ρ_qρ_k}) bounds a weight in a row that sees m_i keys.
    """
    tau, parts = abs(temperature), (query, key, value)
    of_query, of_key, of_value = (norms(part.double().flatten(0, 1)) for part in parts)
    rho_q, rho_k, rho_v = (
        reach(norms(part.double()), bias, radius, eps).max() for part, bias in zip(parts, biases, strict=True)
    )
    largest, several = _weights(rows, tau * rho_q * rho_k), rows.counts > 1
    squares = rows.heaviest(largest)
    # Where every query sees one key only, the weights are 1 whatever the scores.
    total = squares.sqrt() * of_value
    if bool(several.any()):
        spread = rows.heaviest(torch.where(several, largest.clamp(max=0.5), 0.0))
        total = _cosine(
            squares, spread, of_value, tau * rho_v * rho_k * of_query, tau * rho_v * rho_q * of_key
        )
    return norms(output.double()) * (abs(gain) / math.sqrt(eps)) * total


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


def sinkhorn_layer(
    query: Float[Tensor, "heads key_dim d"],
    key: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    radius: float,
    *,
    scale: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of converged multi-head Sinkhorn attention on a ball. The bound holds for
    every length n.

    With O_h = W_h V_h, ν_h = ‖V_h‖ and matrices [·] stacked over the heads, the bound is c₁ + R²c₂, where

    - c₁ = min{‖W_O‖‖[V_h]‖, (Σ_{h,g} ‖O_hᵀO_g‖)^{1/2}},
    - c₂ = min{‖W_O‖(‖[ν_h A_h]‖ + ‖[ν_h A_hᵀ]‖), ‖[O_h]‖(‖[A_h]‖ + ‖[A_hᵀ]‖)}.

    For one head it is ‖O‖(1 + 2‖A‖R²). It does not depend on biases.
    """
    v, w = value.double(), output.double()
    a = scale * (key.double().mT @ query.double())
    blocks = w.unflatten(1, v.shape[:2]).transpose(0, 1) @ v
    scaled = norms(v)[:, None, None] * a
    whole = norms(w)
    grams = norms(blocks.mT[:, None] @ blocks[None])
    linear = torch.minimum(whole * norms(v.flatten(0, 1)), grams.sum().sqrt())
    apart = whole * (norms(scaled.flatten(0, 1)) + norms(scaled.mT.flatten(0, 1)))
    folded = norms(blocks.transpose(0, 1).flatten(1)) * (norms(a.flatten(0, 1)) + norms(a.mT.flatten(0, 1)))
    return linear + radius * radius * torch.minimum(apart, folded)


# ---- LipschitzNorm


def of_counts(queries: object, keys: object) -> tuple[int, int]:
    """Prepare a statement about LipschitzNorm attention.

    Parameters
    ----------
    queries
        Number m >= 1 of queries.
    keys
        Number n >= 1 of keys and of values.

    """
    return check_length(queries, name="queries"), check_length(keys, name="keys")


@statement(
    of_counts,
    heads=None,
    quantity=Quantity.EVERYWHERE,
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


@statement(of_counts, heads=None, quantity=Quantity.EVERYWHERE, source=_PAGE)
def lipschitz_norm_upper_bound(counts: tuple[int, int]) -> Log:
    """Bound the Lipschitz constant of LipschitzNorm attention, more sharply than :func:`lipschitz_norm`.

    The bound is √max{(κ+1)² + 9/2, κ² + 4 + (1+√½)²} with κ = √(m P̄(n, 1)). The attention is defined in
    :func:`lipschitz_norm`, P̄(n, 1) = 1/(1 + (n−1)e^{−2}), and κ <= e √(m/n). For one key the bound is √m,
    which is the Lipschitz constant.
    """
    m, n = counts
    kappa = (Log.of(m) * largest_weight(n, torch.ones((), dtype=torch.float64))) ** 0.5
    return kappa if n == 1 else _jointly(kappa)


def _jointly(kappa: Log) -> Log:
    """Return the Lipschitz constant of a head in (Q, K, V) jointly."""
    return maximum((kappa + 1) ** 2 + 4.5, kappa**2 + (4 + (1 + _ROOT_HALF) ** 2)) ** 0.5


def lipschitz_norm_layer(
    query: Float[Tensor, "width d"],
    key: Float[Tensor, "width d"],
    value: Float[Tensor, "v_width d"],
    output: Float[Tensor, "d_out v_width"],
    rows: VisibleRows,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of multi-head LipschitzNorm attention on the whole space.

    Each head divides its scores by its own normaliser. The bound is ‖W_O‖ min{L ‖[W_Q; W_K; W_V]‖,
    2‖W_Q‖ + (1+√½)‖W_K‖ + (κ+1)‖W_V‖}, where L² = max{(κ+1)² + 9/2, κ² + 4 + (1+√½)²} and κ² = max_j Σ_{i
    sees j} 1/(1 + (m_i−1)e^{−2}) for rows that see m_i keys. If every row sees one key, the bound is
    ‖W_O‖κ‖W_V‖.
    """
    q, k, v, w = (t.double() for t in (query, key, value, output))
    kappa = rows.heaviest(_weights(rows, torch.ones((), dtype=torch.float64))).sqrt()
    if not bool((rows.counts > 1).any()):
        return norms(w) * kappa * norms(v)
    apart = 2 * norms(q) + (1 + _ROOT_HALF) * norms(k) + (kappa + 1) * norms(v)
    return norms(w) * torch.minimum(_jointly(Log.of(kappa)).value * norms(torch.cat((q, k, v))), apart)


# ---- sigmoid attention


def sigmoid_layer(
    query: Float[Tensor, "heads key_dim d"],
    key: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    rows: VisibleRows,
    radius: float,
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float,
    shift: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of multi-head sigmoid attention on the ball of radius R.

    Head h has weights σ(s⟨q_i, k_j⟩ + b), with s = ``scale`` and b = ``shift``. Its scores lie in an interval
    I_h. Let σ_h and σ'_h be the largest values of σ and of its derivative on I_h, A_h = s K_hᵀQ_h, and a_h =
    R‖A_h‖ + s|Q_hᵀb_k|, c_h = R‖A_hᵀ‖ + s|K_hᵀb_q|. If a query sees at most m keys, and the mask as a matrix
    of zeros and ones has norm μ, the bound for one head is μσ_h‖O_h‖ + σ'_h(R‖O_h‖ + |W_h b_v|)(m a_h + μ
    c_h) with O_h = W_h V_h. For several heads it is the smaller of the sum of these, and of ‖W_O‖ times the
    same expression with matrices stacked over the heads. If numbers may be added to the scores, σ_h = 1 and
    σ'_h = 1/4.
    """
    q, k, v, w = (t.double() for t in (query, key, value, output))
    zero = q.new_zeros(q.shape[:2])
    b_q, b_k = (zero if b is None else b.double() for b in biases[:2])
    by_query = scale * torch.einsum("hkd,hk->hd", q, b_k)
    by_key = scale * torch.einsum("hkd,hk->hd", k, b_q)
    a = scale * (k.mT @ q)
    sizes = norms(a)
    by_query_sizes, by_key_sizes = (torch.linalg.vector_norm(t, dim=-1) for t in (by_query, by_key))
    if rows.free:
        largest, slope = torch.ones_like(sizes), torch.full_like(sizes, 0.25)
    else:
        half = radius * (radius * sizes + by_query_sizes + by_key_sizes)
        middle = shift + scale * (b_q * b_k).sum(dim=-1)
        largest = torch.sigmoid(middle + half)
        # The derivative of the sigmoid decreases with the distance from zero.
        nearest = torch.clamp(torch.zeros_like(middle), middle - half, middle + half)
        slope = torch.sigmoid(nearest) * torch.sigmoid(-nearest)
    m, mu = rows.most_keys, rows.norm
    blocks = w.unflatten(1, v.shape[:2]).transpose(0, 1)
    folded = blocks @ v
    apart = norms((largest[:, None, None] * v).flatten(0, 1)) * mu
    by_value = slope * reach(norms(v), biases[2], radius)
    for matrices, vectors, factor in ((a, by_query, m), (a.mT, by_key, mu)):
        stacked = radius * norms((by_value[:, None, None] * matrices).flatten(0, 1))
        # Biases begin at zero, where a spectral norm has no derivative; that of this norm is zero there.
        apart = apart + factor * (stacked + torch.linalg.vector_norm(by_value[:, None] * vectors))
    outputs = radius * norms(folded)
    if biases[2] is not None:
        outputs = outputs + torch.linalg.vector_norm(
            torch.einsum("hok,hk->ho", blocks, biases[2].double()), dim=-1
        )
    slopes = m * (radius * sizes + by_query_sizes) + mu * (radius * sizes + by_key_sizes)
    summed = (mu * largest * norms(folded) + slope * outputs * slopes).sum()
    return torch.minimum(norms(w) * apart, summed)


# ---- softmax


def of_softmax(inverse_temperature: object) -> float:
    """Prepare a statement about the softmax.

    Parameters
    ----------
    inverse_temperature
        The factor λ; its absolute value is used.

    """
    return abs(_number("inverse_temperature", inverse_temperature))


@statement(
    of_softmax, heads=None, quantity=Quantity.EVERYWHERE, source="Nair, Softmax is 1/2-Lipschitz, 2025"
)
def softmax_upper_bound(factor: float) -> Log:
    """Bound the Lipschitz constant of x ↦ softmax(λx) by |λ|/2, in every norm ℓ_p, 1 <= p <= ∞.

    It is the exact constant for n >= 2: for n = 2 the derivative at x = 0 attains it, for n > 2 a limit of
    points. Proof: documentation page "Other attentions", section "Softmax".
    """
    return Log.of(factor) / 2


# ---- the parts of several bounds


def _weights(rows: VisibleRows, a: Tensor) -> Tensor:
    """Return the largest weight of each row, whose scores lie in [−a, a]."""
    return torch.ones_like(rows.counts) if rows.free else largest_weight(rows.counts, a).value


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ArgumentError(name, expected="a finite number", got=repr(value))
    return number
