"""Softmax attention whose output is divided by its proved Lipschitz bound."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.bounds import Quantity
from howsmooth.bounds.differentiable_upper_bounds import softmax_layer, softmax_output_radius
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Parts, Weights, in_double, scaled_weights

__all__ = ["DotProductAttention", "SoftmaxAttention"]


class DotProductAttention(LipschitzAttention):
    """Base class of the layers with the bounds of softmax attention."""

    def _quantity(self, radius: float) -> Quantity:
        return Quantity.MASKED if self.masking.kind == "causal" else Quantity.GLOBAL

    @torch.no_grad()
    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        parts = Parts.of(in_double(weights), self.num_heads)
        return softmax_output_radius(parts.value, parts.output, parts.value_bias, parts.output_bias, radius)


class SoftmaxAttention(DotProductAttention):
    """Softmax self-attention whose Lipschitz constant on a ball of tokens is at most a given number.

    The layer is torch.nn.MultiheadAttention, divided by its Lipschitz bound / ``constant``. With
    ``constant=1`` it is the 1-Lipschitz attention that Castin, Ablin and Peyré suggest for Vision
    Transformers, whose length is fixed and whose radius is set by a norm layer. The bound is Theorem A for
    several heads, for the masks that the layer accepts. It is never above the bounds of
    :func:`~howsmooth.bounds.best`. Without ``constant`` the layer computes the same function as
    torch.nn.MultiheadAttention, and ``lipschitz_bound`` returns the bound of this function.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As for :class:`~howsmooth.nn.attention.base.LipschitzAttention`.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    Notes
    -----
    The bound was divided by the largest local constant found by gradient ascent (4 tokens of radius 2, one
    and two heads). The ratio was 1 for scores that are all zero, at most 2.6 for scores −γ⟨x_i, x_j⟩ with γ
    from 0.5 to 2, and at most 7.2 for random weights.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Section 6. Documentation page "Enforce:
    layers with a constant that is proved", sections "Several heads: Theorem A for the whole layer" and
    "Masks".

    """

    _bound_name = "softmax_layer"
    _source = 'howsmooth documentation, "Enforce", Theorem A for several heads'
    _phrase = "softmax attention"

    @classmethod
    def from_torch(cls, attention: object, **settings: Any) -> SoftmaxAttention:
        """Return a layer with the weights of a torch.nn.MultiheadAttention, but without its dropout.

        Parameters
        ----------
        attention
            A layer with ``batch_first=True`` whose keys and values have the dimension of the queries, without
            ``add_bias_kv`` and ``add_zero_attn``.
        settings
            Further arguments of the constructor, such as ``length`` and ``radius``.

        Raises
        ------
        ArgumentError
            If ``attention`` is of another kind, or a setting has a wrong type or value.

        """
        if not isinstance(attention, nn.MultiheadAttention):
            raise ArgumentError(
                "attention", expected="a torch.nn.MultiheadAttention", got=type(attention).__name__
            )
        if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
            raise ArgumentError(
                "attention",
                expected="kdim and vdim equal to embed_dim, no add_bias_kv, no add_zero_attn",
                got="other settings",
                remedy="Such an attention has keys that are not tokens, or keys of another dimension.",
            )
        if not attention.batch_first:
            raise ArgumentError(
                "attention",
                expected="batch_first=True, because the new layer takes tokens (batch, n, d)",
                got="batch_first=False, which takes (n, batch, d)",
                remedy="Set attention.batch_first = True, which keeps the weights, and transpose the tokens.",
            )
        weight = attention.out_proj.weight
        layer = cls(
            attention.embed_dim,
            attention.num_heads,
            bias=attention.in_proj_bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            **settings,
        )
        layer.load_state_dict(attention.state_dict())
        layer.train(attention.training)
        return layer

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        scores = (q / math.sqrt(self.head_dim)) @ k.mT
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        return Parts.of(scaled_weights(weights, scale), self.num_heads).attention(self.masking)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        parts = Parts.of(weights, self.num_heads)
        return softmax_layer(
            parts.query,
            parts.key,
            parts.value,
            parts.output,
            rows,
            radius,
            query_bias=parts.query_bias,
            scale=1 / math.sqrt(self.head_dim),
        )
