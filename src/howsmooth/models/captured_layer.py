"""The classes ``Site`` and ``CrossSite``, in which ``capture`` returns an attention layer with its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, TokenMap

__all__ = ["CrossSite", "Site"]


@dataclass(frozen=True, eq=False)
class Site:
    """One attention layer of a model as a map, with the tokens to which the model applied it.

    The parameters of ``map`` and the tokens ``x`` are copies: later training of the model does not change the
    site, and changes of the site do not change the model.
    """

    #: Path of the attention module in the model.
    name: str
    #: Index of the layer, counting the model's attention calls from 0.
    layer: int
    #: Index of the head in scope ``head``; None in the other scopes.
    head: int | None
    #: Which part of the layer the map is. ``head``: one head, without output projection. ``heads``: all heads
    #: concatenated, without output projection. ``attention``: all heads with the output projection.
    #: ``residual``: X + attention(X) at the input X of the attention; a pre-norm model computes this nowhere.
    #: ``block``: attention with residual and norm as the model has them, N(X + attention(X)) at X for
    #: post-norm, H + attention(N(H)) at the layer's input H for pre-norm.
    scope: str
    #: Whether a token sees only itself and earlier tokens.
    causal: bool
    #: The mask in words: ``none``, ``causal``, ``sliding window 128, causal``, ...
    masking: str
    #: How the model arranges residual and norm: ``post-norm``, ``pre-norm``, ``sandwich norms``,
    #: ``norm of the branch``, ``parallel`` or ``no norm``; after a comma follows ``layer scale``,
    #: ``scaled residual`` or ``residual after the norm``. Empty if the arrangement is not recognised.
    layout: str
    #: How the Jacobian is computed: ``closed form`` (at least for the softmax; ``path_reason`` says how the
    #: rest of the layer is differentiated) or ``autodiff``.
    path: str
    #: Why the Jacobian is computed in this way.
    path_reason: str
    #: The tokens, (batch, n, d), in the model's dtype and on its device.
    x: Float[Tensor, "batch n d"]
    #: The map, X (..., n, d) -> (..., n, d_out).
    map: TokenMap
    #: The norm layer whose outputs are the tokens, or None if there is none. With a norm, the tokens lie in
    #: the ellipsoid of its outputs for every input of the model. None for scope ``block`` of a pre-norm
    #: model.
    norm: LayerNorm | RMSNorm | None
    #: The dtype in which the model stores its weights. The map and its tokens are in ``x.dtype``, which is
    #: float32 where the weights are stored in half precision.
    stored: torch.dtype
    #: Index of the sequence in a padded batch, if the sequences are captured one by one; None otherwise.
    sequence: int | None = None
    #: Root mean square of the token norms |x_i|, for each sequence of the batch.
    radius_mean: Float64[Tensor, " batch"] = field(init=False)
    #: Largest token norm, for each sequence of the batch.
    radius_max: Float64[Tensor, " batch"] = field(init=False)

    def __post_init__(self) -> None:
        norms = torch.linalg.vector_norm(self.x.double(), dim=-1).cpu()
        object.__setattr__(self, "radius_mean", norms.square().mean(dim=-1).sqrt())
        object.__setattr__(self, "radius_max", norms.amax(dim=-1))

    def __repr__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        head += "" if self.sequence is None else f", sequence {self.sequence}"
        batch, n, d = self.x.shape
        stored = (
            ""
            if self.stored == self.x.dtype
            else f", weights stored in {str(self.stored).removeprefix('torch.')}"
        )
        return (
            f"Site({self.name}, layer {self.layer}{head}, scope {self.scope}, masking {self.masking}, "
            f"{batch} x {n} tokens of dimension {d}{stored})"
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CrossSite(Site):
    """One cross-attention layer of a model for one sequence of a batch. It is a map of the query tokens, of
    the memory (the sequence that gives the keys and values), or of both.

    ``local_lipschitz(site.map, site.x)`` measures the constant of that side. PyTorch differentiates a copy of
    the model's module.
    """

    #: Which sequence varies. ``queries``: the tokens of the queries, at the fixed memory. ``memory``: the
    #: memory, at the fixed tokens. ``joint``: both, stacked, the tokens first; the shorter tokens end with
    #: zeros, which are ignored.
    side: str
    #: The tokens (m, d) that give the queries.
    queries: Float[Tensor, "m d_queries"]
    #: The memory (n, d_memory) that gives keys and values.
    memory: Float[Tensor, "n_memory d_memory"]

    def __repr__(self) -> str:
        sequence = "" if self.sequence is None else f", sequence {self.sequence}"
        return (
            f"CrossSite({self.name}, layer {self.layer}{sequence}, side {self.side}, masking {self.masking}, "
            f"{len(self.queries)} queries, {len(self.memory)} memory tokens)"
        )
