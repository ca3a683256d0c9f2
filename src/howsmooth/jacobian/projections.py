"""The projections of an attention as matrices: what acts on tokens one by one, whatever their sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Rotary, SelfAttention

__all__ = ["Projection", "Projections"]

# Steps that a measurement takes, about.
_EXPECTED_STEPS = 32


@dataclass(frozen=True, eq=False)
class Projection:
    """What acts on tokens one by one: the projections of an attention in the dtype of the products.

    The three of the input are one matrix, rows (queries, keys, values), the scale in the queries'.
    """

    weight: Tensor
    output: Tensor | None
    output_gram: Tensor | None
    rotary: Rotary | None

    @classmethod
    def of(cls, f: SelfAttention, dtype: torch.dtype, rows: int) -> Projection:
        """Return those of float64 attention, for products with ``rows`` tokens."""
        weight = torch.cat((f.scale * f.query.flatten(0, 1), f.key.flatten(0, 1), f.value.flatten(0, 1)))
        output = None if f.output is None else f.output.to(dtype)
        rotary = None if f.rotary is None else f.rotary.to(dtype=dtype)
        return cls(weight.to(dtype), output, _output_gram(output, rows), rotary)

    def into(self, e: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch rows"]:
        """Return the tangents of queries, keys and values."""
        return e @ self.weight.mT

    def into_adjoint(self, rows: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch d"]:
        """Apply the adjoint of :meth:`into`."""
        return rows @ self.weight

    def out(self, heads: Float[Tensor, "*batch d_heads"]) -> Float[Tensor, "*batch d_out"]:
        """Return what the output projection makes of the heads."""
        return heads if self.output is None else heads @ self.output.mT

    def out_adjoint(self, u: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_heads"]:
        """Apply the adjoint of :meth:`out`."""
        return u if self.output is None else u @ self.output

    def through(
        self, heads: Float[Tensor, "*batch d_heads"]
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch d_heads"]]:
        """Return |h|² of each token in float64, h = :meth:`out` of the heads, and the adjoint of h."""
        if self.output_gram is None:
            image = self.out(heads)
            return torch.linalg.vector_norm(image, dim=-1).double().square(), self.out_adjoint(image)
        through = heads @ self.output_gram
        return torch.linalg.vecdot(heads, through).double(), through


class Projections:
    """Those of each attention in a map, made once for all sequences at which it is linearised."""

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        self.dtype = dtype
        self.rows = rows
        self._made: dict[int, Projection] = {}

    def of(self, f: SelfAttention) -> Projection:
        """Return those of one attention, a part of the map that lives as long as this."""
        if id(f) not in self._made:
            self._made[id(f)] = Projection.of(f, self.dtype, self.rows)
        return self._made[id(f)]


def _output_gram(output: Tensor | None, rows: int) -> Tensor | None:
    """Return W_Oᵀ W_O where it makes the products with JᵀJ cheaper: one matrix in place of two.

    In float32 only, whose results a verdict in float64 follows: where W_O cancels, it loses twice the digits.
    """
    if output is None or output.dtype != torch.float32:
        return None
    d_out, d_heads = output.shape
    if _EXPECTED_STEPS * rows * (2 * d_out - d_heads) <= d_out * d_heads:
        return None
    largest = float(output.abs().max())
    return output.mT @ output if 2.0**-30 < largest < 2.0**30 else None
