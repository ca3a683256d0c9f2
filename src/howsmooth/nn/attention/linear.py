"""Linear attention (Katharopoulos et al., 2020) with the features elu + 1, which is Lipschitz on a ball."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from howsmooth.bounds.differentiable_variant_upper_bounds import linear_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.variant_base import AttentionVariant, hull_radius, in_double, log_kernel

__all__ = ["LinearAttention"]


class LinearAttention(AttentionVariant):
    """Normalised linear self-attention with the features elu + 1, which has a proved Lipschitz constant on a
    ball.

    The attention weights of a head are P_ij ∝ ⟨φ(q_i), φ(k_j)⟩ with φ(u) = elu(u) + 1 > 0 in each coordinate.
    The logarithm of such a product is 1-Lipschitz in the query and in the key, because φ' <= φ. So the
    constant grows linearly with the radius, and does not depend on n for n above e^{2R‖K‖}. The proof is in
    the documentation, page "Other attentions".

    The layer computes all n² weights of a head, as its siblings do, and from the logarithms of the features,
    so that no product of features vanishes by rounding. Its memory is n²k a head.

    Every kind of mask is supported. Numbers that a mask adds are added to the logarithms of the products.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As for :class:`~howsmooth.nn.attention.base.LipschitzAttention`. ``constant`` requires a radius.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    References
    ----------
    Katharopoulos, Vyas, Pappas, Fleuret, *Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention*, ICML 2020, for the attention.

    """

    _needs_radius = True
    _bound_name = "linear_layer"
    _phrase = "linear attention"

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Mapping[str, Tensor]
    ) -> Tensor:
        scores = torch.logsumexp(log_kernel(_log_feature(q), _log_feature(k)), dim=-1)
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _bound(self, rows: VisibleRows, radius: float, weights: Mapping[str, Tensor]) -> Tensor:
        query, key, value = (self._cut(part) for part in weights["in_proj_weight"].chunk(3))
        return linear_layer(query, key, value, weights["out_proj.weight"], rows, radius)

    @torch.no_grad()
    def _undivided_output_radius(self, length: int, radius: float, weights: Mapping[str, Tensor]) -> float:
        w = in_double(weights)
        b_v = w["in_proj_bias"].chunk(3)[2] if self.bias else None
        value = self._cut(w["in_proj_weight"].chunk(3)[2])
        return hull_radius(w["out_proj.weight"], value, (b_v, w.get("out_proj.bias")), radius)


def _log_feature(u: Tensor) -> Tensor:
    """Return log(elu(u) + 1), which is u for u <= 0 and log(1 + u) for u > 0."""
    return torch.where(u > 0, torch.log1p(u.clamp(min=0)), u)
