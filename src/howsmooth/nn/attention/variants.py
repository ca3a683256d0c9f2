"""Other attentions: L2, scaled cosine and sigmoid attention, and attention with LipschitzNorm."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from howsmooth.attention import L2Attention as L2Map
from howsmooth.attention import TokenMap
from howsmooth.bounds.differentiable_upper_bounds import (
    HeadMatrices,
    l2_layer,
    lipschitz_norm_layer,
    root,
    scaled_cosine_layer,
    sigmoid_layer,
)
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import check_number
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, joined_radius, scaled_weights
from howsmooth.nn.checks import check

__all__ = ["CosineAttention", "L2Attention", "LipschitzNormAttention", "SigmoidAttention"]


class L2Attention(LipschitzAttention):
    """L2 self-attention with one matrix for queries and keys, and with a proved Lipschitz constant.

    Head h has queries and keys u_i = Q_h x_i, weights P_ij ∝ exp(−|u_i − u_j|²/√k) and values V_h Q_hᵀ u_j/√k
    + b_v (Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021). Without a radius,
    the bound is :func:`howsmooth.bounds.l2_attention_upper_bound`, of order √n log n. On a ball it is
    smaller, and for n above e^{4a}, a = ‖Q_h‖²R²/√k, it does not depend on n. ``constant`` needs no radius;
    without one it holds on the whole space, and each token must see itself.

    ``in_proj_weight`` (2 · embed_dim, embed_dim) has Q above V, and ``value_bias`` (embed_dim,) is the bias
    of the values, or None. Query and key biases would have no effect. Parameters and errors are those of
    :class:`LipschitzAttention`.
    """

    _needs_radius = False
    _bound_name = "l2_layer"
    _phrase = "L2 attention"
    _matrices = 2
    _bias = ("value_bias", 1)

    def __init__(self, embed_dim: int, num_heads: int, **keywords: Any) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        if self.radius is not None:
            return
        hidden = self.masking.hidden
        # Layers of these kinds may be given a mask in which a token does not see itself.
        blind = self.masking.kind in ("any", "additive") or (
            hidden is not None and bool(hidden.diagonal().any())
        )
        expected = "a number, because a token may be hidden from itself"
        remedy = "L2 attention is Lipschitz on the whole space only if each token sees itself."
        check(not blind or self.constant is None, "radius", expected, "None", remedy)

    def _parts(self, weights: Weights) -> HeadMatrices:
        """Return the matrices (k, d) of all heads: Q_h for queries and keys, V_h Q_hᵀQ_h/√k for values."""
        query, folded = self._folded(weights)
        bias, output = weights.get("value_bias"), weights["out_proj.weight"]
        by_head = None if bias is None else self._cut(bias)
        biases = None, None, by_head, weights.get("out_proj.bias")
        return HeadMatrices(query, query, folded @ query, output, *biases)

    def _cut(self, weight: Tensor) -> Tensor:
        heads: Tensor = weight.unflatten(0, (self.num_heads, -1))
        return heads

    def _folded(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return Q_h (k, d) for all heads h, and V_h Q_hᵀ/√k (k, k), which maps queries to values."""
        query, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return query, value @ query.mT / math.sqrt(self.head_dim)

    def _queries_keys_values(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        query, folded = self._folded(weights)
        u = self._by_head(x @ query.flatten(0, 1).mT)
        v = u @ folded.mT
        if "value_bias" in weights:
            v = v + self._cut(weights["value_bias"])[:, None]
        return u, u, v

    def _scores(self, q: Tensor, k: Tensor, weights: Weights) -> Tensor:
        # −|u − k|² = 2⟨u, k⟩ − |k|² up to −|u|², which is constant in each row. Centring makes the vectors
        # shorter, so that fewer digits cancel.
        centre = k.mean(dim=-2, keepdim=True)
        q, k = q - centre, k - centre
        return (2 * q @ k.mT - k.square().sum(dim=-1)[..., None, :]) / math.sqrt(self.head_dim)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        query, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return l2_layer(HeadMatrices(query, query, value, weights["out_proj.weight"]), rows, radius)

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        if self.masking.hidden is not None:
            return super()._map(weights, scale)
        parts, causal = self._parts(scaled_weights(weights, scale)), self.masking.kind == "causal"
        return parts.as_map(L2Map, scale=1 / math.sqrt(self.head_dim), causal=causal)


class CosineAttention(LipschitzAttention):
    """Scaled cosine self-attention, which is Lipschitz on the whole space under every mask.

    In each head, every query, key and value u is normalised to u/√(|u|² + ε), and the output is ν softmax(τ q
    kᵀ) v (Qi, Wang, Chen, Shi, Zhang, *LipsFormer*, ICLR 2023). Without a radius, the bound is
    :func:`howsmooth.bounds.scaled_cosine_upper_bound` of the matrices of all heads together, times ‖W_O‖. On
    a ball the bound is smaller, because normalised rows are shorter there. ``constant`` needs no radius;
    without one it holds on the whole space.

    ``temperature`` is τ; for n above e^{2τ} the bound does not depend on n. ``gain`` is ν. ``eps`` is ε > 0;
    the bound without a radius is proportional to ε^{-1/2}, so LipsFormer's 1e-6 makes it a thousand times
    larger than ε = 1. Other parameters are those of :class:`LipschitzAttention`.
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
        numbers = {"temperature": self.temperature, "gain": self.gain, "eps": self.eps}
        return scaled_cosine_layer(self._parts(weights), rows, radius, **numbers)

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        parts = self._parts(weights)
        return joined_radius(parts, parts.longest("value", radius, self.eps), abs(self.gain))


class LipschitzNormAttention(LipschitzAttention):
    """Self-attention with LipschitzNorm, which is Lipschitz on the whole space under every mask.

    The scores of a head are ⟨q_i, k_j⟩ / max{uv, uw, vw} with u = ‖Q‖_F, v = max_j |k_j| and w = max_j |v_j|
    (Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers with Application to Graph
    Neural Networks*, ICML 2021). Their absolute values are at most 1, so no attention weight of a row exceeds
    e² times another. The constant of a head in (Q, K, V) jointly is
    :func:`howsmooth.bounds.lipschitz_norm_upper_bound`. The constant of the layer follows from it and the
    norms of the projections.

    A token that no query sees, such as padding, counts as absent: its query, key and value are set to zero,
    so that they do not enter the norms. Parameters and errors are those of :class:`LipschitzAttention`;
    ``constant`` needs no radius, because the bound does not depend on it.
    """

    _needs_radius = False
    _bound_name = "lipschitz_norm_layer"
    _phrase = "attention with LipschitzNorm"

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        if added is not None:
            # A token is present if at least one query sees it.
            present = (added > -math.inf).any(dim=-2)[..., None].to(q.dtype)
            q, k, v = q * present, k * present, v * present
        u = root(q.square().sum(dim=(-2, -1)))
        by_key, by_value = (root(t.square().sum(dim=-1).amax(dim=-1)) for t in (k, v))
        # ‖Q‖_F max |k_j| is at least every |⟨q_i, k_j⟩|, so no score exceeds 1 in absolute value.
        divisor = torch.stack((u * by_key, u * by_value, by_key * by_value)).amax(dim=0)
        # If the divisor is zero, all scores are zero, and dividing by 1 keeps them so.
        divisor = torch.where(divisor > 0, divisor, 1.0)
        scores = q @ k.mT / divisor[..., None, None]
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        return lipschitz_norm_layer(self._parts(weights), rows)


class SigmoidAttention(LipschitzAttention):
    """Sigmoid self-attention, which has a proved Lipschitz constant on a ball.

    The attention weights of a head are σ(⟨q_i, k_j⟩/√k + b), with σ the logistic function, and the output is
    their sum with the values (Ramapuram et al., *Theory, Analysis, and Best Practices for Sigmoid
    Self-Attention*, ICLR 2025). The rows do not sum to one, and the weight of a hidden key is zero. ``shift``
    is b, by default −log ``length``, with which the initial weights are near 1/n; other parameters are those
    of :class:`LipschitzAttention`.

    The bound is proved in the documentation, page "Other attentions", and is ours; the statement of the paper
    could not be read. For one head without biases and masks it is the exact constant if ‖A‖R² <= log n, A =
    KᵀQ/√k, and A and V have leading singular vectors in common. It grows with n beyond that.
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
        scale = 1 / math.sqrt(self.head_dim)
        return sigmoid_layer(self._parts(weights), rows, radius, scale=scale, shift=self.shift)

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        parts = self._parts(weights)
        # |⟨q, k⟩| is at most the product of the largest norms of queries and keys.
        scores = parts.longest("query", radius) * parts.longest("key", radius) / math.sqrt(self.head_dim)
        largest = 1.0 if self.masking.kind == "additive" else torch.sigmoid(scores + self.shift)
        keys = self.masking.rows_at(length).most_keys
        return joined_radius(parts, keys * largest * parts.longest("value", radius))
