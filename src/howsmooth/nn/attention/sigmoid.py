"""Sigmoid attention (Ramapuram et al., 2025), whose attention weights are not normalised over the keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from howsmooth.bounds.differentiable_variant_upper_bounds import sigmoid_layer, value_radius
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError
from howsmooth.nn.attention.head_weights import rows_of
from howsmooth.nn.attention.variant_base import AttentionVariant, in_double
from howsmooth.nn.upward_rounding import rounded_up

__all__ = ["SigmoidAttention"]


class SigmoidAttention(AttentionVariant):
    """Sigmoid self-attention, which has a proved Lipschitz constant on a ball.

    The attention weights of a head are σ(⟨q_i, k_j⟩/√k + b), with σ the logistic function, and the output is
    their sum with the values. The rows do not sum to one. With b = −log n, the initial weights are near 1/n.

    The bound is proved in the documentation, page "Other attentions", and is ours; the statement of the paper
    could not be read. For one head without biases and masks it is the exact constant if ‖A‖R² <= log n, A =
    KᵀQ/√k, and A and V have leading singular vectors in common. It grows with n beyond that.

    Every kind of mask is supported. Of a hidden key the weight is zero.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As for :class:`~howsmooth.nn.attention.base.LipschitzAttention`. ``constant`` requires a radius.
    shift
        The number b that is added to every score; None for −log ``length``.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    References
    ----------
    Ramapuram et al., *Theory, Analysis, and Best Practices for Sigmoid Self-Attention*, ICLR 2025, for the
    attention and its b.

    """

    _needs_radius = True
    _bound_name = "sigmoid_layer"
    _phrase = "sigmoid attention"

    _of_bound: ClassVar[tuple[str, ...]] = ("shift",)

    def __init__(
        self, embed_dim: int, num_heads: int, *, shift: float | None = None, **keywords: Any
    ) -> None:
        known = isinstance(shift, int | float) and not isinstance(shift, bool) and math.isfinite(shift)
        if shift is not None and not known:
            raise ArgumentError("shift", expected="a finite number or None", got=repr(shift))
        super().__init__(embed_dim, num_heads, **keywords)
        self.shift = -math.log(self.length) if shift is None else float(shift)

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Mapping[str, Tensor]
    ) -> Tensor:
        scores = (q / math.sqrt(self.head_dim)) @ k.mT + self.shift
        return torch.sigmoid(scores if added is None else scores + added)

    def _parts(self, weights: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the matrices and biases of queries, keys and values, split into heads."""
        parts = [self._cut(part) for part in weights["in_proj_weight"].chunk(3)]
        if "in_proj_bias" not in weights:
            return parts, [None, None, None]
        return parts, [self._cut(part) for part in weights["in_proj_bias"].chunk(3)]

    def _bound(self, rows: VisibleRows, radius: float, weights: Mapping[str, Tensor]) -> Tensor:
        (query, key, value), (b_q, b_k, b_v) = self._parts(weights)
        return sigmoid_layer(
            query,
            key,
            value,
            weights["out_proj.weight"],
            rows,
            radius,
            biases=(b_q, b_k, b_v),
            scale=1 / math.sqrt(self.head_dim),
            shift=self.shift,
        )

    @torch.no_grad()
    def _undivided_output_radius(self, length: int, radius: float, weights: Mapping[str, Tensor]) -> float:
        w = in_double(weights)
        (query, key, value), (b_q, b_k, bias) = self._parts(w)
        # |⟨q, k⟩| is at most the product of the largest norms of queries and keys.
        scores = value_radius(query, b_q, radius) * value_radius(key, b_k, radius) / math.sqrt(self.head_dim)
        largest = 1.0 if self.masking.kind == "additive" else torch.sigmoid(scores + self.shift)
        keys = rows_of(self.masking, length).most_keys
        sizes = keys * largest * value_radius(value, bias, radius)
        blocks = w["out_proj.weight"].unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        summed = (torch.linalg.matrix_norm(blocks, 2) * sizes).sum()
        apart = torch.linalg.matrix_norm(w["out_proj.weight"], 2) * sizes.square().sum().sqrt()
        total = float(torch.minimum(summed, apart))
        if "out_proj.bias" in w:
            total += float(torch.linalg.vector_norm(w["out_proj.bias"]))
        return rounded_up(total)
