"""The query, key, value and output matrices of an attention layer, in the dtype in which products with its
Jacobian are computed.

A projection acts on each token by itself, so the tokens of many sequences can go through it in one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Rotary, SelfAttention

__all__ = ["LayerMatrices", "projections"]

# Number of products with JᵀJ that a measurement usually takes.
_EXPECTED_STEPS = 32


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """The query, key, value and output matrices of one attention layer.

    The rows of ``weight`` are those of the queries, with the scale of the scores multiplied in, the keys and
    the values of all heads; a batch of single heads has one such matrix for each. ``output`` is W_O, or None
    if the heads are concatenated only. Of the float64 layer ``attention`` the sizes are read. So many
    ``tokens`` go through the projections in one product.
    """

    attention: SelfAttention
    weight: Float[Tensor, "*heads rows d"]
    output: Float[Tensor, "d_out d_heads"] | None
    rotary: Rotary | None
    tokens: int

    @classmethod
    def of(cls, f: SelfAttention, dtype: torch.dtype, tokens: int) -> LayerMatrices:
        """Return the matrices of a float64 layer in ``dtype``, for products with ``tokens`` tokens."""
        parts = (f.scale * f.query, f.key, f.value)
        weight = torch.cat([part.to(dtype).flatten(0, 1) for part in parts])
        output = None if f.output is None else f.output.to(dtype)
        rotary = None if f.rotary is None else f.rotary.to(dtype=dtype)
        return cls(f, weight, output, rotary, tokens)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of rows that queries, keys and values have in the stacked matrix ``weight``."""
        f = self.attention
        return f.heads * f.key_dim, f.kv_heads * f.key_dim, f.kv_heads * f.value_dim

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value matrices, as parts of the stacked matrix ``weight``."""
        query, key, value = self.weight.split(self.sizes)
        return query, key, value

    def into(self, e: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch rows"]:
        """Return tangents of queries, keys and values side by side, given tangents ``e`` of the tokens."""
        return e @ self.weight.mT

    def into_adjoint(self, rows: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch d"]:
        """Return the cotangent of the tokens, given cotangents of queries, keys and values side by side."""
        return rows @ self.weight

    def out(self, heads: Float[Tensor, "*batch d_heads"]) -> Float[Tensor, "*batch d_out"]:
        """Multiply the concatenated outputs of all heads by W_O."""
        return heads if self.output is None else heads @ self.output.mT

    def out_adjoint(self, u: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_heads"]:
        """Multiply cotangents of the output by W_Oᵀ."""
        return u if self.output is None else u @ self.output

    def through(
        self, heads: Float[Tensor, "*batch d_heads"]
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch d_heads"]]:
        """Return |W_O h|² in float64 and W_OᵀW_O h for each token, whose heads have the outputs h."""
        if self.output_gram is None:
            image = self.out(heads)
            return torch.linalg.vector_norm(image, dim=-1).double().square(), self.out_adjoint(image)
        through = heads @ self.output_gram
        return torch.linalg.vecdot(heads, through).double(), through

    @cached_property
    def output_gram(self) -> Float[Tensor, "d_heads d_heads"] | None:
        """The matrix W_OᵀW_O, or None if a product with it is not cheaper than two products with W_O.

        It is used in float32 only, where the final value is computed again in float64: if W_O nearly cancels,
        the square loses twice as many digits.
        """
        if self.output is None or self.output.dtype != torch.float32:
            return None
        d_out, d_heads = self.output.shape
        if _EXPECTED_STEPS * self.tokens * (2 * d_out - d_heads) <= d_out * d_heads:
            return None
        # Squares of larger or smaller entries could leave the range of float32.
        largest = float(self.output.abs().max())
        return self.output.mT @ self.output if 2.0**-30 < largest < 2.0**30 else None


def projections(
    dtypes: Iterable[torch.dtype], tokens: int
) -> dict[torch.dtype, Callable[[SelfAttention], LayerMatrices]]:
    """Return, for each dtype, a cached function that converts the matrices of an attention layer to that
    dtype, for products with ``tokens`` tokens at a time.
    """
    return {dtype: cache(partial(LayerMatrices.of, dtype=dtype, tokens=tokens)) for dtype in dtypes}
