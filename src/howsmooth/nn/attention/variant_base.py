"""Base class of the attention layers other than softmax attention.

The Lipschitz bound of such a layer is one differentiable function of its weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.bounds import Bound, Quantity
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import rows_of
from howsmooth.nn.attention.map_from_function import LayerMap
from howsmooth.nn.upward_rounding import rounded_up

__all__ = ["AttentionVariant", "hull_radius", "in_double", "scaled_weights"]

_SOURCE = 'howsmooth documentation, "Enforce"'

Weights = Mapping[str, Tensor]


class AttentionVariant(LipschitzAttention):
    """Base class of attention layers whose Lipschitz bound is a differentiable function of the weights.

    A subclass defines ``_bound`` beside what :class:`LipschitzAttention` asks for.
    """

    _needs_radius = False
    #: Name of the bound.
    _bound_name: str
    #: Name of the attention variant, for descriptions.
    _phrase: str

    @abstractmethod
    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        """Return the Lipschitz bound that the layer has before its output is rescaled.

        The result is a float64 scalar that is differentiable in the weights. ``rows`` says how many keys each
        query sees under the layer's masks, ``radius`` is the largest norm of a token, possibly infinite, and
        ``weights`` are in float64 on the CPU.
        """

    def _named_bound(self, log_formula: float, radius: float) -> Bound:
        quantity = Quantity.GLOBAL if math.isfinite(radius) else Quantity.EVERYWHERE
        return Bound.upper(self._bound_name, quantity, _SOURCE, log_formula=log_formula)

    def _log_bound(self, length: int, radius: float, weights: Weights) -> Tensor:
        return self._bound(rows_of(self.masking, length), radius, in_double(weights)).log()

    @property
    def _bound_radius(self) -> float:
        # These bounds hold for all tokens, so a layer without a radius is divided by the bound at infinity.
        return math.inf if self.radius is None else self.radius

    def _cut(self, weight: Tensor) -> Tensor:
        """Split a weight (heads · k, d) or a bias (heads · k,) into heads, along a new first axis."""
        heads: Tensor = weight.unflatten(0, (self.num_heads, -1))
        return heads

    def _attended(self, x: Tensor, weights: Weights) -> Tensor:
        """Return the output of the layer without its rescaling to the target constant.

        ``x`` are tokens (batch, n, d). The mask that every call applies is taken into account.
        """
        # The map has the mask that every call applies; masks of single calls are not part of it.
        hidden = self.masking.always(x.shape[-2])
        added = None
        if hidden is not None:
            zeros = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
            added = zeros.masked_fill(hidden.to(x.device), -math.inf)[None, None]
        return self._undivided(x, added, weights)[0]

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        masked = "" if self.masking.kind in ("none", "any", "additive") else f", {self.masking.kind} mask"
        heads = f"{self.num_heads} head{'s' if self.num_heads > 1 else ''}"
        return LayerMap(
            self._attended,
            scaled_weights(weights, scale),
            d=self.embed_dim,
            d_out=self.embed_dim,
            length=None if self.masking.hidden is None else self.length,
            description=f"{self._phrase}, {heads}{masked}, with output projection",
        )


def scaled_weights(weights: Weights, scale: float) -> dict[str, Tensor]:
    """Return detached weights in float32 or float64, with the output projection multiplied by ``scale``."""
    dtype = torch.float64 if weights["out_proj.weight"].dtype == torch.float64 else torch.float32
    scaled = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    for name in ("out_proj.weight", "out_proj.bias"):
        if name in scaled:
            scaled[name] = scaled[name] * scale
    return scaled


def in_double(weights: Weights) -> dict[str, Tensor]:
    """Convert the weights to float64 on the CPU by operations that are differentiable."""
    return {name: weight.to("cpu", torch.float64) for name, weight in weights.items()}


def hull_radius(
    output: Tensor, values: Tensor, biases: tuple[Tensor | None, Tensor | None], radius: float
) -> float:
    """Return an upper bound on the norms of all output tokens of an attention layer.

    An output token is W_O (c + b_v) + b_O, where c joins the outputs c_h of all heads. The output c_h of head
    h is a mean of vectors V_h x with |x| <= ``radius``. ``output`` is W_O (d_out, heads · k), ``values`` are
    the V_h (heads, k, d), and ``biases`` are b_v and b_O.
    """
    blocks = output.unflatten(1, (len(values), -1)).transpose(0, 1)
    summed = torch.linalg.matrix_norm(blocks @ values, 2).sum()
    apart = torch.linalg.matrix_norm(output, 2) * torch.linalg.matrix_norm(values, 2).square().sum().sqrt()
    # Two bounds on the norm of the linear part hold: the sum over heads, and the norms of both factors.
    by_value, own = biases
    shift = torch.zeros(len(output), dtype=output.dtype) if own is None else own
    if by_value is not None:
        shift = shift + output @ by_value
    return rounded_up(float(radius * torch.minimum(summed, apart) + torch.linalg.vector_norm(shift)))
