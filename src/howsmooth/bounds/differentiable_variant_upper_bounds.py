"""Differentiable upper bounds on a ball for L2, scaled cosine, Sinkhorn, LipschitzNorm and sigmoid attention.

A layer is X ↦ W_O · concat_h(head h) + b_O with several heads and a mask. For one head without a mask and for
R → ∞ the bounds are those of ``variant_upper_bounds``. They are differentiable functions of the parameters,
because ``howsmooth.nn`` divides layers by their bounds during training. Proofs: documentation page "Enforce:
layers with a constant that is proved", section "Other attentions as layers"; for sigmoid attention, page
"Other attentions".
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.rounding import spectral_norms_above as _norm

__all__ = [
    "l2_layer",
    "lipschitz_norm_layer",
    "scaled_cosine_layer",
    "sigmoid_layer",
    "sinkhorn_layer",
    "value_radius",
]


def l2_layer(
    query: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    rows: VisibleRows,
    radius: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of multi-head L2 attention on the ball of radius R.

    R = ∞ stands for the whole space. Query and key matrices Q_h are equal. Let a = ‖Q_h‖²R²/√k. For a row
    that sees m keys, including the key of its token, let Φ e^{Φ+1} = m − 1; for a row that does not see this
    key, Φ = ∞. With

    - var = min(a, Φ), dist = min(4a, Φ), p = 1/(1 + (m−1)e^{−4a}),
    - r = √p + 2 min{√(var·dist), √(4a·var·p), a√2},
    - L_h = √(max_j Σ_{i sees j} r_i²) + 2 max_i var_i and O_h = W_h V_h Q_hᵀ/√k,

    the bound is min{‖[L_h O_h]_h‖ ‖[Q_h]_h‖, ‖W_O‖ (Σ_h ‖V_h Q_hᵀ‖²‖Q_h‖²L_h²/k)^{1/2}}, a scalar float64
    tensor.
    """
    heads, key_dim, _ = query.shape
    q, v, w = query.double(), value.double(), output.double()
    folded = v @ q.mT / math.sqrt(key_dim)
    sizes = _norm(q)
    cores = torch.stack([_l2_core(size, key_dim, rows, radius) for size in sizes])
    blocks = torch.stack([w_h @ f for w_h, f in zip(w.chunk(heads, dim=1), folded, strict=True)])
    beside = (cores[:, None, None] * blocks).movedim(0, 1).flatten(1)
    products = _norm(folded) * sizes * cores
    largest = products.detach().amax().clamp(min=1e-300)  # squares of small products underflow
    apart = largest * torch.linalg.vector_norm(products / largest)
    return torch.minimum(_norm(beside) * _norm(q.flatten(0, 1)), _norm(w) * apart)


def _l2_core(size: Tensor, key_dim: int, rows: VisibleRows, radius: float) -> Tensor:
    """Return the factor of one head, called L_h, that enters the bound of :func:`l2_layer`.

    ``size`` is the norm ‖Q_h‖ of the head's query matrix.
    """
    m, phi = rows.counts, rows.phi
    if phi is None:
        phi = torch.where(m > 1, torch.inf, 0.0)
    if not math.isfinite(radius):
        return rows.heaviest((1 + 2 * phi).square()).sqrt() + 2 * phi.max()
    root = (
        key_dim**-0.25 * radius * size
    )  # √a, formed without a root because the root of a zero weight has no derivative
    deviation, distance = torch.minimum(root, phi.sqrt()), torch.minimum(2 * root, phi.sqrt())
    largest = torch.ones_like(m) if rows.free else 1 / (1 + (m - 1) * torch.exp(-4 * root.square()))
    products = torch.stack(
        (
            deviation * distance,
            deviation * 2 * root * largest.sqrt(),
            (math.sqrt(2) * root.square()).expand_as(m),
        )
    )
    blocks = largest.sqrt() + 2 * products.amin(dim=0)
    return rows.heaviest(blocks.square()).sqrt() + 2 * deviation.square().max()


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

    R = ∞ stands for the whole space. The bound is ‖W_O‖ |ν| ε^{-1/2} (c‖W_V‖ + |τ|ρ_k ρ_v‖W_Q‖ + c'|τ|ρ_q
    ρ_v‖W_K‖), where W_Q, W_K and W_V stack the matrices of all heads, ρ_q, ρ_k and ρ_v are the largest norms
    of a normalised query, key and value on the ball, c² = max_j Σ_{i sees j} p_i, and c'² = max_j Σ min(½,
    p_i) over the rows i that see j and other keys. p_i = 1/(1 + (m_i−1)e^{−2|τ|ρ_qρ_k}) bounds a weight in a
    row that sees m_i keys.
    """
    tau = abs(temperature)
    parts = (query.double(), key.double(), value.double())
    norms = [_norm(part.flatten(0, 1)) for part in parts]
    rho_q, rho_k, rho_v = (
        _cosine_radii(part, bias, radius, eps).max() for part, bias in zip(parts, biases, strict=True)
    )
    m = rows.counts
    largest = torch.ones_like(m) if rows.free else 1 / (1 + (m - 1) * torch.exp(-2 * tau * rho_q * rho_k))
    several = m > 1
    total = rows.heaviest(largest).sqrt() * norms[2]
    # Where every query sees one key only, the weights are 1 whatever the scores.
    if bool(several.any()):
        spread = rows.heaviest(torch.where(several, largest.clamp(max=0.5), 0.0)).sqrt()
        total = total + tau * rho_v * (rho_k * norms[0] + spread * rho_q * norms[1])
    return _norm(output.double()) * (abs(gain) / math.sqrt(eps)) * total


def _cosine_radii(
    weight: Float[Tensor, "heads dim d"], bias: Tensor | None, radius: float, eps: float
) -> Float[Tensor, "heads"]:
    """Return for each head the largest norm of the normalised queries, keys or values on the ball."""
    if not math.isfinite(radius):
        return torch.ones(len(weight), dtype=torch.float64, device=weight.device)
    sizes = value_radius(weight, bias, radius)
    return sizes / torch.sqrt(sizes.square() + eps)


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
    scaled = _norm(v)[:, None, None] * a
    whole = _norm(w)
    grams = _norm(blocks.mT[:, None] @ blocks[None])
    linear = torch.minimum(whole * _norm(v.flatten(0, 1)), grams.sum().sqrt())
    apart = whole * (_norm(scaled.flatten(0, 1)) + _norm(scaled.mT.flatten(0, 1)))
    folded = _norm(blocks.transpose(0, 1).flatten(1)) * (_norm(a.flatten(0, 1)) + _norm(a.mT.flatten(0, 1)))
    return linear + radius * radius * torch.minimum(apart, folded)


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
    m = rows.counts
    largest = torch.ones_like(m) if rows.free else 1 / (1 + (m - 1) * math.exp(-2.0))
    kappa = rows.heaviest(largest).sqrt()
    if not bool((m > 1).any()):
        return _norm(w) * kappa * _norm(v)
    by_key = 1 + math.sqrt(0.5)
    squares = torch.maximum((kappa + 1).square() + 4.5, kappa.square() + 4 + by_key**2)
    apart = 2 * _norm(q) + by_key * _norm(k) + (kappa + 1) * _norm(v)
    return _norm(w) * torch.minimum(squares.sqrt() * _norm(torch.cat((q, k, v))), apart)


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
    sizes = _norm(a)
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
    apart = _norm((largest[:, None, None] * v).flatten(0, 1)) * mu
    by_value = slope * value_radius(value, biases[2], radius)
    for matrices, vectors, factor in ((a, by_query, m), (a.mT, by_key, mu)):
        stacked = radius * _norm((by_value[:, None, None] * matrices).flatten(0, 1))
        # Biases begin at zero, where a spectral norm has no derivative; that of this norm is zero there.
        apart = apart + factor * (stacked + torch.linalg.vector_norm(by_value[:, None] * vectors))
    reach = radius * _norm(folded)
    if biases[2] is not None:
        reach = reach + torch.linalg.vector_norm(
            torch.einsum("hok,hk->ho", blocks, biases[2].double()), dim=-1
        )
    slopes = m * (radius * sizes + by_query_sizes) + mu * (radius * sizes + by_key_sizes)
    summed = (mu * largest * _norm(folded) + slope * reach * slopes).sum()
    return torch.minimum(_norm(w) * apart, summed)


def value_radius(
    value: Float[Tensor, "heads value_dim d"], bias: Tensor | None, radius: float
) -> Float[Tensor, "heads"]:
    """Return an upper bound on the norm of the values of each head, for tokens of norm at most R."""
    sizes = radius * _norm(value.double())
    return sizes if bias is None else sizes + torch.linalg.vector_norm(bias.double(), dim=-1)
