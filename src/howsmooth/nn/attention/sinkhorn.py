"""Sinkhorn attention (Sander et al., 2022), whose attention weights are doubly stochastic."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor

from howsmooth.attention import SinkhornAttention as SinkhornMap
from howsmooth.attention import TokenMap
from howsmooth.bounds.differentiable_variant_upper_bounds import sinkhorn_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, scaled_weights
from howsmooth.nn.attention.sinkhorn_weights import doubly_stochastic
from howsmooth.nn.checks import check_number, check_size, require

__all__ = ["SinkhornAttention"]


class SinkhornAttention(LipschitzAttention):
    """Sinkhorn self-attention, whose attention weights sum to one in every row and every column.

    The attention weights are P = diag(α) e^S diag(β), where S are the scores of softmax attention. P is the
    limit of Sinkhorn's iterations, computed in float64 up to a tolerance. Derivatives of every order and mode
    come from implicit differentiation of the limit and solve n × n systems. The constant on a ball does not
    depend on n (:func:`howsmooth.bounds.sinkhorn` for one head).

    The bound holds for the limit only, so a call raises ArgumentError if the iteration does not converge.

    Masks must be symmetric, and each token must see itself. "any" also permits padding, and "additive" any
    finite numbers. Tokens that are hidden from all others, such as padding, see only one another, so the rows
    and columns of the other tokens sum to one among themselves. A causal mask is not supported, because the
    identity is the only doubly stochastic matrix with its pattern.

    Parameters
    ----------
    tolerance
        Largest allowed |Σ_i P_ij − 1| over the columns j. Rows sum to one up to rounding.
    max_iterations
        Number of iterations after which the layer raises an error.

    See Sander, Ablin, Blondel, Peyré, *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS
    2022, and for bound and derivatives the documentation page "Enforce: layers with a constant that is
    proved", section "Sinkhorn attention with several heads".
    """

    masks = ("none", "fixed", "any", "additive")
    _mask_remedy = "A triangular doubly stochastic matrix is the identity."
    _bound_name = "sinkhorn_layer"
    _phrase = "Sinkhorn attention"
    _of_bound: ClassVar[tuple[str, ...]] = ("tolerance", "max_iterations")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        tolerance: float = 1e-9,
        max_iterations: int = 1000,
        **keywords: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        expected = "a number from 1e-13 up to 1"
        self.tolerance = check_number("tolerance", tolerance, expected, lambda t: 1e-13 <= t < 1)
        self.max_iterations = check_size("max_iterations", max_iterations)
        if self.masking.hidden is not None:
            _check_pattern(~self.masking.hidden, "mask")

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        scores = self._scores(q.double(), k.double(), weights)
        if added is not None:
            scores = scores + _closed(added.double())
        p = doubly_stochastic(scores, tolerance=self.tolerance, max_iterations=self.max_iterations)
        return p.to(v.dtype)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        parts, scale = self._parts(weights), 1 / math.sqrt(self.head_dim)
        return sinkhorn_layer(*parts.matrices, radius, scale=scale)

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        if self.masking.hidden is not None:
            return super()._map(weights, scale)
        parts = self._parts(scaled_weights(weights, scale))
        return parts.as_map(SinkhornMap, tolerance=self.tolerance, max_iterations=self.max_iterations)


def _closed(added: Tensor) -> Tensor:
    """Change a mask (..., n, n) or (..., 1, n) so that padding tokens, which no query sees, see one another
    alone and are seen by no other token.
    """
    n = added.shape[-1]
    added = added.expand(*added.shape[:-2], n, n)
    seen = added > -math.inf
    # A token is absent if no query sees it. Present and absent tokens must not see each other, since both
    # groups need doubly stochastic matrices of their own.
    absent = ~seen.any(dim=-2)
    both = absent[..., :, None] & absent[..., None, :]
    one = absent[..., :, None] ^ absent[..., None, :]
    _check_pattern((seen & ~one) | both, "attn_mask")
    return added.masked_fill(one, -math.inf).masked_fill(both, 0.0)


def _check_pattern(seen: Tensor, name: str) -> None:
    """Raise ArgumentError unless a mask is symmetric and each token sees itself."""
    expected = "a symmetric mask in which each token sees itself, apart from padding"
    remedy = "Other masks may have no doubly stochastic matrix; a triangular mask has only the identity."
    error = ArgumentError(name, expected=expected, got="another mask", remedy=remedy)
    symmetric = (seen == seen.mT) & seen.diagonal(dim1=-2, dim2=-1)[..., None]
    require(symmetric, lambda good: good, lambda _: error, f"{name}: expected {expected}")
