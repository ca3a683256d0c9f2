"""Quadratic forms in k variables as rows of numbers, one for each pair of variables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Pairs"]


class Pairs:
    """Symmetric k × k matrices S as vectors of length k(k + 1)/2 whose inner product is tr(S S').

    The entries outside the diagonal are multiplied by √2, so that δδᵀ becomes a vector of norm |δ|².
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.i, self.j = torch.triu_indices(k, k)
        self.weight = torch.full(self.i.shape, math.sqrt(2), dtype=torch.float64)
        self.weight[self.i == self.j] = 1.0

    def packed(self, forms: Tensor) -> Tensor:
        """Return the vectors (*batch, p) of matrices (*batch, k, k); only their symmetric parts count."""
        return self.weight / 2 * (forms[..., self.i, self.j] + forms[..., self.j, self.i])

    def square(self, linear: Tensor) -> Tensor:
        """Return the vectors (*batch, p) of the squares of linear forms (*batch, k)."""
        return self.weight * linear[..., self.i] * linear[..., self.j]

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the vectors (*batch, p) of products of linear forms (*batch, k)."""
        crossed = left[..., self.i] * right[..., self.j] + left[..., self.j] * right[..., self.i]
        return self.weight / 2 * crossed

    def matrices(self, packed: Tensor) -> Tensor:
        """Return the symmetric matrices (*batch, k, k) of vectors (*batch, p)."""
        full = torch.zeros(*packed.shape[:-1], self.k, self.k, dtype=packed.dtype)
        values = packed / self.weight
        full[..., self.i, self.j] = values
        full[..., self.j, self.i] = values
        return full
