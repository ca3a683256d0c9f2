"""Differentiable upper bounds on the Lipschitz constant of masked multi-head softmax attention on a ball.

``softmax_layer`` is Theorem A for several heads, and ``query_key_norm_layer`` is for attention with
normalised queries and keys. They are differentiable functions of the parameters, because ``howsmooth.nn``
divides layers by their bounds during training. Proofs: documentation page "Enforce: layers with a constant
that is proved".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.ball_upper_bounds import h_star_maximiser
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.rounding import (
    Triangles,
    above,
    gamma,
    product_norms_above,
    up,
    with_gradient,
)
from howsmooth.rounding import spectral_norms_above as _norm

__all__ = ["any_boolean_mask", "query_key_norm_layer", "softmax_layer", "softmax_output_radius"]


def any_boolean_mask(length: int) -> VisibleRows:
    """Return counts of visible keys, as a :class:`VisibleRows`, with which the bounds of this module hold
    under every boolean mask.

    The masks may differ between heads. The bounds on a row are largest for rows that see one or two keys, so
    the result has only these two kinds of row.
    """
    counts = torch.tensor([1.0, 2.0] if length > 1 else [1.0], dtype=torch.float64)
    return VisibleRows(counts, torch.zeros_like(counts, dtype=torch.bool), False, None, length, "any")


def softmax_layer(
    query: Float[Tensor, "heads key_dim d"],
    key: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    rows: VisibleRows,
    radius: float,
    *,
    query_bias: Float[Tensor, "heads key_dim"] | None,
    scale: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant of multi-head softmax attention on a ball by a number that is
    differentiable in the projection matrices.

    Let a_h = ‖A_h‖R², let ρ_h,i be Theorem A's bound on row i of head h, m_i the number of keys that row i
    sees, O_h = W_h V_h, O = Σ_h O_h, and M(c)² = min{Σ_{h,g} ‖O_hᵀO_g‖ c_h c_g, ‖W_O‖² Σ_h ‖V_h‖²c_h²}. The
    bound, a scalar float64 tensor, is the smaller of

    - M(a_h + √(max_j Σ_{i sees j} ρ_h,i)) and
    - M(a_h) + √(max_j Σ_{i sees j} (‖O‖²/m_i + M(√(ρ_h,i − 1/m_i))²)).

    For one head both are Theorem A.
    """
    q, k = query.double(), key.double()
    a = scale * product_norms_above(k.mT, q) * radius * radius
    a3 = a
    if query_bias is not None:
        shift = torch.einsum("hkd,hk->hd", k, query_bias.double())
        a3 = a + scale * radius * _longest(shift)
    heads = _Heads.of(value.double(), output.double())
    m = rows.counts.to(a.device)
    several = _sees_several_keys(rows, m)
    rho = _h_star(a3)[:, None].expand(-1, len(m))  # (heads, rows)
    if not rows.free:
        by_largest = (1 + a3.square())[:, None] * _largest(m, a3)
        rho = torch.where(several, torch.minimum(rho, by_largest), 1.0)
    diagonal = a if bool(several.any()) else torch.zeros_like(a)
    bound = heads.together(diagonal + _heaviest_key(rows, rho).sqrt())
    if _same_keys(rows):
        bound = torch.minimum(bound, heads.together(diagonal) + heads.around_mean(rows, rho, m))
    return bound


def query_key_norm_layer(
    query: Float[Tensor, "heads key_dim d"],
    key: Float[Tensor, "heads key_dim d"],
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    rows: VisibleRows,
    radius: float,
    *,
    query_bias: Float[Tensor, "heads key_dim"] | None,
    key_bias: Float[Tensor, "heads key_dim"] | None,
    temperature: Tensor,
    eps: float,
) -> Float[Tensor, ""]:
    """Bound the Lipschitz constant on a ball of multi-head attention with normalised queries and keys.

    The scores are τ⟨q̂, k̂⟩ with û = u/√(|u|² + ε). Let ρ_q and ρ_k be the largest |q̂| and |k̂| of head h on
    the ball of radius R, p_i = 1/(1 + (m_i−1)e^{−2τρ_qρ_k}) for a row that sees m_i keys, and s_h = ε^{-1/2}
    τR (ρ_k‖Q_h‖ + ρ_q‖K_h‖ √(max_j Σ min(½, p_i))), with the sum over the rows i that see j and other keys.
    With M and O of :func:`softmax_layer`, the bound is the smaller of

    - M(s_h + √(max_j Σ_{i sees j} p_i)) and
    - M(s_h) + √(max_j Σ_{i sees j} (‖O‖²/m_i + M(√(p_i − 1/m_i))²)).
    """
    tau = temperature.double().abs()
    norm_q, reach_q = _normalised(query.double(), query_bias, radius, eps)
    norm_k, reach_k = _normalised(key.double(), key_bias, radius, eps)
    heads = _Heads.of(value.double(), output.double())
    m = rows.counts.to(norm_q.device)
    several = _sees_several_keys(rows, m)
    if rows.free:
        p = torch.ones(len(norm_q), len(m), dtype=torch.float64, device=norm_q.device)
    else:
        p = _largest(m, tau * reach_q * reach_k)
    moved = torch.zeros_like(norm_q)
    if bool(several.any()):
        spread = _heaviest_key(rows, torch.where(several, p.clamp(max=0.5), 0.0)).sqrt()
        moved = (tau * radius / math.sqrt(eps)) * (reach_k * norm_q + reach_q * norm_k * spread)
    bound = heads.together(moved + _heaviest_key(rows, p).sqrt())
    if _same_keys(rows):
        bound = torch.minimum(bound, heads.together(moved) + heads.around_mean(rows, p, m))
    return bound


def softmax_output_radius(
    value: Float[Tensor, "heads value_dim d"],
    output: Float[Tensor, "d_out width"],
    value_bias: Tensor | None,
    output_bias: Tensor | None,
    radius: float,
) -> float:
    """Return an upper bound on the norm of all output tokens if the input tokens have norm at most R."""
    heads = _Heads.of(value.double(), output.double())
    largest = radius * float(heads.together(torch.ones(len(value), dtype=torch.float64)))
    shift = torch.zeros(output.shape[0], dtype=torch.float64)
    if value_bias is not None:
        shift = shift + output.double() @ value_bias.double().flatten()
    if output_bias is not None:
        shift = shift + output_bias.double()
    return largest + float(_longest(shift))


# ---- several heads


@dataclass(frozen=True, eq=False)
class _Heads:
    """Norms of the output and value matrices of all heads, from which norms of sums over heads are bounded.

    W_h V_h is called O_h.

    Attributes
    ----------
    grams
        ‖O_hᵀ O_g‖, (heads, heads).
    whole
        ‖W_O‖.
    values
        ‖V_h‖, (heads,).
    total
        ‖Σ_h O_h‖.

    """

    grams: Tensor
    whole: Tensor
    values: Tensor
    total: Tensor

    @classmethod
    def of(cls, value: Tensor, output: Tensor) -> _Heads:
        count, dim, _ = value.shape
        maps = output.unflatten(1, (count, dim)).transpose(0, 1)
        return cls(
            _grams(maps, value),
            _norm(output),
            _norm(value),
            product_norms_above(output, value.flatten(0, 1)),
        )

    def squares(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return two upper bounds on ‖Σ_h W_h V_h F_h‖², a sum over the heads h. They hold for all matrices
        F_h with ‖F_h‖ <= c_h.

        W_h are the output maps and V_h the value matrices. The first bound uses norms ‖(W_h V_h)ᵀ W_g V_g‖,
        the second the norms of the matrices V_h and of the output projection.
        """
        by_grams = torch.einsum("h...,hg,g...->...", c, self.grams, c)
        by_output = self.whole.square() * torch.einsum("h,h...->...", self.values.square(), c.square())
        return by_grams, by_output

    def together(self, c: Tensor) -> Tensor:
        """Return an upper bound on ‖Σ_h W_h V_h F_h‖, a sum over the heads h. It holds for all matrices F_h
        with ‖F_h‖ <= c_h.

        W_h are the output maps and V_h the value matrices. The bound is M(c) of :func:`softmax_layer`.
        """
        by_grams, by_output = self.squares(c)
        return _root(torch.minimum(by_grams, by_output))

    def around_mean(self, rows: VisibleRows, rho: Tensor, m: Tensor) -> Tensor:
        """Bound the part of the Jacobian in which the queries are held fixed. Each block row is split into
        its mean over the visible keys and the deviations from the mean.

        The result is the last term of the second bound of :func:`softmax_layer`,
        √(max_j Σ_{i sees j} (‖O‖²/m_i + M(√(ρ_i − 1/m_i))²)).
        """
        rest = _root(rho - 1 / m)
        mean = self.total.square() / m
        return torch.minimum(*(rows.heaviest(mean + square) for square in self.squares(rest))).sqrt()


def _grams(maps: Tensor, value: Tensor) -> Tensor:
    """Return the norms ‖(W_h V_h)ᵀ W_g V_g‖ for all pairs h, g of heads, (heads, heads), rounded up.

    The gradient is taken with the singular vectors held fixed.
    """
    count = len(value)
    h, g = torch.triu_indices(count, count, device=value.device)
    with torch.no_grad():
        between = maps[h].mT @ maps[g]
        # What the rounding of W_hᵀ W_g adds to the norms.
        sizes = torch.linalg.matrix_norm(maps) * torch.linalg.matrix_norm(value)
        rounding = up(gamma(maps.shape[1]) * sizes[h] * sizes[g])
        triangles = Triangles.of(value.mT)
        proved, u, v = triangles.at(h).product_norms(triangles.at(g), between)
    left = maps[h] @ (value[h] @ u[..., None])
    right = maps[g] @ (value[g] @ v[..., None])
    norms = with_gradient(proved + rounding, (left * right).sum(dim=(-2, -1)))
    found = torch.zeros(count, count, dtype=norms.dtype, device=norms.device)
    upper = found.index_put((h, g), norms)
    return upper + upper.mT - torch.diag(upper.diagonal())


def _same_keys(rows: VisibleRows) -> bool:
    """Return whether the mask is known and the same for all heads.

    The second bound of :func:`softmax_layer` requires it.
    """
    return not rows.free and rows.kind != "any" and (rows.seen is None or rows.seen.ndim == 2)


# ---- one head


def _sees_several_keys(rows: VisibleRows, m: Tensor) -> Tensor:
    """Return for each row of a mask whether its query may see more than one key.

    Rows of one kind share one entry.
    """
    return torch.full_like(m, rows.length > 1, dtype=torch.bool) if rows.free else m > 1


def _largest(m: Tensor, a: Tensor) -> Tensor:
    """Return the largest attention weight that is possible if the m scores of a row lie in [−a, a]. The
    result has one entry for each head and row.

    It is 1/(1 + (m−1)e^{−2a}).
    """
    return 1 / (1 + (m - 1) * torch.exp(-2 * a)[:, None])


def _heaviest_key(rows: VisibleRows, weights: Tensor) -> Tensor:
    """Sum given weights of the queries over the queries that see a key, and return for each head the largest
    of these sums over all keys.

    For weights w_i of the queries it is max_j Σ_{i sees j} w_i.
    """
    return torch.stack([rows.heaviest(of_head) for of_head in weights])


def _h_star(a: Tensor) -> Tensor:
    """Return h*(a) for each head as a differentiable number. It is an upper bound on the squared norm of a
    block row of the Jacobian.

    It is the number of ``row_norm_maximum``. The gradient holds the maximiser fixed.
    """
    w = torch.tensor(
        [h_star_maximiser(min(float(x), 1e9)) for x in a.detach().nan_to_num(nan=math.inf)],
        dtype=a.dtype,
        device=a.device,
    )
    return 1 + 0.5 * (1 - w) * (1 + w) * (a - 1 + a * w) * (a + 1 - a * w)


def _normalised(
    weight: Tensor, bias: Tensor | None, radius: float, eps: float
) -> tuple[Float[Tensor, "heads"], Float[Tensor, "heads"]]:
    """Bound, for each head, the norm of a query or key matrix and the norms of the normalised queries or
    keys.

    The second result bounds the norm of a query (or key) of tokens in the ball, normalised with ``eps``.
    """
    norms = _norm(weight)
    reach = radius * norms
    if bias is not None:
        reach = reach + _longest(bias.double())
    return norms, reach / torch.sqrt(reach.square() + eps)


def _longest(vectors: Tensor) -> Tensor:
    """Return the norms of vectors (..., d), rounded up."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return above(found, 8 * vectors.shape[-1])


def _root(square: Tensor) -> Tensor:
    """Return the square root of each entry, or 0 with derivative 0 where the entry is at most zero."""
    positive = ~(square <= 0)  # also true for NaN, which an overflow leaves
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
