"""Softmax attention on queries, keys and values: the part that every architecture shares.

Heads are grouped: queries (..., kv_heads, group, n, key_dim) against keys (..., kv_heads, n, key_dim),
so that query heads which share a key head are one matrix product and no key is repeated.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["attention_probabilities", "visible_keys", "weighted_values"]


def visible_keys(
    n: int, *, causal: bool, mask: Bool[Tensor, "n_mask n_mask"] | None, device: torch.device
) -> Bool[Tensor, "n n"] | None:
    """Return which keys (columns) each query (row) sees, or None if all of them."""
    if not causal:
        return mask
    triangle = torch.ones(n, n, dtype=torch.bool, device=device).tril_()
    return triangle if mask is None else triangle & mask


def attention_probabilities(
    q: Float[Tensor, "*batch kv_heads group n key_dim"],
    k: Float[Tensor, "*batch kv_heads n key_dim"],
    scale: float,
    visible: Bool[Tensor, "n n"] | None,
) -> Float[Tensor, "*batch kv_heads group n n"]:
    """Row softmax of scale · q kᵀ over the visible keys (theory: P, Definition 2.1)."""
    group, n = q.shape[-3], q.shape[-2]
    scores = (scale * (q.flatten(-3, -2) @ k.mT)).reshape(*k.shape[:-2], group, n, n)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1)


def weighted_values(
    p: Float[Tensor, "*batch kv_heads group n n"], v: Float[Tensor, "*batch kv_heads n value_dim"]
) -> Float[Tensor, "*batch kv_heads group n value_dim"]:
    """Σ_j P_ij v_j for each head."""
    return (p.flatten(-3, -2) @ v).reshape(*p.shape[:-1], v.shape[-1])
