"""L2 attention with equal query and key matrices (Kim et al., 2021), Lipschitz on the whole space."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from howsmooth.attention import L2Attention as L2Map
from howsmooth.attention import TokenMap
from howsmooth.bounds.differentiable_variant_upper_bounds import l2_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Parts, Weights, scaled_weights
from howsmooth.nn.checks import check

__all__ = ["L2Attention"]


class L2Attention(LipschitzAttention):
    """L2 self-attention with one matrix for queries and keys, and with a proved Lipschitz constant.

    Head h has queries and keys u_i = Q_h x_i, weights P_ij ∝ exp(−|u_i − u_j|²/√k) and values V_h Q_hᵀ u_j/√k
    + b_v. Without a radius, the bound is :func:`howsmooth.bounds.l2_attention_upper_bound`, of order √n log
    n. On a ball it is smaller, and for n above e^{4a}, a = ‖Q_h‖²R²/√k, it does not depend on n.
    ``constant`` needs no radius; without one it holds on the whole space, and each token must see itself.
    Parameters and errors are those of :class:`LipschitzAttention`.

    Attributes
    ----------
    in_proj_weight
        The weights (2 · embed_dim, embed_dim), Q above V. Query and key biases would have no effect.
    value_bias
        The bias of the values (embed_dim,), or None.
    out_proj
        The output projection, as in torch.nn.MultiheadAttention.

    See Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021, and for masks and
    balls the documentation page "Enforce: layers with a constant that is proved", section "L2 attention on a
    ball".
    """

    _needs_radius = False
    _bound_name = "l2_layer"
    _phrase = "L2 attention"
    _matrices = 2
    _bias = ("value_bias", 1)

    def __init__(self, embed_dim: int, num_heads: int, **keywords: Any) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        if self.radius is not None:
            return
        hidden = self.masking.hidden
        # Layers of these kinds may be given a mask in which a token does not see itself.
        blind = self.masking.kind in ("any", "additive") or (
            hidden is not None and bool(hidden.diagonal().any())
        )
        check(
            not blind or self.constant is None,
            "radius",
            "a number, because a token may be hidden from itself",
            "None",
            "L2 attention is Lipschitz on the whole space only if each token sees itself.",
        )

    def _parts(self, weights: Weights) -> Parts:
        """Return queries and keys Q_h (k, d), values V_h Q_hᵀQ_h/√k (k, d) and the rest, for all heads h."""
        query, folded = self._folded(weights)
        output, bias, own = (weights.get(n) for n in ("out_proj.weight", "value_bias", "out_proj.bias"))
        assert output is not None
        by_head = None if bias is None else self._cut(bias)
        return Parts(query, query, folded @ query, output, None, None, by_head, own)

    def _folded(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return Q_h (k, d), and V_h Q_hᵀ/√k (k, k), which maps queries to values, for all heads h."""
        query, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return query, value @ query.mT / math.sqrt(self.head_dim)

    def _queries_keys_values(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        query, folded = self._folded(weights)
        u = self._by_head(x @ query.flatten(0, 1).mT)
        v = u @ folded.mT
        if "value_bias" in weights:
            v = v + self._cut(weights["value_bias"])[:, None]
        return u, u, v

    def _scores(self, q: Tensor, k: Tensor, weights: Weights) -> Tensor:
        # −|u − k|² = 2⟨u, k⟩ − |k|² up to −|u|², which is constant in each row. Centring makes the vectors
        # shorter, so that fewer digits cancel.
        centre = k.mean(dim=-2, keepdim=True)
        q, k = q - centre, k - centre
        return (2 * q @ k.mT - k.square().sum(dim=-1)[..., None, :]) / math.sqrt(self.head_dim)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        query, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return l2_layer(query, value, weights["out_proj.weight"], rows, radius)

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        if self.masking.hidden is not None:
            return super()._map(weights, scale)
        parts, causal = self._parts(scaled_weights(weights, scale)), self.masking.kind == "causal"
        return parts.as_map(L2Map, scale=1 / math.sqrt(self.head_dim), causal=causal)
