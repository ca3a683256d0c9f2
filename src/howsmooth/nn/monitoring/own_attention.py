"""A call of an attention layer of ``howsmooth.nn`` in a forward pass, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.errors import CaptureError
from howsmooth.models.padded_sequences import Padding
from howsmooth.models.tolerance import lowest_epsilon, relative_error
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.monitoring.attention_statistics import ScoreStatistics

__all__ = ["OwnAttention"]

# Allowed difference of a layer and its map, in units of rounding. They sum in different orders, and the
# softmax amplifies the rounding errors of the scores.
_SAME = 1e4


@dataclass(eq=False)
class OwnAttention:
    """One call of an attention layer of howsmooth.nn, with the layer, its arguments and its output."""

    name: str
    module: LipschitzAttention
    arguments: dict[str, Any]
    output: Tensor | None = None
    map: TokenMap | None = None
    #: Whether the call applied this map to its tokens after clipping them, without a mask of the call.
    unmasked: bool = False
    #: Whether the call computed just this map, without a mask of the call and without clipping tokens.
    plain: bool = False

    def read(self, scope: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Return the function that the layer computed in this call, and its tokens (batch, n, d)."""
        if scope != "attention":
            raise CaptureError(f"{self} is measured in scope 'attention' only.")
        if self.output is None:
            raise CaptureError(f"{self} gave no output.")
        self.map = self.module.map
        x = self.arguments["query"].to(self.map.dtype)
        x = x if x.ndim == 3 else x[None]
        own = self.output.reshape(x.shape).to(x.dtype)
        inside = self._clipped(x)
        # If the map alone reproduces the output, the call used no mask of its own.
        allowed = _SAME * max(lowest_epsilon(own.dtype), lowest_epsilon(self.output.dtype))
        self.unmasked = relative_error(self.map(inside), own) <= allowed
        # Clipping is seen by the norms: it hardly changes the output of a token that is just outside of the
        # ball, but it removes the radial part of the derivative.
        self.plain = self.unmasked and inside is x
        return (self.map if self.plain else self._as_called), x

    def reproduces(self, padded: OwnAttention, padding: Padding, sequence: int) -> bool:
        """Return whether this call, made without padding, repeats one sequence of the call ``padded``: its
        real tokens and their outputs agree.
        """

        def same(whole: Tensor | None, alone: Tensor | None) -> bool:
            if whole is None or alone is None or whole.shape[:2] != padding.real.shape:
                return False
            rows, allowed = whole[sequence, padding.real[sequence]], _SAME * lowest_epsilon(alone.dtype)
            return rows.shape == alone[0].shape and relative_error(rows, alone[0]) <= allowed

        return same(padded.arguments["query"], self.arguments["query"]) and same(padded.output, self.output)

    def describe(self) -> str:
        """Return a phrase that describes the map that :meth:`read` returned."""
        called = "" if self.plain else ", as it was called: with a mask of the call, or tokens clipped"
        kind = "" if self.map is None else f": {self.map.describe()}"
        return f"{type(self.module).__name__}{kind}{called}"

    def _clipped(self, x: Tensor) -> Tensor:
        radius = self.module.radius
        if self.module.beyond != "clip" or radius is None:
            return x
        longest = float(torch.linalg.vector_norm(x, dim=-1).max())
        return self.module.inside_ball(x, radius, x.dtype) if longest > radius else x

    def _as_called(self, x: Tensor) -> Tensor:
        """Apply the layer to tokens x with the other recorded arguments, without gradients of weights."""
        weights = {name: weight.detach() for name, weight in self.module.named_parameters()}
        given = {**self.arguments, "query": x, "key": None, "value": None, "need_weights": False}
        output: Tensor = torch.func.functional_call(self.module, weights, (), given)[0]
        return output.to(x.dtype)

    def bound(self) -> dict[str, float | int]:
        """Return the proved bound as fields of a record. There are none if the layer has no radius."""
        length, radius = self.module.length, self.module.radius
        if radius is None:
            return {}
        bound = float(self.module.lipschitz_bound(length, radius).value)
        return {"bound": bound, "bound_length": length, "bound_radius": float(radius)}

    def add_scores(self, scores: ScoreStatistics, x: Tensor) -> None:
        """Add the logits of this call, and the entropies of its attention weights, to the statistics."""
        if self.unmasked and isinstance(self.map, SelfAttention):
            scores.add_map(self.map, self._clipped(x))
            return
        told = self.arguments | {
            "key": None, "value": None, "need_weights": True, "average_attn_weights": False,
        }  # fmt: skip
        _, weights = self.module(**told)
        masks = told.get("attn_mask"), told.get("key_padding_mask"), bool(told.get("is_causal", False))
        added = self.module.masking.scores(*masks, heads=self.module.num_heads, x=x)
        p = weights.reshape(x.shape[0], -1, *weights.shape[-2:])
        scores.add_probabilities(p, None if added is None else (~added.isneginf()).expand(p.shape))

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"
