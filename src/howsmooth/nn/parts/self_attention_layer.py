"""Self-attention as a module from tokens to tokens, which can be used in torch.nn.Sequential."""

from __future__ import annotations

from torch import Tensor

from howsmooth.bounds import Bound
from howsmooth.nn.checks import check
from howsmooth.nn.lipschitz_module import LipschitzModule

__all__ = ["SelfAttentionBlock"]


class SelfAttentionBlock(LipschitzModule):
    """The module x ↦ attention(x, x, x), which returns tokens without attention weights.

    ``attention`` is an attention layer of ``hs.nn``, which itself returns a pair of tokens and weights, like
    ``torch.nn.MultiheadAttention``. The constant is that of the attention layer.
    """

    def __init__(self, attention: LipschitzModule) -> None:
        super().__init__()
        known = isinstance(attention, LipschitzModule)
        check(known, "attention", "an attention layer of hs.nn", type(attention).__name__)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """Return the self-attention output for tokens (batch, n, d), without the attention weights."""
        tokens: Tensor = self.attention(x, need_weights=False)[0]
        return tokens

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return the Lipschitz bound of the attention layer in this block."""
        return self.attention.lipschitz_bound(length, radius)

    def output_radius(self, length: int, radius: float) -> float:
        """Return the attention layer's upper bound on the norms of its output tokens."""
        return self.attention.output_radius(length, radius)

    def output_length(self, length: int) -> int:
        """Return the number of tokens that the attention layer returns."""
        return self.attention.output_length(length)
