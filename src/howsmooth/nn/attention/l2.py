"""L2 attention with equal query and key matrices (Kim et al., 2021), which is Lipschitz on the
whole space.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import L2Attention as L2Map
from howsmooth.attention import TokenMap
from howsmooth.bounds.differentiable_variant_upper_bounds import l2_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, hull_radius, in_double, scaled_weights

__all__ = ["L2Attention"]


class L2Attention(LipschitzAttention):
    """L2 self-attention with one matrix for queries and keys, and with a proved Lipschitz constant.

    Head h has queries and keys u_i = Q_h x_i, weights P_ij ∝ exp(−|u_i − u_j|²/√k) and values V_h Q_hᵀ u_j/√k
    + b_v. Without a radius, the bound is :func:`howsmooth.bounds.l2_attention_upper_bound`, of order √n log
    n. On a ball it is smaller, and for n above e^{4a}, a = ‖Q_h‖²R²/√k, it does not depend on n.

    The bound was compared with the largest local constant found by gradient ascent (five tokens of dimension
    4, one and two heads). The bound was 2 to 5 times larger at random weights, and 1.0 (R = 0.3) to 3.2 (R =
    3) times larger at the worst weights found.

    With a radius, every kind of mask is supported. Without a radius, each token must see itself.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As for :class:`~howsmooth.nn.attention.base.LipschitzAttention`. ``radius`` may be None even with
        ``constant``; the constant then holds on the whole space.

    Attributes
    ----------
    in_proj_weight
        The weights (2 · embed_dim, embed_dim), Q above V. Query and key biases would have no effect.
    value_bias
        The bias of the values (embed_dim,), or None.
    out_proj
        The output projection, as in torch.nn.MultiheadAttention.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    References
    ----------
    Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021. For masks and balls:
    documentation page "Enforce: layers with a constant that is proved", section "L2 attention on a ball".

    """

    _needs_radius = False
    _bound_name = "l2_layer"
    _phrase = "L2 attention"

    def __init__(self, embed_dim: int, num_heads: int, **keywords: Any) -> None:
        super().__init__(embed_dim, num_heads, **keywords)
        if self.radius is not None:
            return
        hidden = self.masking.hidden
        # Layers of these kinds may be given a mask in which a token does not see itself.
        blind = self.masking.kind in ("any", "additive") or (
            hidden is not None and bool(hidden.diagonal().any())
        )
        if blind and self.constant is not None:
            raise ArgumentError(
                "radius",
                expected="a number, because a token may be hidden from itself",
                got="None",
                remedy="L2 attention is Lipschitz on the whole space only if each token sees itself.",
            )

    def _make_weights(self, factory: dict[str, Any]) -> None:
        d = self.embed_dim
        self.in_proj_weight = nn.Parameter(torch.empty((2 * d, d), **factory))
        # Read by torch.nn.TransformerEncoderLayer.
        self.register_parameter("in_proj_bias", None)
        if self.bias:
            self.value_bias = nn.Parameter(torch.zeros(d, **factory))
        else:
            self.register_parameter("value_bias", None)
        self.out_proj = nn.Linear(d, d, bias=self.bias, **factory)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.bias:
            nn.init.zeros_(self.out_proj.bias)

    def _weights(self) -> dict[str, Tensor]:
        found = {
            "in_proj_weight": self.in_proj_weight,
            "value_bias": self.value_bias,
            "out_proj.weight": self.out_proj.weight,
            "out_proj.bias": self.out_proj.bias,
        }
        return {name: weight for name, weight in found.items() if weight is not None}

    def _folded(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return the query matrices of all heads, and the matrices that map a token's query to its value.

        L2 attention ties values to queries. For head h these matrices are Q_h (k, d) and V_h Q_hᵀ/√k (k, k).
        """
        query, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return query, value @ query.mT / math.sqrt(self.head_dim)

    def _queries_keys_values(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        query, folded = self._folded(weights)
        u = self._by_head(x @ query.flatten(0, 1).mT)
        v = u @ folded.mT
        if "value_bias" in weights:
            v = v + self._cut(weights["value_bias"])[:, None]
        return u, u, v

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        # −|u − k|² = 2⟨u, k⟩ − |k|² up to −|u|², which is constant in each row. Centring makes the vectors
        # shorter, so that fewer digits cancel.
        centre = k.mean(dim=-2, keepdim=True)
        q, k = q - centre, k - centre
        scores = (2 * q @ k.mT - k.square().sum(dim=-1)[..., None, :]) / math.sqrt(self.head_dim)
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        query, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return l2_layer(query, value, weights["out_proj.weight"], rows, radius)

    @torch.no_grad()
    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        w = in_double(weights)
        query, folded = self._folded(w)
        biases = (w.get("value_bias"), w.get("out_proj.bias"))
        return hull_radius(w["out_proj.weight"], folded @ query, biases, radius)

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        if self.masking.hidden is not None:
            return super()._map(weights, scale)
        w = scaled_weights(weights, scale)
        query, folded = self._folded(w)
        return L2Map(
            query,
            query,
            folded @ query,
            w["out_proj.weight"],
            value_bias=self._cut(w["value_bias"]) if self.bias else None,
            output_bias=w["out_proj.bias"] if self.bias else None,
            scale=1 / math.sqrt(self.head_dim),
            causal=self.masking.kind == "causal",
        )
