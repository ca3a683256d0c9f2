"""Attention with LipschitzNorm (Dasoulas et al., 2021): scores are divided by norms of tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds.differentiable_variant_upper_bounds import lipschitz_norm_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights

__all__ = ["LipschitzNormAttention"]


class LipschitzNormAttention(LipschitzAttention):
    """Self-attention with LipschitzNorm, which is Lipschitz on the whole space under every mask.

    The scores of a head are ⟨q_i, k_j⟩ / max{uv, uw, vw} with u = ‖Q‖_F, v = max_j |k_j| and w = max_j |v_j|.
    Their absolute values are at most 1, so no attention weight of a row exceeds e² times another. The
    constant of a head in (Q, K, V) jointly is :func:`howsmooth.bounds.lipschitz_norm_upper_bound`. The
    constant of the layer follows from it and the norms of the projections.

    A token that no query sees, such as padding, counts as absent: its query, key and value are set to zero,
    so that they do not enter the norms. Parameters and errors are those of :class:`LipschitzAttention`;
    ``constant`` needs no radius, because the bound does not depend on it.

    See Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers with Application to
    Graph Neural Networks*, ICML 2021, and for the constant of the layer the documentation page "Enforce:
    layers with a constant that is proved", section "LipschitzNorm".
    """

    _needs_radius = False
    _bound_name = "lipschitz_norm_layer"
    _phrase = "attention with LipschitzNorm"

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        if added is not None:
            # A token is present if at least one query sees it.
            present = (added > -math.inf).any(dim=-2)[..., None].to(q.dtype)
            q, k, v = q * present, k * present, v * present
        u = _root(q.square().sum(dim=(-2, -1)))
        by_key, by_value = (_root(t.square().sum(dim=-1).amax(dim=-1)) for t in (k, v))
        # ‖Q‖_F max |k_j| is at least every |⟨q_i, k_j⟩|, so no score exceeds 1 in absolute value.
        divisor = torch.stack((u * by_key, u * by_value, by_key * by_value)).amax(dim=0)
        # If the divisor is zero, all scores are zero, and dividing by 1 keeps them so.
        divisor = torch.where(divisor > 0, divisor, 1.0)
        scores = q @ k.mT / divisor[..., None, None]
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        query, key, value = weights["in_proj_weight"].chunk(3)
        return lipschitz_norm_layer(query, key, value, weights["out_proj.weight"], rows)


def _root(square: Tensor) -> Tensor:
    """Return the square root of each entry, whose derivative at 0 is set to 0."""
    # The inner where keeps sqrt away from 0, where its infinite derivative would give NaN gradients.
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
