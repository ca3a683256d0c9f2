"""Softmax attention with normalised queries and keys (QK-norm)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from howsmooth.attention import RMSNorm, TokenMap
from howsmooth.bounds import Bound, Quantity
from howsmooth.bounds.differentiable_upper_bounds import query_key_norm_layer, softmax_output_radius
from howsmooth.nn.attention.base import LipschitzAttention, Weights, positive
from howsmooth.nn.attention.head_weights import Parts, rows_of

__all__ = ["QueryKeyNormAttention"]


class QueryKeyNormAttention(LipschitzAttention):
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

    _of_bound: ClassVar[tuple[str, ...]] = ("eps",)

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
        start = torch.tensor(math.log(positive("temperature", given)), device=device, dtype=dtype)
        if learn_temperature:
            self.log_temperature = nn.Parameter(start)
        else:
            self.register_buffer("log_temperature", start)

    @property
    def temperature(self) -> float:
        """The current temperature τ, by which the cosines in the scores are multiplied."""
        return float(self.log_temperature.detach().double().exp())

    # ---- the forward pass and the map

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
        # RMSNorm divides by √(|u|²/k + eps), so that eps = ε/k and the gain 1/√k give û.
        gain = torch.full((k,), k**-0.5, dtype=dtype, device=parts.query.device)
        norm = RMSNorm(gain, eps=self.eps / k)  # √k u / √(|u|² + ε) times the gain 1/√k
        temperature = float(weights["log_temperature"].detach().to(dtype).exp())
        return parts.attention(self.masking, scale, scale=temperature, query_norm=norm, key_norm=norm)

    # ---- the bound

    def _named_bound(self, log_formula: float, radius: float) -> Bound:
        return Bound.upper(
            "query_key_norm_layer",
            Quantity.MASKED if self.masking.kind == "causal" else Quantity.GLOBAL,
            'howsmooth documentation, "Enforce", Normalised queries and keys',
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
