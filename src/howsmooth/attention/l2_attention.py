"""L2 self-attention, whose scores are negative squared distances of query and key (Kim et al., 2021)."""

from __future__ import annotations

from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.masks import Visibility
from howsmooth.attention.multi_head_projections import HeadsAttention
from howsmooth.attention.scaled_dot_product import attend
from howsmooth.errors import ArgumentError

__all__ = ["L2Attention"]


class L2Attention(HeadsAttention):
    """Multi-head L2 self-attention, X (..., n, d) -> (..., n, d_out), with scores proportional to −|q_i −
    k_j|².

    f(X)_i = W_O · concat_h( Σ_j P^h_ij (V_h x_j + b_v,h) ) + b_O, where P^h is the row softmax of
    −scale · |Q_h x_i + b_q,h − K_h x_j − b_k,h|² over the visible keys j.

    The attention of Kim, Papamakarios and Mnih, which is Lipschitz on the whole space, has ``key`` equal to
    ``query``, scale 1/√k and the values V_h Q_hᵀQ_h / √k. :func:`howsmooth.bounds.l2_attention` bounds its
    Lipschitz constant.

    Parameters
    ----------
    query, key, value, output, query_bias, key_bias, value_bias, output_bias
        As for :class:`~howsmooth.attention.SelfAttention`.
    scale
        Factor > 0 of the squared distances.
    causal
        If True, token i sees only the tokens j <= i.

    Raises
    ------
    ArgumentError
        If a shape, dtype or device does not fit, or scale is not a finite number > 0.
    NonFiniteError
        If a parameter holds NaN or infinity.

    References
    ----------
    Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021. With scale 1 it is the
    L2 attention of Castin, Ablin, Carrillo, Peyré, *A Unified Perspective on the Dynamics of Deep
    Transformers*, 2025.

    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        scale: float = 1.0,
        causal: bool = False,
    ) -> None:
        super().__init__(query, key, value, output, query_bias, key_bias, value_bias, output_bias, scale)
        if self.scale <= 0:
            raise ArgumentError("scale", expected="a number > 0", got=f"{scale:g}")
        self.causal = bool(causal)

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return self._described("L2 attention", "causal" if self.causal else "unmasked")

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        q, k, v = self._project(x)
        q = self._grouped(q)
        # −|q − k|² = 2⟨q, k⟩ − |k|² − |q|², and the softmax of a row does not depend on |q|². Queries and
        # keys are shifted by the mean key: distances stay the same, and less cancels when they are small.
        centre = k.mean(dim=-2, keepdim=True)
        q, k = q - centre.unsqueeze(-3), k - centre
        terms = -self.scale * (k * k).sum(dim=-1)[..., None, None, :]
        visible = Visibility(x.shape[-2], self.causal)
        if weighting is not None:
            terms = terms + weighting.log_weights.to(terms.dtype)
            visible = weighting.visibility(causal=self.causal)
        return self._projected(attend(q, k, v, 2 * self.scale, visible, terms))
