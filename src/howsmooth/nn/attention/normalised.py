"""Softmax attention on normalised queries and keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import RMSNorm, TokenMap
from howsmooth.bounds import Bound, Quantity
from howsmooth.bounds.softmax_layer import query_key_norm_layer, softmax_output_radius
from howsmooth.nn.attention.base import LipschitzAttention, Weights, positive
from howsmooth.nn.attention.layout import Parts, rows_of

__all__ = ["QueryKeyNormAttention"]


class QueryKeyNormAttention(LipschitzAttention):
    """Softmax self-attention with scores τ⟨q̂, k̂⟩, û = u/√(|u|² + ε): its weights cannot make scores large.

    As in models with a norm of queries and keys (QK-norm), with one temperature for all heads. The constant
    grows linearly with the radius where that of softmax attention grows with its square, and is bounded for
    every size of the query and key biases.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As of :class:`~howsmooth.nn.attention.base.LipschitzAttention`. Values are not normalised, so there is
        a constant on a ball only.
    temperature
        τ > 0, to begin with: the factor of the cosines in the scores. By default √head_dim, with which
        queries and keys of independent entries have scores of variance one.
    learn_temperature
        Whether log τ is a weight, or fixed.
    eps
        ε > 0. The norm of queries and keys near which the normalisation sets in is √ε; the constant has
        a part that grows like 1/√ε, so a tiny ε, as norm layers have, means a large constant.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.

    Notes
    -----
    Bound over the largest local constant found by ascent, 4 tokens of radius 2, one and two heads: 1 without
    scores, at most 6.0 for W_K = −W_Q = −γI with γ from 0.5 to 2, at most 8.2 for random weights and biases.

    References
    ----------
    Henry, Dachapally, Pawar, Chen, *Query-Key Normalization for Transformers*, EMNLP Findings 2020; the
    constant: docs/theory/enforce.md, Normalised queries and keys.

    """

    def __init__(
        self,
        embed_dim: object,
        num_heads: object,
        *,
        length: object,
        radius: object = None,
        constant: object = None,
        temperature: object = None,
        learn_temperature: bool = True,
        eps: object = 1.0,
        bias: bool = True,
        beyond: object = "refuse",
        shorter: bool = False,
        mask: object = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            length=length,
            radius=radius,
            constant=constant,
            bias=bias,
            beyond=beyond,
            shorter=shorter,
            mask=mask,
            device=device,
            dtype=dtype,
        )
        self.eps = positive("eps", eps)
        given = math.sqrt(self.head_dim) if temperature is None else temperature
        self.initial_temperature = positive("temperature", given)
        self.learn_temperature = bool(learn_temperature)
        start = torch.tensor(math.log(self.initial_temperature), device=device, dtype=dtype)
        if self.learn_temperature:
            self.log_temperature = nn.Parameter(start)
        else:
            self.register_buffer("log_temperature", start)

    @property
    def temperature(self) -> float:
        """τ as it is now."""
        return float(self.log_temperature.detach().double().exp())

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as JSON values, without device and dtype."""
        return {
            **super().settings(),
            "temperature": self.initial_temperature,
            "learn_temperature": self.learn_temperature,
            "eps": self.eps,
        }

    # ---- the map

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
        dtype = torch.float64 if weights["out_proj.weight"].dtype == torch.float64 else torch.float32
        with torch.no_grad():
            parts = Parts.of(weights, self.num_heads, dtype, None)
        k = self.head_dim
        gain = torch.full((k,), k**-0.5, dtype=dtype, device=parts.query.device)
        norm = RMSNorm(gain, eps=self.eps / k)  # u ↦ √k u / √(|u|² + ε), times the gain
        temperature = float(weights["log_temperature"].detach().to(dtype).exp())
        return parts.attention(self.masking, scale, scale=temperature, query_norm=norm, key_norm=norm)

    # ---- the bound

    def _named_bound(self, log_formula: float, radius: float) -> Bound:
        return Bound.upper(
            "query_key_norm_layer",
            Quantity.MASKED if self.masking.kind == "causal" else Quantity.GLOBAL,
            "howsmooth, docs/theory/enforce.md, Normalised queries and keys",
            log_formula=log_formula,
        )

    def _log_bound(self, length: int, radius: float, weights: Weights) -> Tensor:
        matrices = {name: weight for name, weight in weights.items() if name != "log_temperature"}
        parts = Parts.of(matrices, self.num_heads)
        bound = query_key_norm_layer(
            parts.query,
            parts.key,
            parts.value,
            parts.output,
            rows_of(self.masking, length),
            radius,
            query_bias=parts.query_bias,
            key_bias=parts.key_bias,
            temperature=weights["log_temperature"].to("cpu", torch.float64).exp(),
            eps=self.eps,
        )
        return torch.log(bound)

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        with torch.no_grad():
            parts = Parts.of(weights, self.num_heads)
            return softmax_output_radius(
                parts.value, parts.output, parts.value_bias, parts.output_bias, radius
            )
