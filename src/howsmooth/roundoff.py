"""Constants of floating-point error analysis in float64, from which proved allowances are made.

Wherever an allowance is called proved, these are the assumptions: numbers are rounded to nearest, a sum of m
products comes out as Σ a_l b_l (1 + θ_l) with |θ_l| ≤ γ_m in whatever order it is made, and elementary
functions are right to a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["LOST", "UNDERFLOW", "MatrixNorms", "U", "gamma", "up"]

U = 2.0**-53
"""Unit roundoff of float64."""

UNDERFLOW = 2.0**-1000
"""What an attention weight that underflows may be off by."""

LOST = 2.0**-530
"""What the length of a vector may lack for each root of an entry, because squares underflow."""

# Terms of an error bound are nonnegative numbers, computed with relative errors far below this.
_ERROR_OF_ERRORS = 1e-6


def gamma(m: int) -> float:
    """Return γ_m = m u / (1 − m u): relative error of a sum or product of m roundings, in any order."""
    return m * U / (1 - m * U)


def up(error: Tensor) -> Tensor:
    """Round an error bound, itself computed in floating point, up."""
    return error * (1 + _ERROR_OF_ERRORS)


class MatrixNorms:
    """Upper bounds of norms of matrices (*batch, m, r), each formed once.

    Matrices are told apart by where they lie in memory and by their shape. They are kept, so that no other
    can come to lie there, and must not change.
    """

    def __init__(self) -> None:
        self._found: dict[object, tuple[Tensor, Tensor]] = {}

    def spectral(self, matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
        """Return an upper bound of ‖W‖₂, at most r^(1/8) times too large, r the rank of W.

        It is the Schatten norm (Σ σ⁸)^(1/8) = ‖(W Wᵀ)²‖_F^(1/4), of two matrix products.
        """
        return self._once("spectral", matrices, _schatten)

    def absolute(self, matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
        """Return an upper bound of ‖|W|‖₂, by which rounding in a product with W is bounded.

        It is √(‖W‖₁ ‖W‖_∞), of the largest sums of a column and of a row.
        """
        return self._once("absolute", matrices, _of_sums)

    def _once(self, name: str, matrices: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
        key = (name, matrices.data_ptr(), matrices.shape, matrices.stride())
        if key not in self._found:
            self._found[key] = matrices, form(matrices)
        return self._found[key][1]


def _schatten(matrices: Tensor) -> Tensor:
    size = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = matrices / torch.where(size > 0, size, 1.0)
    gram = scaled @ scaled.mT if matrices.shape[-2] <= matrices.shape[-1] else scaled.mT @ scaled
    found: Tensor = torch.linalg.matrix_norm(gram @ gram).sqrt().sqrt() * size[..., 0, 0]
    return up(found)


def _of_sums(matrices: Tensor) -> Tensor:
    size = matrices.abs()
    return up((size.sum(dim=-1).amax(dim=-1) * size.sum(dim=-2).amax(dim=-1)).sqrt())
