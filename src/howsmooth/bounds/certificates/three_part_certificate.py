"""Upper bounds on ‖D_X f‖ that split the Jacobian into three parts and bound each of them (Theorem N of the
documentation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.certificates.attention_with_error_bounds import HeadsAt
from howsmooth.bounds.certificates.certificate_weight_search import Weights, joint_weights
from howsmooth.bounds.certificates.weighted_gram_matrices import (
    diagonal_norms,
    key_sums,
    sandwich,
    value_sums,
)
from howsmooth.rounding import Enclosed, U, gamma, nonnegative_norm, shrink, spectral_norms, up

__all__ = ["by_parts"]


def by_parts(at: HeadsAt, iterations: int) -> Enclosed:
    """Return an upper bound on the norm of the Jacobian of attention, the sum of the bounds on its three
    parts.

    The bound is t₁ + ν + max_i ‖Σ_h W_h V_h C_i^h A_h‖, where ν² = max_j q_j⁻¹ λ_max(Σ_h Σ_i P_ij c_i y_i
    y_iᵀ) with c_i = λ_max(Σ_h W_h V_h Σ_j P_ij q_j z_ij z_ijᵀ V_hᵀ W_hᵀ) and weights q > 0, and t₁ =
    min{‖W‖ ‖stack_h(‖P^h‖ V_h)‖, ‖[W_1V_1 … W_HV_H]‖ √λ_max(Σ_h P^hᵀP^h)}. Every q gives a valid bound; a
    search of at most so many steps chooses q, and ends earlier when it hardly gains. With rotary positions,
    norms of queries and keys, a soft cap, a score bias or sinks, y_i and C_i are those of the documentation
    page. The Jacobian is taken with the attention weights, values and queries as rounded to float64.
    """
    weights = joint_weights(at, iterations)
    parts = (averages(at), moving_keys_norm(at, weights), diagonal_norms(at))
    upper = sum(part.upper for part in parts)
    plain = sum(part.plain for part in parts)
    assert isinstance(upper, Tensor)
    assert isinstance(plain, Tensor)
    return Enclosed(upper * (1 + 4 * U), plain)


def averages(at: HeadsAt) -> Enclosed:
    """Bound the part of the Jacobian that remains if the attention weights are held fixed.

    The part is Σ_h P^h ⊗ W_h V_h with the attention weights P^h.
    """
    p = [nonnegative_norm(head.P) for head in at.heads]
    W = at.outer.split([w.shape[1] for w in at.W], dim=1)
    V_squares = [(head.V @ head.V.mT)[None] for head in at.heads]
    slack = [up(gamma(head.V.shape[1] + 2) * head.V.square().sum())[None] for head in at.heads]
    folded = sandwich(W, V_squares, slack).root()  # a single matrix, so its eigenvalue is cheap
    if len(at.heads) == 1:
        return Enclosed(folded.upper[0] * p[0].upper * (1 + 4 * U), folded.plain[0] * p[0].plain)
    stacked_p = spectral_norms(torch.cat([head.P for head in at.heads])[None])
    uppers = torch.cat([head.V * part.upper for head, part in zip(at.heads, p, strict=True)])
    stacked_v, whole = spectral_norms(uppers[None]), spectral_norms(torch.cat(at.W, dim=1)[None])
    first = Enclosed(
        whole.upper[0] * (stacked_v.upper[0] + up(gamma(2) * uppers.norm())) * (1 + 4 * U),
        whole.plain[0] * stacked_v.plain[0],
    )
    second = Enclosed(
        folded.upper[0] * stacked_p.upper[0] * (1 + 4 * U), folded.plain[0] * stacked_p.plain[0]
    )
    return first if first.upper <= second.upper else second


def moving_keys_norm(at: HeadsAt, weights: Weights) -> Enclosed:
    """Bound the part of the Jacobian that comes from the derivative of the scores with respect to the keys.

    The bound is ν of Theorem N, see :func:`by_parts`.
    """
    q = weights.q
    W = at.outer.split([w.shape[1] for w in at.W], dim=1)
    blocks = [value_sums(head, q) for head in at.heads]
    relative = up(torch.tensor(gamma(at.n + 8), dtype=torch.float64))
    traces = [relative * b.diagonal(dim1=-2, dim2=-1).sum(-1) for b in blocks]
    c = sandwich(W, blocks, traces, weights.c, lambda: at.domination)
    K = shrink(torch.cat([head.K for head in at.heads]).mT).split(
        [head.K.shape[0] for head in at.heads], dim=1
    )
    sums = [key_sums(head, c.upper) for head in at.heads]
    slack = [
        (relative + gamma(2 * b.shape[-1] + 16)) * head.turn_norm**2 * b.diagonal(dim1=-2, dim2=-1).sum(-1)
        for head, b in zip(at.heads, sums, strict=True)
    ]
    blocks = [head.key_blocks(b) for head, b in zip(at.heads, sums, strict=True)]
    phi = sandwich(K, blocks, slack, weights.nu_square * q)
    ratio = Enclosed(phi.upper / q * (1 + 4 * U), phi.plain / q)
    return Enclosed(ratio.upper.amax(), ratio.plain.amax()).root()
