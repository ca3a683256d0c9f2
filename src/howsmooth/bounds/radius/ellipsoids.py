"""Ellipsoids {A u : |u| ≤ 1}, given by their matrices A Aᵀ in batches; they may be flat, or a point."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.radius.norms import largest_eigenvalue

__all__ = ["balls", "ellipsoid_sum", "half_widths", "radii"]


def balls(radii: Float[Tensor, "*batch"], size: int) -> Float[Tensor, "*batch size size"]:
    """Return the balls of the given radii in R^size."""
    return radii.square()[..., None, None] * torch.eye(size, dtype=radii.dtype)


def ellipsoid_sum(*shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return an ellipsoid that contains all sums of one point of each ellipsoid.

    It is Σ_i U_i / w_i, w_i > 0 of sum 1 (Cauchy and Schwarz), with the weights that make its trace smallest.
    """
    stack = torch.stack(shapes)
    sizes = stack.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()
    total = sizes.sum(0)
    scale = torch.where(sizes > 0, total / torch.where(sizes > 0, sizes, 1.0), 0.0)
    return (scale[..., None, None] * stack).sum(0)


def half_widths(
    shapes: Float[Tensor, "... d d"], functionals: Float[Tensor, "... m d"]
) -> Float[Tensor, "... m"]:
    """Return the largest values √(wᵀ U w) of linear functionals w on ellipsoids."""
    return ((functionals @ shapes) * functionals).sum(-1).clamp_min(0).sqrt()


def radii(shapes: Float[Tensor, "... d d"], matrix: Float[Tensor, "... m d"] | None = None) -> Tensor:
    """Bound the lengths of the points, or of their images under a matrix (..., m, d)."""
    image = shapes if matrix is None else matrix @ shapes @ matrix.mT
    return largest_eigenvalue(image).clamp_min(0).sqrt()
