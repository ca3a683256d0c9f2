"""Ellipsoids {y : |c·y|² ≤ cᵀ U c for all c}, given by symmetric matrices U in batches.

They may be flat, or a point. Every function rounds outwards: its result contains the exact one for the
matrices given to it, and for matrices whose entries are a few roundings away. Proofs: documentation page "A
proved radius for a whole network", section "Rounding".
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.radius.norms import largest_eigenvalue
from howsmooth.bounds.radius.rounding import INFLATION, plain, settled
from howsmooth.roundoff import gamma

__all__ = ["balls", "ellipsoid_sum", "enclosing", "half_widths", "image", "mixture", "product", "radii"]

# Shapes that are given may be a scalar times a matrix; this counts those roundings and the last ones.
_MORE = 64
# How much larger an ellipsoid is made to take in the rounding error of a matrix that it is mapped by.
_SHARE = 1e-6


def _traces(shapes: Tensor) -> Tensor:
    return shapes.diagonal(dim1=-2, dim2=-1).sum(-1)


def _with_balls(shapes: Tensor, squares: Tensor) -> Tensor:
    """Return symmetric matrices U + s I of batches of matrices and numbers."""
    found = (shapes + shapes.mT) / 2
    found.diagonal(dim1=-2, dim2=-1).add_(squares[..., None])
    return found


def enclosing(shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return ellipsoids that contain those of measured matrices, whatever their rounding errors."""
    value, error = settled(shapes)
    return _with_balls(value, error + gamma(_MORE) * _traces(value).abs())


def balls(radii: Float[Tensor, "*batch"], size: int) -> Float[Tensor, "*batch size size"]:
    """Return the balls of the given radii in R^size."""
    return radii.square()[..., None, None] * torch.eye(size, dtype=radii.dtype)


def ellipsoid_sum(*shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return an ellipsoid that contains all sums of one point of each ellipsoid.

    It is Σ_i U_i / w_i, w_i > 0 of sum 1 (Cauchy and Schwarz), with the weights that make its trace smallest.
    """
    stack = torch.stack(shapes)
    sizes = _traces(stack).clamp_min(0).sqrt()
    total = sizes.sum(0)
    scale = torch.where(sizes > 0, total / torch.where(sizes > 0, sizes, 1.0), 0.0)
    found = (scale[..., None, None] * stack).sum(0) * INFLATION
    return _with_balls(found, gamma(len(shapes) + _MORE) * _traces(found))


def image(matrix: Float[Tensor, "... m d"], shapes: Float[Tensor, "... d d"]) -> Float[Tensor, "... m m"]:
    """Return the images B U Bᵀ of ellipsoids; the rounding error of a measured matrix B is taken in."""
    value, error = settled(matrix)
    found = value @ shapes @ value.mT
    trace = _traces(shapes)
    squares = gamma(2 * shapes.shape[-1] + _MORE) * value.square().sum((-2, -1)) * trace
    if error:
        found = found * (1 + _SHARE)
        squares = (squares + (1 + 1 / _SHARE) * error**2 * trace) * (1 + _SHARE)
    return _with_balls(found, squares)


def product(*shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return ellipsoids of the entrywise products of one point of each ellipsoid."""
    found = shapes[0]
    for factor in shapes[1:]:
        found = found * factor
    return _with_balls(found, gamma(_MORE) * _traces(found))


def mixture(
    weights: Float[Tensor, "heads rows n"], shapes: Float[Tensor, "heads n d d"]
) -> Float[Tensor, "heads rows d d"]:
    """Return Σ_j w_ij U_j for nonnegative weights."""
    found = torch.einsum("hij,hjop->hiop", weights, shapes)
    return _with_balls(found, gamma(weights.shape[2] + _MORE) * _traces(found))


def half_widths(
    shapes: Float[Tensor, "... d d"], functionals: Float[Tensor, "... m d"]
) -> Float[Tensor, "... m"]:
    """Return upper bounds of √(wᵀ U w), the largest values of linear functionals w on ellipsoids."""
    value, error = settled(functionals)
    trace = _traces(shapes)[..., None]
    slack = gamma(2 * shapes.shape[-1] + _MORE) * value.square().sum(-1) * trace
    found = (((value @ shapes) * value).sum(-1) + slack).clamp_min(0).sqrt()
    return found + error * trace.sqrt() if error else found


def radii(shapes: Float[Tensor, "... d d"], matrix: Float[Tensor, "... m d"] | None = None) -> Tensor:
    """Bound the lengths of the points, or of their images under a matrix (..., m, d)."""
    return largest_eigenvalue(plain(shapes if matrix is None else image(matrix, shapes))).sqrt()
