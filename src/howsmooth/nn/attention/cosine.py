"""Scaled cosine attention (LipsFormer), which is Lipschitz on the whole space."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from howsmooth.bounds.differentiable_variant_upper_bounds import scaled_cosine_layer, value_radius
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, joined_radius
from howsmooth.nn.checks import check_number

__all__ = ["CosineAttention"]


class CosineAttention(LipschitzAttention):
    """Scaled cosine self-attention, which is Lipschitz on the whole space under every mask.

    In each head, every query, key and value u is normalised to u/√(|u|² + ε), and the output is ν softmax(τ q
    kᵀ) v. Without a radius, the bound is :func:`howsmooth.bounds.scaled_cosine_upper_bound` of the matrices
    of all heads together, times ‖W_O‖. On a ball the bound is smaller, because normalised rows are shorter
    there. ``constant`` needs no radius; without one it holds on the whole space.

    Parameters
    ----------
    temperature
        The factor τ of the cosines in the scores. For n above e^{2τ} the bound does not depend on n.
    gain
        The factor ν of the output.
    eps
        The number ε > 0 under the roots. The bound without a radius is proportional to ε^{-1/2}, so
        LipsFormer's 1e-6 makes it a thousand times larger than ε = 1.

    See Qi, Wang, Chen, Shi, Zhang, *LipsFormer: Introducing Lipschitz Continuity to Vision Transformers*,
    ICLR 2023, and for several heads, masks and balls the documentation page "Enforce: layers with a constant
    that is proved", section "Scaled cosine attention on a ball".
    """

    _needs_radius = False
    _bound_name = "scaled_cosine_layer"
    _phrase = "scaled cosine attention"
    _of_bound: ClassVar[tuple[str, ...]] = ("temperature", "gain", "eps")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        temperature: float = 1.0,
        gain: float = 1.0,
        eps: float = 1.0,
        **keywords: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        self.temperature = check_number("temperature", temperature, "a finite number", math.isfinite)
        self.gain = check_number("gain", gain, "a finite number", math.isfinite)
        expected = "a finite number > 0, as with eps = 0 the normalisation is not Lipschitz at zero"
        self.eps = check_number("eps", eps, expected)

    def _queries_keys_values(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._normalised(rows) for rows in super()._queries_keys_values(x, weights))
        return q, k, self.gain * v

    def _normalised(self, rows: Tensor) -> Tensor:
        unit: Tensor = rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + self.eps)
        return unit

    def _scores(self, q: Tensor, k: Tensor, weights: Weights) -> Tensor:
        return self.temperature * q @ k.mT

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        parts = self._parts(weights)
        return scaled_cosine_layer(
            *parts.matrices,
            rows,
            radius,
            biases=parts.biases,
            temperature=self.temperature,
            gain=self.gain,
            eps=self.eps,
        )

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        parts = self._parts(weights)
        sizes = value_radius(parts.value, parts.value_bias, radius)
        shortened = torch.rsqrt(1 + self.eps / sizes.square())  # r/√(r² + ε), which is 1 for infinite r
        return joined_radius(parts, shortened, abs(self.gain))
