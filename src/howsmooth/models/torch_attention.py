"""Parameters of ``torch.nn.MultiheadAttention``: it computes in one function, in which no module is seen."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from howsmooth.models.projections import Projection, Projections
from howsmooth.models.watching import CoreCall

__all__ = ["multihead_parameters"]


def multihead_parameters(
    module: nn.MultiheadAttention, core: CoreCall
) -> tuple[Projections, Float[Tensor, "d_out inner"], Float[Tensor, " d_out"] | None]:
    """Read how queries, keys and values arise, and the output projection with its bias.

    They are read as PyTorch documents them; that the module uses them so is verified by value afterwards.
    """
    packed: Tensor | None = module.in_proj_weight
    apart = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights = list(packed.chunk(3)) if packed is not None else apart
    bias: Tensor | None = module.in_proj_bias
    biases: list[Tensor | None] = [None] * 3 if bias is None else list(bias.chunk(3))

    def by_head(t: Tensor) -> Tensor:
        return t.detach().reshape(module.num_heads, -1, *t.shape[1:]).clone()

    query, key, value = (
        Projection(by_head(w), None if b is None else by_head(b))
        for w, b in zip(weights, biases, strict=True)
        if w is not None
    )
    output_bias: Tensor | None = module.out_proj.bias
    # Where it gives out its weights, PyTorch scales the queries before their product with the keys.
    factor = (module.embed_dim // module.num_heads) ** -0.5 / core.scale
    return (
        Projections(query, key, value, None, factor=factor),
        module.out_proj.weight.detach().clone(),
        None if output_bias is None else output_bias.detach().clone(),
    )
