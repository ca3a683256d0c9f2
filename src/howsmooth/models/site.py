"""One attention layer of one model at one input: what ``capture`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, TokenMap

__all__ = ["Site"]


@dataclass(frozen=True, eq=False)
class Site:
    """A map taken from a model, and the tokens at which the model applied it.

    The parameters of ``map`` and the tokens ``x`` are copies: neither later training of the model nor
    anything done to the site changes the other.
    """

    #: Path of the attention module in the model.
    name: str
    #: Index of the layer, counting the model's attention calls from 0.
    layer: int
    #: The head, in scope ``head``; None in the others.
    head: int | None
    #: ``head``: one head, value projection only. ``heads``: all heads concatenated, before the output
    #: projection. ``attention``: with the output projection. ``residual``: X + attention(X) at the
    #: attention's own input X; in a pre-norm model no part of the model computes this, there it is notional.
    #: ``block``: residual and norm as the model has them, N(X + attention(X)) at X for post-norm,
    #: H + attention(N(H)) at the layer's input H for pre-norm.
    scope: str
    #: Whether a token sees only itself and those before it.
    causal: bool
    #: The mask in words: ``none``, ``causal``, ``sliding window 128, causal``, ...
    masking: str
    #: How the model arranges residual and norm: ``post-norm``, ``pre-norm``, ``sandwich norms``,
    #: ``norm of the branch``, ``parallel`` or ``no norm``; behind a comma ``layer scale``,
    #: ``scaled residual`` or ``residual after the norm``; empty if not recognised.
    layout: str
    #: How its Jacobian is had: ``closed form`` (that of the softmax is; ``path_reason`` tells of the rest of
    #: the layer) or ``autodiff``.
    path: str
    #: Why it is that one, in a sentence.
    path_reason: str
    #: The tokens, (batch, n, d), in the model's dtype and on its device.
    x: Float[Tensor, "batch n d"]
    #: The map, X (..., n, d) -> (..., n, d_out).
    map: TokenMap
    #: The norm layer whose outputs the tokens are (the model's norm before this attention), or None: whatever
    #: the model is given, the tokens lie in its ellipsoid. None for scope ``block`` of a pre-norm model.
    norm: LayerNorm | RMSNorm | None
    #: Which sequence of a padded batch, real tokens only; None if all have the same length and share a site.
    sequence: int | None = None
    #: Root mean square of the token norms |x_i|, for each batch member.
    radius_mean: Float64[Tensor, " batch"] = field(init=False)
    #: Largest token norm, for each batch member.
    radius_max: Float64[Tensor, " batch"] = field(init=False)

    def __post_init__(self) -> None:
        norms = torch.linalg.vector_norm(self.x.double(), dim=-1).cpu()
        object.__setattr__(self, "radius_mean", norms.square().mean(dim=-1).sqrt())
        object.__setattr__(self, "radius_max", norms.amax(dim=-1))

    def __repr__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        head += "" if self.sequence is None else f", sequence {self.sequence}"
        batch, n, d = self.x.shape
        return (
            f"Site({self.name}, layer {self.layer}{head}, scope {self.scope}, masking {self.masking}, "
            f"{batch} x {n} tokens of dimension {d})"
        )
