"""Softmax attention with normalised queries and keys (QK-norm)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from howsmooth.attention import RMSNorm, TokenMap
from howsmooth.bounds.differentiable_upper_bounds import query_key_norm_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.base import positive
from howsmooth.nn.attention.head_weights import Parts, Weights, scaled_weights
from howsmooth.nn.attention.softmax import DotProductAttention

__all__ = ["QueryKeyNormAttention"]


class QueryKeyNormAttention(DotProductAttention):
    """Softmax self-attention with normalised queries and keys, whose scores do not grow with the norms of the
    tokens.

    The scores are τ⟨q̂, k̂⟩ with û = u/√(|u|² + ε) and a temperature τ, so they are at most τ. This is the
    attention of models with QK-norm, with one temperature for all heads. Its constant grows linearly with the
    radius, while the constant of softmax attention grows with the square of the radius. It stays bounded for
    query and key biases of any size.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As for :class:`~howsmooth.nn.attention.base.LipschitzAttention`. Values are not normalised, so the
        layer has a constant on a ball only.
    temperature
        Initial value of τ > 0, the factor of the cosines in the scores. With the default √head_dim, queries
        and keys of independent entries have scores of variance one.
    learn_temperature
        Whether log τ is a trainable weight or fixed.
    eps
        The number ε > 0 under the roots. Queries and keys much longer than √ε are normalised; shorter ones
        hardly change. A part of the constant grows like 1/√ε, so the tiny ε of usual norm layers gives a
        large constant.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    Notes
    -----
    The bound was divided by the largest local constant found by gradient ascent (4 tokens of radius 2, one
    and two heads). The ratio was 1 for scores that are all zero, at most 6.0 for W_K = −W_Q = −γI with γ from
    0.5 to 2, and at most 8.2 for random weights and biases.

    References
    ----------
    Henry, Dachapally, Pawar, Chen, *Query-Key Normalization for Transformers*, EMNLP Findings 2020. For the
    constant: documentation page "Enforce: layers with a constant that is proved", section "Normalised queries
    and keys".

    """

    _bound_name = "query_key_norm_layer"
    _source = 'howsmooth documentation, "Enforce", Normalised queries and keys'
    _phrase = "softmax attention with normalised queries and keys"
    _of_bound: ClassVar[tuple[str, ...]] = ("eps",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        temperature: object = None,
        learn_temperature: bool = True,
        eps: object = 1.0,
        **keywords: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        self.eps = positive("eps", eps)
        given = math.sqrt(self.head_dim) if temperature is None else temperature
        start = self.in_proj_weight.new_tensor(math.log(positive("temperature", given)))
        if learn_temperature:
            self.log_temperature = nn.Parameter(start)
        else:
            self.register_buffer("log_temperature", start)

    @property
    def temperature(self) -> float:
        """The current temperature τ, by which the cosines in the scores are multiplied."""
        return float(self.log_temperature.detach().double().exp())

    def _weights(self) -> dict[str, Tensor]:
        return {**super()._weights(), "log_temperature": self.log_temperature}

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        scores = weights["log_temperature"].exp() * (self._normalised(q) @ self._normalised(k).mT)
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _normalised(self, u: Tensor) -> Tensor:
        unit: Tensor = u / torch.sqrt(u.square().sum(dim=-1, keepdim=True) + self.eps)
        return unit

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        w, k = scaled_weights(weights, scale), self.head_dim
        # RMSNorm divides by √(|u|²/k + eps), so that eps = ε/k and the gain 1/√k give û.
        gain = w["out_proj.weight"].new_full((k,), k**-0.5)
        norm = RMSNorm(gain, eps=self.eps / k)  # √k u / √(|u|² + ε) times the gain 1/√k
        temperature = float(w["log_temperature"].exp())
        parts = Parts.of(w, self.num_heads)
        return parts.attention(self.masking, scale=temperature, query_norm=norm, key_norm=norm)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        parts = Parts.of(weights, self.num_heads)
        return query_key_norm_layer(
            parts.query,
            parts.key,
            parts.value,
            parts.output,
            rows,
            radius,
            query_bias=parts.query_bias,
            key_bias=parts.key_bias,
            temperature=weights["log_temperature"].exp(),
            eps=self.eps,
        )
