"""Constants of floating-point error analysis in float64, from which proved allowances are made.

Wherever an allowance is called proved, these are the assumptions: numbers are rounded to nearest, a sum of m
products comes out as Σ a_l b_l (1 + θ_l) with |θ_l| ≤ γ_m in whatever order it is made, and elementary
functions are right to a few units in the last place.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["UNDERFLOW", "U", "absolute_norm", "gamma", "spectral_norm", "up"]

U = 2.0**-53
"""Unit roundoff of float64."""

UNDERFLOW = 2.0**-1000
"""What an attention weight that underflows may be off by."""

# Terms of an error bound are nonnegative numbers, computed with relative errors far below this.
_ERROR_OF_ERRORS = 1e-6


def gamma(m: int) -> float:
    """Return γ_m = m u / (1 − m u): relative error of a sum or product of m roundings, in any order."""
    return m * U / (1 - m * U)


def up(error: Tensor) -> Tensor:
    """Round an error bound, itself computed in floating point, up."""
    return error * (1 + _ERROR_OF_ERRORS)


def spectral_norm(matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound of the spectral norm of each matrix, at most r^(1/8) times too large, r its rank.

    It is the Schatten norm (Σ σ⁸)^(1/8) = ‖(W Wᵀ)²‖_F^(1/4), of two matrix products.
    """
    size = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = matrices / torch.where(size > 0, size, 1.0)
    gram = scaled @ scaled.mT if matrices.shape[-2] <= matrices.shape[-1] else scaled.mT @ scaled
    found: Tensor = torch.linalg.matrix_norm(gram @ gram).sqrt().sqrt() * size[..., 0, 0]
    return up(found)


def absolute_norm(matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound of ‖|W|‖₂, by which rounding in a product with W is bounded.

    It is √(‖W‖₁ ‖W‖_∞), of the largest sums of a column and of a row.
    """
    size = matrices.abs()
    return up((size.sum(dim=-1).amax(dim=-1) * size.sum(dim=-2).amax(dim=-1)).sqrt())
