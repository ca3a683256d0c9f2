"""Differentiable upper bounds on the Lipschitz constants of attention layers with several heads and a mask.

Each function bounds X ↦ W_O · concat_h(head h) + b_O on the ball of radius R, where R = ∞ stands for the
whole space, by a float64 scalar. It is differentiable in the parameters, because ``howsmooth.nn`` divides
layers by their bounds during training. It may be too small by the roundings of a formula in numbers >= 0; the
roundings of products of matrices, which may cancel, are covered. The theorems of the documentation have the
names of the functions: pages "Enforce: layers with a constant that is proved", and "Other attentions" for
sigmoid attention. With R = ∞, one head and no mask they are the statements of ``variant_upper_bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.ball_upper_bounds import h_star, largest_weight, row_square
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.multi_head_bounds import gram_norms
from howsmooth.bounds.variant_upper_bounds import (
    BY_KEY,
    cosine_everywhere,
    l2_everywhere,
    lipschitz_norm_jointly,
)
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.rounding import LEAST_DIVISOR, gamma, product_norms_above, up
from howsmooth.rounding import spectral_norms_above as norms

__all__ = [
    "HeadMatrices", "Products", "l2_layer", "lipschitz_norm_layer", "query_key_norm_layer", "root",
    "scaled_cosine_layer", "sigmoid_layer", "sinkhorn_layer", "softmax_layer",
]  # fmt: skip

Map = TypeVar("Map")


class Products(NamedTuple):
    """Computed products of matrices, (*batch, m, r), with bounds on the Frobenius norms of their errors."""

    value: Tensor
    error: Tensor

    @classmethod
    def of(cls, left: Tensor, right: Tensor | Products, scale: float = 1.0) -> Products:
        """Return scale · left @ right. The right factor may itself be a product with an error."""
        right, error = right if isinstance(right, Products) else (right, 0.0)
        with torch.no_grad():
            size = torch.linalg.matrix_norm(left)
            error = size * (gamma(left.shape[-1] + 2) * torch.linalg.matrix_norm(right) + error)
        return cls(scale * (left @ right), scale * up(error))

    @property
    def mT(self) -> Products:
        """The transposed products."""
        return Products(self.value.mT, self.error)

    @property
    def norms(self) -> Tensor:
        """The spectral norms of the products, rounded up."""
        found: Tensor = norms(self.value) + self.error
        return found

    @property
    def lengths(self) -> Tensor:
        """The norms of products that are column vectors, (*batch, m, 1), rounded up.

        The derivative is zero where they are zero, as biases are in the beginning.
        """
        found: Tensor = torch.linalg.matrix_norm(self.value) + self.error
        return found

    def stacked(self, factors: Tensor) -> Tensor:
        """Multiply each product by its factor, and bound the spectral norm of the stack of all results."""
        whole = norms((factors[:, None, None] * self.value).flatten(0, 1))
        found: Tensor = whole + torch.linalg.vector_norm(factors.detach() * self.error)
        return found


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """The matrices and biases of an attention layer with H heads. Bounds need them in float64 on the CPU.

    Queries and keys are (H, k, d), values (H, value_dim, d), the output is (d_out, H · value_dim). The biases
    are (H, k) or (H, value_dim), that of the output is (d_out,), and each may be None. O_h is W_h V_h.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None

    def as_map(self, kind: Callable[..., Map], **keywords: Any) -> Map:
        """Return the attention of class ``kind`` that has these matrices and biases."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(self)}, **keywords)

    @property
    def blocks(self) -> Float[Tensor, "heads d_out value_dim"]:
        """The output maps W_h of all heads."""
        blocks: Tensor = self.output.unflatten(1, self.value.shape[:2])
        return blocks.transpose(0, 1)

    @cached_property
    def sizes(self) -> dict[str, Float[Tensor, " heads"]]:
        """The spectral norms of the query, key and value matrices of each head."""
        return {name: norms(getattr(self, name)) for name in ("query", "key", "value")}

    @cached_property
    def whole(self) -> Float[Tensor, ""]:
        """The spectral norm ‖W_O‖ of the output projection."""
        return norms(self.output)

    def longest(self, part: str, radius: float, eps: float | None = None) -> Float[Tensor, " heads"]:
        """Bound the norms of the queries, keys or values of each head for tokens of norm at most R. With
        ``eps`` they are normalised to u/√(|u|² + ε).
        """
        sizes, bias = self.sizes[part], getattr(self, f"{part}_bias")
        if eps is not None and not math.isfinite(radius):
            return torch.ones_like(sizes)
        found = radius * sizes
        if bias is not None:
            found = found + torch.linalg.vector_norm(bias, dim=-1)
        return found if eps is None else found / torch.sqrt(found.square() + eps)

    @cached_property
    def grams(self) -> Float[Tensor, "heads heads"]:
        """The norms ‖O_hᵀ O_g‖ for all pairs of heads, where O_h = W_h V_h, rounded up."""
        return gram_norms(self.blocks, self.value)

    def squares(self, c: Float[Tensor, "heads *more"]) -> tuple[Tensor, Tensor]:
        """Return two upper bounds on ‖Σ_h O_h F_h‖² for all matrices F_h with ‖F_h‖ <= c_h. The first uses
        the norms ‖O_hᵀ O_g‖, the second the norms of W_O and of the value matrices.
        """
        by_grams = torch.einsum("h...,hg,g...->...", c, self.grams, c)
        by_values = torch.einsum("h,h...->...", self.sizes["value"].square(), c.square())
        return by_grams, self.whole.square() * by_values

    def together(self, c: Float[Tensor, "heads *more"]) -> Tensor:
        """Return M(c), an upper bound on ‖Σ_h O_h F_h‖ for all matrices F_h with ‖F_h‖ <= c_h: the root of
        the smaller of the two :meth:`squares`.
        """
        return root(torch.minimum(*self.squares(c)))


# ---- softmax attention


def softmax_layer(layer: HeadMatrices, rows: VisibleRows, radius: float, *, scale: float) -> Tensor:
    """Bound the Lipschitz constant of multi-head softmax attention on a ball, by Theorem A for each head."""
    a = a3 = scale * product_norms_above(layer.key.mT, layer.query) * radius * radius
    if layer.query_bias is not None:
        a3 = a + radius * Products.of(layer.key.mT, layer.query_bias[..., None], scale).lengths
    each = h_star(a3[:, None]) if rows.free else row_square(rows.counts, a3[:, None])
    return _of_rows(layer, rows, a, each.value.expand(-1, len(rows.counts)))


def query_key_norm_layer(
    layer: HeadMatrices, rows: VisibleRows, radius: float, *, temperature: Tensor, eps: float
) -> Tensor:
    """Bound the Lipschitz constant of multi-head attention with the scores τ⟨q̂, k̂⟩ of normalised queries
    and keys, where û = u/√(|u|² + ε).
    """
    tau, size_q, size_k = temperature.abs(), layer.sizes["query"], layer.sizes["key"]
    reach_q, reach_k = (layer.longest(part, radius, eps) for part in ("query", "key"))
    p = _weights(rows, (tau * reach_q * reach_k)[:, None])
    moved = (tau * radius / math.sqrt(eps)) * (reach_k * size_q + reach_q * size_k * _spread(rows, p).sqrt())
    return _of_rows(layer, rows, moved, p)


def _of_rows(layer: HeadMatrices, rows: VisibleRows, moved: Tensor, rho: Tensor) -> Tensor:
    """Bound the Lipschitz constant of a layer from two bounds on the Jacobian of each head. The Jacobian is a
    sum of two parts: ``moved`` (heads,) bounds the norm of the first, and ``rho`` (heads, rows) the squared
    norms of the block rows of the second.

    The bound is the smaller of M(s + √(max_j Σ ρ_i)) and M(s) + √(max_j Σ (‖O‖²/m_i + M(√(ρ_i − 1/m_i))²)).
    The sums go over the rows i that see j, and M is :meth:`HeadMatrices.together`. The second splits each
    block row into its mean over the m_i visible keys and the remainder, which needs a known mask. If every
    row sees one key only, s is left out.
    """
    moved = moved if rows.several else torch.zeros_like(moved)
    bound = layer.together(moved + rows.heaviest(rho).sqrt())
    if rows.kind in ("any", "additive"):
        return bound
    m, total = rows.counts, product_norms_above(layer.output, layer.value.flatten(0, 1))
    squares = layer.squares(root(rho - 1 / m))
    around_mean = torch.minimum(*(rows.heaviest(total.square() / m + square) for square in squares))
    return torch.minimum(bound, layer.together(moved) + around_mean.sqrt())


# ---- other attentions


def l2_layer(layer: HeadMatrices, rows: VisibleRows, radius: float) -> Tensor:
    """Bound the Lipschitz constant of multi-head L2 attention with queries and keys Q_h x, and with values
    V_h Q_hᵀ Q_h x/√k.
    """
    root, sizes = math.sqrt(layer.query.shape[1]), layer.sizes["query"]
    folded = Products.of(layer.value, layer.query.mT, 1 / root)
    cores = _l2_cores(sizes / math.sqrt(root), rows, radius)
    beside = Products.of(layer.blocks, folded).mT.stacked(cores)
    products = folded.norms * sizes * cores
    largest = products.detach().amax().clamp(min=LEAST_DIVISOR)  # squares of small products underflow
    apart = largest * torch.linalg.vector_norm(products / largest)
    return torch.minimum(beside * norms(layer.query.flatten(0, 1)), layer.whole * apart)


def _l2_cores(sizes: Tensor, rows: VisibleRows, radius: float) -> Tensor:
    """Bound the Lipschitz constant of the map from queries q_i = Q_h x_i to Σ_j P_ij q_j for each head of L2
    attention. ``sizes`` are ‖Q_h‖/k^(1/4).
    """
    phi = rows.phi
    if not math.isfinite(radius):
        everywhere: Tensor = l2_everywhere(rows.heaviest((1 + 2 * phi).square()), phi.max())
        return everywhere.expand_as(sizes)
    # √a, formed without a root because the root of a zero weight has no derivative
    root = (radius * sizes)[:, None]
    deviation, distance = torch.minimum(root, phi.sqrt()), torch.minimum(2 * root, phi.sqrt())
    largest = _weights(rows, 2 * root.square()).sqrt()
    by_weight = torch.minimum(deviation * distance, deviation * 2 * root * largest)
    blocks = largest + 2 * torch.minimum(by_weight, math.sqrt(2) * root.square())
    return rows.heaviest(blocks.square()).sqrt() + 2 * deviation.square().amax(dim=1)


def scaled_cosine_layer(
    layer: HeadMatrices, rows: VisibleRows, radius: float, *, temperature: float, gain: float, eps: float
) -> Tensor:
    """Bound the Lipschitz constant of multi-head scaled cosine attention, ν softmax(τ qkᵀ) v of vectors
    normalised to u/√(|u|² + ε).
    """
    tau, parts = abs(temperature), ("query", "key", "value")
    of_query, of_key, of_value = (norms(getattr(layer, part).flatten(0, 1)) for part in parts)
    rho_q, rho_k, rho_v = (layer.longest(part, radius, eps).max() for part in parts)
    p = _weights(rows, tau * rho_q * rho_k)
    squares = rows.heaviest(p)
    # Where every query sees one key only, the weights are 1 whatever the scores.
    total = squares.sqrt() * of_value
    if rows.several:
        by_query, by_key = tau * rho_v * rho_k * of_query, tau * rho_v * rho_q * of_key
        total = cosine_everywhere(squares, _spread(rows, p), of_value, by_query, by_key)
    return layer.whole * (abs(gain) / math.sqrt(eps)) * total


def sinkhorn_layer(layer: HeadMatrices, radius: float, *, scale: float) -> Tensor:
    """Bound the Lipschitz constant of converged multi-head Sinkhorn attention on a ball, for every length and
    for any biases.
    """
    a, o = Products.of(layer.key.mT, layer.query, scale), Products.of(layer.blocks, layer.value)
    values, ones = layer.sizes["value"], torch.ones(len(layer.value), dtype=torch.float64)
    linear = torch.minimum(layer.whole * norms(layer.value.flatten(0, 1)), layer.together(ones))
    apart = layer.whole * (a.stacked(values) + a.mT.stacked(values))
    folded = o.mT.stacked(ones) * (a.stacked(ones) + a.mT.stacked(ones))
    return linear + radius * radius * torch.minimum(apart, folded)


def lipschitz_norm_layer(layer: HeadMatrices, rows: VisibleRows) -> Tensor:
    """Bound the Lipschitz constant of multi-head LipschitzNorm attention on the whole space. Each head
    normalises its own scores.
    """
    q, k, v = (part.flatten(0, 1) for part in (layer.query, layer.key, layer.value))
    kappa = rows.heaviest(_weights(rows, torch.ones((), dtype=torch.float64))).sqrt()
    if not rows.several:
        return layer.whole * kappa * norms(v)
    jointly = lipschitz_norm_jointly(Log.of(kappa)).value * norms(torch.cat((q, k, v)))
    return layer.whole * torch.minimum(jointly, 2 * norms(q) + BY_KEY * norms(k) + (kappa + 1) * norms(v))


def sigmoid_layer(
    layer: HeadMatrices, rows: VisibleRows, radius: float, *, scale: float, shift: float
) -> Tensor:
    """Bound the Lipschitz constant of multi-head sigmoid attention with weights σ(s⟨q_i, k_j⟩ + b), where s
    is ``scale`` and b is ``shift``.
    """
    zero = layer.query.new_zeros(layer.query.shape[:2])
    b_q, b_k = (zero if b is None else b for b in (layer.query_bias, layer.key_bias))
    a = Products.of(layer.key.mT, layer.query, scale)
    by_query = Products.of(layer.query.mT, b_k[..., None], scale)
    by_key = Products.of(layer.key.mT, b_q[..., None], scale)
    sizes, m, mu = radius * a.norms, rows.most_keys, rows.norm
    if rows.free:
        largest, slope = torch.ones_like(sizes), torch.full_like(sizes, 0.25)
    else:
        by_both = Products.of(b_q[:, None], b_k[..., None], scale)
        half = radius * (sizes + by_query.lengths + by_key.lengths)
        half = half + by_both.error + gamma(4) * (by_both.lengths + abs(shift) + half)
        middle = shift + by_both.value[:, 0, 0]
        largest = torch.sigmoid(middle + half)
        # The derivative of the sigmoid decreases with the distance from zero.
        nearest = torch.clamp(torch.zeros_like(middle), middle - half, middle + half)
        slope = torch.sigmoid(nearest) * torch.sigmoid(-nearest)
    apart = norms((largest[:, None, None] * layer.value).flatten(0, 1)) * mu
    by_value = slope * layer.longest("value", radius)
    for matrices, vectors, factor in ((a, by_query, m), (a.mT, by_key, mu)):
        bias = torch.linalg.vector_norm(by_value * vectors.lengths)
        apart = apart + factor * (radius * matrices.stacked(by_value) + bias)
    folded = Products.of(layer.blocks, layer.value).norms
    outputs = radius * folded
    if layer.value_bias is not None:
        outputs = outputs + Products.of(layer.blocks, layer.value_bias[..., None]).lengths
    slopes = m * (sizes + by_query.lengths) + mu * (sizes + by_key.lengths)
    return torch.minimum(layer.whole * apart, (mu * largest * folded + slope * outputs * slopes).sum())


# ---- the parts of several bounds


def _weights(rows: VisibleRows, a: Tensor) -> Tensor:
    """Return the largest possible attention weight in each row (last axis) if its scores lie in [−a, a]."""
    return torch.ones_like(rows.counts * a) if rows.free else largest_weight(rows.counts, a).value


def _spread(rows: VisibleRows, p: Tensor) -> Tensor:
    """Return max_j Σ_i min(½, p_i), where i goes over the rows that see key j and at least one more key."""
    return rows.heaviest(torch.where(rows.counts > 1, p.clamp(max=0.5), 0.0))


def root(square: Tensor) -> Tensor:
    """Return the square root of each entry, or 0 with derivative 0 where the entry is at most zero."""
    # The inner where keeps sqrt away from 0, where its infinite derivative would give NaN gradients.
    positive = ~(square <= 0)  # also true for NaN, which an overflow leaves
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
