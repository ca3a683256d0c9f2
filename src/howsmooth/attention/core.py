"""Softmax attention on queries, keys and values: the part that every architecture shares.

Heads are grouped: queries (..., kv_heads, group, n, key_dim) against keys (..., kv_heads, n, key_dim),
so that query heads which share a key head are one matrix product and no key is repeated.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["attention_probabilities", "attention_scores", "visible_keys", "weighted_values"]


def visible_keys(
    n: int, *, causal: bool, mask: Bool[Tensor, "n_mask n_mask"] | None, device: torch.device
) -> Bool[Tensor, "n n"] | None:
    """Return which keys (columns) each query (row) sees, or None if all of them."""
    if not causal:
        return mask
    triangle = torch.ones(n, n, dtype=torch.bool, device=device).tril_()
    return triangle if mask is None else triangle & mask


def attention_scores(
    q: Float[Tensor, "*batch kv_heads group m key_dim"],
    k: Float[Tensor, "*batch kv_heads n key_dim"],
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    log_weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "*batch kv_heads group m n"]:
    """Return scale · q kᵀ + log a, −∞ where the key is not visible: the softmax of its rows is P."""
    group, m = q.shape[-3], q.shape[-2]
    scores = (scale * (q.flatten(-3, -2) @ k.mT)).reshape(*k.shape[:-2], group, m, k.shape[-2])
    if log_weights is not None:
        scores = scores + log_weights.to(scores.dtype)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def attention_probabilities(
    q: Float[Tensor, "*batch kv_heads group m key_dim"],
    k: Float[Tensor, "*batch kv_heads n key_dim"],
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    log_weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "*batch kv_heads group m n"]:
    """P_ij ∝ a_j exp(scale · ⟨q_i, k_j⟩) over the visible keys; a_j = 1/n without weights (2.1, C.4)."""
    return torch.softmax(attention_scores(q, k, scale, visible, log_weights), dim=-1)


def weighted_values(
    p: Float[Tensor, "*batch kv_heads group m n"], v: Float[Tensor, "*batch kv_heads n value_dim"]
) -> Float[Tensor, "*batch kv_heads group m value_dim"]:
    """Σ_j P_ij v_j for each head."""
    return (p.flatten(-3, -2) @ v).reshape(*p.shape[:-1], v.shape[-1])
