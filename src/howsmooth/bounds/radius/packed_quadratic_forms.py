"""Quadratic forms in k variables, stored as vectors with one entry for each pair of variables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.rounding.rounded_tensor import multilinear, rowwise

__all__ = ["Pairs"]

# Roundings of the functions below, with that of √2.
_ROUNDINGS = 8


class Pairs:
    """Conversion between symmetric k × k matrices and vectors of their p = k(k + 1)/2 pairs of entries.

    The inner product of the vectors of S and S' is tr(S S'). The entries outside the diagonal are multiplied
    by √2, so that δδᵀ becomes a vector of norm |δ|².
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.i, self.j = torch.triu_indices(k, k)
        self.weight = torch.full(self.i.shape, math.sqrt(2), dtype=torch.float64)
        self.weight[self.i == self.j] = 1.0

    def packed(self, forms: Tensor) -> Tensor:
        """Pack the symmetric parts of matrices (*batch, k, k) into vectors (*batch, p)."""

        def vectors(forms: Tensor) -> Tensor:
            return self.weight / 2 * (forms[..., self.i, self.j] + forms[..., self.j, self.i])

        return multilinear(vectors, forms, roundings=_ROUNDINGS)

    def square(self, linear: Tensor) -> Tensor:
        """Square linear forms (*batch, k), and return the results as packed quadratic forms (*batch, p)."""

        def vectors(linear: Tensor, same: Tensor) -> Tensor:
            # Products of slices are much faster than those of entries that are taken by their indices.
            rows = [linear[..., i, None] * same[..., i:] for i in range(self.k)]
            return torch.cat(rows, -1).mul_(self.weight)

        return rowwise(vectors, linear, linear, roundings=_ROUNDINGS)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply pairs of linear forms (*batch, k) to packed quadratic forms (*batch, p)."""

        def vectors(left: Tensor, right: Tensor) -> Tensor:
            rows = [
                left[..., i, None] * right[..., i:] + left[..., i:] * right[..., i, None]
                for i in range(self.k)
            ]
            return torch.cat(rows, -1).mul_(self.weight / 2)

        return rowwise(vectors, left, right, roundings=_ROUNDINGS)

    def matrices(self, packed: Tensor) -> Tensor:
        """Unpack vectors (*batch, p) into the symmetric matrices (*batch, k, k) that they represent."""

        def whole(packed: Tensor) -> Tensor:
            full = packed.new_empty(*packed.shape[:-1], self.k, self.k)
            rows = (packed / self.weight).split(list(range(self.k, 0, -1)), -1)
            for i, row in enumerate(rows):
                full[..., i, i:] = full[..., i:, i] = row
            return full

        return multilinear(whole, packed, roundings=_ROUNDINGS)
