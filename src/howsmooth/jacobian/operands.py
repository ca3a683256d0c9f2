"""Queries, keys and values at the point of linearisation, in float64, without what no derivative feels.

A value bias is felt by no derivative, and a shift of all keys of a head by no softmax. Both may be far larger
than the differences that count, so they are taken away before anything is rounded: from the tokens themselves
where a projection is all that lies between, as V(x_j − x̄).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.core import ScoreFeatures
from howsmooth.attention.heads import in_heads

__all__ = ["Operands"]


@dataclass(frozen=True, eq=False)
class Operands:
    """The operands of one softmax, heads grouped by their key head.

    Parameters
    ----------
    q
        Scaled queries.
    k, v
        Keys and values, less their shifts. With a cap of the scores keys are not shifted: a shift would be
        multiplied by the cap's derivative, which differs in a row.
    key_shift, value_shift
        What was subtracted.
    features
        What is done to the scores.

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
        """Return the operands of given queries, keys and values, the latter two shifted by their means."""
        key_shift, value_shift = k.mean(dim=2, keepdim=True), v.mean(dim=2, keepdim=True)
        if features.softcap is not None:
            key_shift = torch.zeros_like(key_shift)
        q, k, v = ((scale * q).contiguous(), (k - key_shift).contiguous(), (v - value_shift).contiguous())
        return cls(q, k, v, key_shift, value_shift, features)

    @classmethod
    def of_tokens(cls, f: SelfAttention, x: Float[Tensor, "batch n d"]) -> Operands:
        """Return the operands of attention at tokens."""
        mean = x.mean(dim=-2, keepdim=True)
        centred = x - mean
        q, k = f.queries_and_keys(x)
        v, value_shift = in_heads(centred, f.value, None), in_heads(mean, f.value, f.value_bias)
        if f.softcap is not None:
            key_shift = torch.zeros_like(k[:, :, :1])
        elif f.rotary is not None or f.key_norm is not None:
            key_shift = k.mean(dim=2, keepdim=True)
            k = k - key_shift
        else:
            k, key_shift = in_heads(centred, f.key, None), in_heads(mean, f.key, f.key_bias)
        q = (f.scale * q).unflatten(1, (f.kv_heads, f.heads // f.kv_heads))
        return cls(q.contiguous(), k.contiguous(), v.contiguous(), key_shift, value_shift, f.features)

    @property
    def heads(self) -> int:
        """Number of members times that of key heads."""
        return self.k.shape[0] * self.k.shape[1]

    @property
    def whole_keys(self) -> Float[Tensor, "batch kv_heads n key_dim"]:
        """The keys as they are, unshifted."""
        return self.k + self.key_shift

    @property
    def whole_values(self) -> Float[Tensor, "batch kv_heads n value_dim"]:
        """The values as they are, unshifted."""
        return self.v + self.value_shift

    @property
    def score_keys(self) -> Float[Tensor, "batch kv_heads n key_dim"]:
        """The keys of which scores are formed: unshifted beside a sink, whose score does not shift along."""
        return self.k if self.features.sinks is None else self.whole_keys

    def outputs(
        self,
        averages: Float[Tensor, "b *rows value_dim"],
        total: Float[Tensor, "b *rows"],
    ) -> Float[Tensor, "b *rows value_dim"]:
        """Return the outputs O = Σ_j P_ij v_j of unshifted values, from averages of shifted ones.

        ``total`` is Σ_j P_ij, which a sink leaves below one.
        """
        shift = self.value_shift.reshape(self.heads, *(1,) * (averages.ndim - 2), -1)
        return averages + total[..., None] * shift
