"""The queries, keys and values of an attention layer at given tokens. The mean of the keys is subtracted from
the keys, and the mean of the values from the values.

The derivative does not change if all values of a head, or all its keys, are shifted by one vector. Such a
common part may be far larger than the differences that matter, so it is subtracted before anything is
rounded. If only a projection lies between tokens and values, the tokens are centred: V(x_j − x̄). The values
are then never formed with the common part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.multi_head_projections import in_heads
from howsmooth.attention.scaled_dot_product import ScoreFeatures

__all__ = ["Operands"]


@dataclass(frozen=True, eq=False)
class Operands:
    """The scaled queries, the keys and the values of one softmax attention.

    ``key_shift`` and ``value_shift`` were subtracted from keys and values. If the scores have a cap, the key
    shift is zero: the derivative of the cap differs within a row, so the softmax would not forget the shift.
    """

    q: Float[Tensor, "batch kv_heads group m key_dim"]
    k: Float[Tensor, "batch kv_heads n key_dim"]
    v: Float[Tensor, "batch kv_heads n value_dim"]
    key_shift: Float[Tensor, "batch kv_heads 1 key_dim"]
    value_shift: Float[Tensor, "batch kv_heads 1 value_dim"]
    features: ScoreFeatures

    @classmethod
    def of_heads(
        cls,
        q: Float[Tensor, "batch kv_heads group m key_dim"],
        k: Float[Tensor, "batch kv_heads n key_dim"],
        v: Float[Tensor, "batch kv_heads n value_dim"],
        scale: float,
        features: ScoreFeatures,
    ) -> Operands:
        """Scale given queries, and centre given keys and values by subtracting their means."""
        key_shift, value_shift = k.mean(dim=2, keepdim=True), v.mean(dim=2, keepdim=True)
        if features.softcap is not None:
            key_shift = torch.zeros_like(key_shift)
        q, k, v = ((scale * q).contiguous(), (k - key_shift).contiguous(), (v - value_shift).contiguous())
        return cls(q, k, v, key_shift, value_shift, features)

    @classmethod
    def of_tokens(cls, f: SelfAttention, x: Float[Tensor, "batch n d"]) -> Operands:
        """Compute scaled queries, centred keys and centred values of the layer ``f`` at tokens ``x``."""
        mean = x.mean(dim=-2, keepdim=True)
        centred = x - mean
        q, k = f.queries_and_keys(x)
        v, value_shift = in_heads(centred, f.value, None), in_heads(mean, f.value, f.value_bias)
        # Keys are centred as far as the softmax forgets their shift.
        if f.softcap is not None:
            key_shift = torch.zeros_like(k[:, :, :1])
        elif f.rotary is not None or f.key_norm is not None:
            # A rotation or norm after the projection: centred tokens do not give centred keys.
            key_shift = k.mean(dim=2, keepdim=True)
            k = k - key_shift
        else:
            k, key_shift = in_heads(centred, f.key, None), in_heads(mean, f.key, f.key_bias)
        q = (f.scale * q).unflatten(1, (f.kv_heads, f.heads // f.kv_heads))
        return cls(q.contiguous(), k.contiguous(), v.contiguous(), key_shift, value_shift, f.features)

    @property
    def heads(self) -> int:
        """The number of key heads times the number of sequences in the batch."""
        return self.k.shape[0] * self.k.shape[1]

    @property
    def whole_keys(self) -> Float[Tensor, "batch kv_heads n key_dim"]:
        """The keys as the layer computes them, before ``key_shift`` was subtracted."""
        return self.k + self.key_shift

    @property
    def whole_values(self) -> Float[Tensor, "batch kv_heads n value_dim"]:
        """The values as the layer computes them, before ``value_shift`` was subtracted."""
        return self.v + self.value_shift

    @property
    def score_keys(self) -> Float[Tensor, "batch kv_heads n key_dim"]:
        """The keys from which scores are computed: the shifted ones, or unshifted ones if there are sinks.

        With a sink, a shift of the keys would change P, because the sink's score does not move with the keys.
        """
        return self.k if self.features.sinks is None else self.whole_keys
