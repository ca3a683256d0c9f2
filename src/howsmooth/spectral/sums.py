"""Lengths and inner products of long vectors, whose float32 sums would be wrong by many roundings.

Summed in float32, the length of a vector is wrong by 8e-6 at 10^6 entries and by 3e-4 at 10^7, and so is an
inner product whose terms cancel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["PIECE", "inner_products", "squared_lengths"]

PIECE = 1 << 16
"""Entries that are turned into float64 at a time; vectors of no more are summed in their own dtype."""


def squared_lengths(x: Float[Tensor, "rows size"]) -> Float[Tensor, " rows"]:
    """Return the squared length of each row, in float64."""
    pieces = [torch.linalg.vector_norm(piece.double(), dim=1) for piece in x.split(PIECE, dim=1)]
    return torch.stack(pieces).square().sum(dim=0)


def inner_products(
    rows: Float[Tensor, "rows size"], vector: Float[Tensor, " size"]
) -> Float[Tensor, " rows"]:
    """Return the inner product of each row with a vector, in the rows' dtype."""
    if len(vector) <= PIECE or vector.dtype == torch.float64:
        return torch.mv(rows, vector)
    total = vector.new_zeros(len(rows), dtype=torch.float64)
    for some, piece in zip(rows.split(PIECE, dim=1), vector.split(PIECE), strict=True):
        total += torch.mv(some.double(), piece.double())
    return total.to(vector.dtype)
