"""Softmax attention, also with normalised queries and keys, whose output is divided by its proved bound."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from howsmooth.attention import RMSNorm, SelfAttention, TokenMap
from howsmooth.bounds import Quantity
from howsmooth.bounds.differentiable_upper_bounds import query_key_norm_layer, softmax_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError, check_number
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, hull_radius, scaled_weights
from howsmooth.nn.checks import check

__all__ = ["QueryKeyNormAttention", "SoftmaxAttention"]


class _DotProductAttention(LipschitzAttention):
    def _quantity(self, radius: float) -> Quantity:
        return Quantity.MASKED if self.masking.kind == "causal" else Quantity.GLOBAL

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        parts = self._parts(weights)
        return hull_radius(parts, radius, parts.together(torch.ones(self.num_heads, dtype=torch.float64)))

    def _self_attention(self, scaled: Weights, **keywords: Any) -> SelfAttention:
        parts, hidden = self._parts(scaled), self.masking.hidden
        mask = None if hidden is None else ~hidden.to(parts.query.device)
        return parts.as_map(SelfAttention, causal=self.masking.kind == "causal", mask=mask, **keywords)


class SoftmaxAttention(_DotProductAttention):
    """Softmax self-attention whose Lipschitz constant on a ball of tokens is at most a given number.

    The layer is torch.nn.MultiheadAttention, divided by its Lipschitz bound / ``constant``; without
    ``constant`` it is the same function. With ``constant=1`` it is the 1-Lipschitz attention that Castin,
    Ablin and Peyré suggest for Vision Transformers (*How Smooth Is Attention?*, ICML 2024, Section 6), whose
    length is fixed and whose radius is set by a norm layer. The bound is Theorem A for several heads, for the
    masks that the layer accepts (documentation page "Enforce: layers with a constant that is proved"). It is
    never above the bounds of :func:`~howsmooth.bounds.best`. Parameters and errors are those of
    :class:`LipschitzAttention`.
    """

    _bound_name = "softmax_layer"
    _source = 'howsmooth documentation, "Enforce", Theorem A for several heads'
    _phrase = "softmax attention"

    @classmethod
    def from_torch(cls, attention: object, **settings: Any) -> SoftmaxAttention:
        """Return a layer with the weights of a torch.nn.MultiheadAttention, but without its dropout.

        It must have ``batch_first=True``, keys and values of the dimension of the queries, no ``add_bias_kv``
        and no ``add_zero_attn``; else ArgumentError is raised. ``settings`` are further arguments of the
        constructor, such as ``length`` and ``radius``.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            got = type(attention).__name__
            raise ArgumentError("attention", expected="a torch.nn.MultiheadAttention", got=got)
        same = attention._qkv_same_embed_dim and attention.bias_k is None and not attention.add_zero_attn
        expected = "kdim and vdim equal to embed_dim, no add_bias_kv, no add_zero_attn"
        remedy = "Such an attention has keys that are not tokens, or keys of another dimension."
        check(same, "attention", expected, "other settings", remedy)
        expected = "batch_first=True, because the new layer takes tokens (batch, n, d)"
        remedy = "Set attention.batch_first = True, which keeps the weights, and transpose the tokens."
        check(attention.batch_first, "attention", expected, "batch_first=False, (n, batch, d)", remedy)
        weight = attention.out_proj.weight
        placed = {"device": weight.device, "dtype": weight.dtype, **settings}
        bias = attention.in_proj_bias is not None
        layer = cls(attention.embed_dim, attention.num_heads, bias=bias, **placed)
        layer.load_state_dict(attention.state_dict())
        layer.train(attention.training)
        return layer

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        return self._self_attention(scaled_weights(weights, scale))

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        return softmax_layer(self._parts(weights), rows, radius, scale=1 / math.sqrt(self.head_dim))


class QueryKeyNormAttention(_DotProductAttention):
    """Softmax self-attention with normalised queries and keys, whose scores do not grow with the tokens.

    The scores are τ⟨q̂, k̂⟩ with û = u/√(|u|² + ε) and a temperature τ, so they are at most τ. This is the
    attention of models with QK-norm (Henry, Dachapally, Pawar, Chen, *Query-Key Normalization for
    Transformers*, EMNLP Findings 2020), with one temperature for all heads. Its constant grows linearly with
    the radius, while the constant of softmax attention grows with the square of the radius. It stays bounded
    for query and key biases of any size. Values are not normalised, so the layer has a constant on a ball
    only.

    ``temperature`` is the initial value of τ > 0, and ``log_temperature`` a weight; with the default
    √head_dim, queries and keys of independent entries have scores of variance one. Queries and keys much
    longer than √ε, with ε = ``eps`` > 0, are normalised; shorter ones hardly change. A part of the constant
    grows like 1/√ε, so the tiny ε of usual norm layers gives a large constant. Other parameters are those of
    :class:`LipschitzAttention`.
    """

    _bound_name = "query_key_norm_layer"
    _source = 'howsmooth documentation, "Enforce", Normalised queries and keys'
    _phrase = "softmax attention with normalised queries and keys"
    _of_bound: ClassVar[tuple[str, ...]] = ("eps",)

    def __init__(
        self, embed_dim: int, num_heads: int, *, temperature: object = None, eps: object = 1.0, **rest: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **rest)
        self.eps = check_number("eps", eps)
        given = math.sqrt(self.head_dim) if temperature is None else temperature
        start = self.in_proj_weight.new_tensor(math.log(check_number("temperature", given)))
        self.log_temperature = nn.Parameter(start)

    def _weights(self) -> dict[str, Tensor]:
        return {**super()._weights(), "log_temperature": self.log_temperature}

    def _scores(self, q: Tensor, k: Tensor, weights: Weights) -> Tensor:
        cosines = self._normalised(q) @ self._normalised(k).mT
        return weights["log_temperature"].exp() * cosines

    def _normalised(self, u: Tensor) -> Tensor:
        unit: Tensor = u / torch.sqrt(u.square().sum(dim=-1, keepdim=True) + self.eps)
        return unit

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        scaled, k = scaled_weights(weights, scale), self.head_dim
        # RMSNorm divides by √(|u|²/k + eps), so that eps = ε/k and the gain 1/√k give û.
        norm = RMSNorm(scaled["out_proj.weight"].new_full((k,), k**-0.5), eps=self.eps / k)
        temperature = float(scaled["log_temperature"].exp())
        return self._self_attention(scaled, scale=temperature, query_norm=norm, key_norm=norm)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        temperature = weights["log_temperature"].exp()
        return query_key_norm_layer(self._parts(weights), rows, radius, temperature=temperature, eps=self.eps)
