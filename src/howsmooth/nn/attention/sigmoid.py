"""Sigmoid attention (Ramapuram et al., 2025), whose attention weights are not normalised over the keys."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from howsmooth.bounds.differentiable_variant_upper_bounds import sigmoid_layer, value_radius
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, joined_radius
from howsmooth.nn.checks import check_number

__all__ = ["SigmoidAttention"]


class SigmoidAttention(LipschitzAttention):
    """Sigmoid self-attention, which has a proved Lipschitz constant on a ball.

    The attention weights of a head are σ(⟨q_i, k_j⟩/√k + b), with σ the logistic function, and the output is
    their sum with the values. The rows do not sum to one. With b = −log n, the initial weights are near 1/n.

    The bound is proved in the documentation, page "Other attentions", and is ours; the statement of the paper
    could not be read. For one head without biases and masks it is the exact constant if ‖A‖R² <= log n, A =
    KᵀQ/√k, and A and V have leading singular vectors in common. It grows with n beyond that.

    The weight of a hidden key is zero.

    Parameters
    ----------
    shift
        The number b that is added to every score; None for −log ``length``.

    See Ramapuram et al., *Theory, Analysis, and Best Practices for Sigmoid Self-Attention*, ICLR 2025, for
    the attention and its b.
    """

    _bound_name = "sigmoid_layer"
    _phrase = "sigmoid attention"
    _of_bound: ClassVar[tuple[str, ...]] = ("shift",)

    def __init__(
        self, embed_dim: int, num_heads: int, *, shift: float | None = None, **keywords: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        given = -math.log(self.length) if shift is None else shift
        self.shift = check_number("shift", given, "a finite number or None", math.isfinite)

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        scores = self._scores(q, k, weights) + self.shift
        return torch.sigmoid(scores if added is None else scores + added)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        parts, scale = self._parts(weights), 1 / math.sqrt(self.head_dim)
        return sigmoid_layer(
            *parts.matrices, rows, radius, biases=parts.biases, scale=scale, shift=self.shift
        )

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        parts = self._parts(weights)
        # |⟨q, k⟩| is at most the product of the largest norms of queries and keys.
        longest = value_radius(parts.query, parts.query_bias, radius)
        scores = longest * value_radius(parts.key, parts.key_bias, radius) / math.sqrt(self.head_dim)
        largest = 1.0 if self.masking.kind == "additive" else torch.sigmoid(scores + self.shift)
        keys = self.masking.rows_at(length).most_keys
        return joined_radius(parts, keys * largest * value_radius(parts.value, parts.value_bias, radius))
