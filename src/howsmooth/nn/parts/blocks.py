"""Attention as a map of tokens alone, for Sequential and residuals."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from howsmooth.bounds import Bound
from howsmooth.errors import ArgumentError
from howsmooth.nn.contract import LipschitzModule

__all__ = ["SelfAttentionBlock"]


class SelfAttentionBlock(LipschitzModule):
    """x ↦ attention(x, x, x), the tokens without the attention weights; the constant is that of the layer.

    The layers of attention return a pair, as ``torch.nn.MultiheadAttention`` does.

    Parameters
    ----------
    attention
        A layer of attention of ``hs.nn``.

    """

    def __init__(self, attention: LipschitzModule) -> None:
        super().__init__()
        if not isinstance(attention, LipschitzModule):
            raise ArgumentError(
                "attention", expected="an attention layer of hs.nn", got=type(attention).__name__
            )
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, n, d)."""
        output = self.attention(x, need_weights=False)
        assert isinstance(output, tuple)
        tokens = output[0]
        assert isinstance(tokens, Tensor)
        return tokens

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return that of the layer."""
        return self.attention.lipschitz_bound(length, radius)

    def output_radius(self, length: int, radius: float) -> float:
        """Return that of the layer."""
        return self.attention.output_radius(length, radius)

    def output_length(self, length: int) -> int:
        """Return that of the layer."""
        return self.attention.output_length(length)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor besides ``attention``: none."""
        return {}
