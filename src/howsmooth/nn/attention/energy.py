"""Energy attention, which is the gradient of a convex function of all tokens.

With ``constant=1``, gradient steps on this convex function are 1-Lipschitz.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.bounds.differentiable_variant_upper_bounds import energy_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError
from howsmooth.nn.attention.head_weights import rows_of
from howsmooth.nn.attention.variant_base import AttentionVariant, in_double, log_kernel
from howsmooth.nn.upward_rounding import rounded_up

__all__ = ["EnergyAttention"]


class EnergyAttention(AttentionVariant):
    """Attention that is the gradient of a convex function of all tokens and is Lipschitz on the whole space.

    Head h has k features a, with vectors b_a for queries, c_a for keys, and a number d_a. The layer is the
    gradient of the sum over heads of

        E(X) = Σ_i log Σ_{j, a} exp(⟨b_a, x_i⟩ + ⟨c_a, x_j⟩ + d_a),

    where j runs over the tokens that i sees. With the softmax P_i of token i over the pairs (j, a), token i
    receives Σ_{j,a} P_ija b_a, and every token j that it sees receives Σ_a P_ija c_a. The attention weights
    Σ_a P_ija are those of linear attention with exponential features. What a token receives is chosen by the
    features of the tokens that it sees.

    E is convex, and its Hessian is at most the layer's bound, so :class:`~howsmooth.nn.GradientStep`, X − 2 w
    f(X) with 0 <= w <= 1, is 1-Lipschitz if this layer has ``constant=1``. The proof is in the documentation,
    page "Other attentions".

    Every kind of mask is supported. A token that no query sees, such as padding, counts as absent: it is no
    query either, because queries push the tokens that they see.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As for :class:`~howsmooth.nn.attention.base.LipschitzAttention`. ``radius`` may be None even with
        ``constant``, because the bound does not depend on it.
    scale
        A positive factor of the output. :func:`~howsmooth.nn.deploy` keeps the divisor in it.

    Attributes
    ----------
    in_proj_weight
        The weights (2 · embed_dim, embed_dim): the rows b_a of all heads above the rows c_a.
    feature_bias
        The numbers d_a (embed_dim,), or None.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    References
    ----------
    The idea of steps along the negative gradient of an energy, which are 1-Lipschitz, is that of Meunier,
    Delattre, Araujo, Allauzen, *A Dynamical System Perspective for Lipschitz Neural Networks*, ICML 2022, and
    for attention of Furuya, Murari, Schönlieb, *Approximation Theory for Lipschitz Continuous Transformers*,
    2026 (arXiv 2602.15503). Their energy could not be read; this one is ours.

    """

    _bound_name = "energy_layer"
    _phrase = "energy attention"

    _of_bound: ClassVar[tuple[str, ...]] = ("scale",)

    def __init__(self, embed_dim: int, num_heads: int, *, scale: float = 1.0, **keywords: Any) -> None:
        known = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not (known and math.isfinite(scale) and scale > 0):
            raise ArgumentError("scale", expected="a finite number > 0", got=repr(scale))
        super().__init__(embed_dim, num_heads, **keywords)
        self.scale = float(scale)

    def _make_weights(self, factory: dict[str, Any]) -> None:
        d = self.embed_dim
        self.in_proj_weight = nn.Parameter(torch.empty((2 * d, d), **factory))
        # Read by torch.nn.TransformerEncoderLayer.
        self.register_parameter("in_proj_bias", None)
        if self.bias:
            self.feature_bias = nn.Parameter(torch.zeros(d, **factory))
        else:
            self.register_parameter("feature_bias", None)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def _weights(self) -> dict[str, Tensor]:
        found = {"in_proj_weight": self.in_proj_weight, "feature_bias": self.feature_bias}
        return {name: weight for name, weight in found.items() if weight is not None}

    def _undivided(
        self, x: Tensor, added: Tensor | None, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        by_query, by_key = weights["in_proj_weight"].chunk(2)
        q, k = nn.functional.linear(x, by_query, weights.get("feature_bias")), x @ by_key.mT
        logs = log_kernel(self._by_head(q), self._by_head(k))
        scores = torch.logsumexp(logs, dim=-1)
        p = torch.softmax(scores if added is None else scores + added, dim=-1)
        pulls = p
        if added is not None:
            # A token is present if at least one query sees it.
            pulls = p * (added > -math.inf).any(dim=-2)[..., None].to(p.dtype)
        joint = pulls[..., None] * torch.softmax(logs, dim=-1)
        to_query, to_key = (joint.sum(dim=axis).transpose(1, 2).flatten(2) for axis in (-2, -3))
        return self.scale * (to_query @ by_query + to_key @ by_key), p

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Mapping[str, Tensor]
    ) -> Tensor:
        raise NotImplementedError("the weights of energy attention are computed with its output")

    def _bound(self, rows: VisibleRows, radius: float, weights: Mapping[str, Tensor]) -> Tensor:
        query, key = (self._cut(part) for part in weights["in_proj_weight"].chunk(2))
        return self.scale * energy_layer(query, key, rows)

    @torch.no_grad()
    def _undivided_output_radius(self, length: int, radius: float, weights: Mapping[str, Tensor]) -> float:
        b, c = (self._cut(part) for part in in_double(weights)["in_proj_weight"].chunk(2))
        queries = rows_of(self.masking, length).most_queries
        # A token receives a mean of the b_a, and from each query that sees it at most one mean of the c_a.
        longest = [torch.linalg.vector_norm(t, dim=-1).amax(dim=-1).sum() for t in (b, c)]
        return rounded_up(self.scale * float(longest[0] + queries * longest[1]))

    def _fold_divisor(self) -> None:
        if self.constant is not None:
            self.scale *= self._inverse_to_fold()
            self.constant = None

    def _map(self, weights: Mapping[str, Tensor], scale: float) -> TokenMap:
        return self._layer_map({name: weight.detach() for name, weight in weights.items()}, scale)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor as JSON values, without device and dtype."""
        return super().settings() | {"scale": self.scale}
