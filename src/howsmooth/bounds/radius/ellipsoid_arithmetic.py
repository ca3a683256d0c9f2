"""Operations on ellipsoids centred at 0 and given by matrices, such as sums, images and products.

The ellipsoid of a matrix U is {y : |c·y|² ≤ cᵀ U c for all c}; matrices come in batches. They may be flat, or
a point. Images are symmetric up to rounding only. Every function rounds outwards: its result contains the
exact one for the matrices given to it, and for matrices whose entries are a few roundings away. Proofs:
documentation page "A proved radius for a whole network", section "Rounding".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.rounding import INFLATION, gamma, largest_eigenvalues_by_squaring
from howsmooth.rounding.rounded_tensor import plain, settled

__all__ = [
    "balls", "ellipsoid_image", "ellipsoid_sum", "enclosing", "gram", "half_widths", "mixture", "product",
    "radii", "scaled", "weighted_images", "without_gram",
]  # fmt: skip

# Shapes that are given may be a scalar times a matrix; this counts those roundings and the last ones.
_MORE = 64
# How much larger an ellipsoid is made to take in the rounding error of a matrix that it is mapped by.
_SHARE = 1e-6


def _traces(shapes: Tensor) -> Tensor:
    return shapes.diagonal(dim1=-2, dim2=-1).sum(-1)


def _enlarged(shapes: Tensor, squares: Tensor) -> Tensor:
    """Add a number to all diagonal entries of each matrix of a batch, in place."""
    shapes.diagonal(dim1=-2, dim2=-1).add_(squares[..., None])
    return shapes


def enclosing(shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Enlarge ellipsoids whose matrices have rounding errors, so that they contain the exact ellipsoids."""
    value, error = settled(shapes)
    return _enlarged((value + value.mT) / 2, error + gamma(_MORE) * _traces(value).abs())


def gram(factors: Float[Tensor, "*batch d r"]) -> Float[Tensor, "*batch d d"]:
    """Return ellipsoids that contain those of the matrices A Aᵀ, for factors A with rounding errors."""
    value, error = settled(factors)
    found = value @ value.mT * (1 + _SHARE)
    squares = gamma(factors.shape[-1] + _MORE) * _traces(found) + (1 + 1 / _SHARE) * error * error
    return _enlarged((found + found.mT) / 2, squares)


def without_gram(
    shapes: Float[Tensor, "*batch d d"], factors: Float[Tensor, "*batch d r"]
) -> Float[Tensor, "*batch d d"]:
    """Return ellipsoids that contain those of the matrices U − A Aᵀ, for factors A with rounding errors."""
    value, error = settled(factors)
    taken = value @ value.mT * (1 - _SHARE)
    squares = gamma(factors.shape[-1] + _MORE) * (_traces(taken) + _traces(shapes)) + error * error / _SHARE
    return _enlarged(shapes - (taken + taken.mT) / 2, squares)


def balls(radii: Float[Tensor, "*batch"], size: int) -> Float[Tensor, "*batch size size"]:
    """Return the balls of the given radii in R^size as ellipsoids."""
    return radii.square()[..., None, None] * torch.eye(size, dtype=radii.dtype)


def ellipsoid_sum(*shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return an ellipsoid that contains the Minkowski sum of the given ellipsoids.

    It is Σ_i U_i / w_i, w_i > 0 of sum 1 (Cauchy and Schwarz), with the weights that make its trace smallest.
    """
    sizes = torch.stack([_traces(shape) for shape in shapes]).clamp_min(0).sqrt()
    total = sizes.sum(0) * INFLATION
    scale = torch.where(sizes > 0, total / torch.where(sizes > 0, sizes, 1.0), 0.0)[..., None, None]
    found = scale[0] * shapes[0]
    for factor, shape in zip(scale[1:], shapes[1:], strict=True):
        found.addcmul_(factor, shape)
    return _enlarged(found, gamma(len(shapes) + _MORE) * _traces(found))


def ellipsoid_image(
    matrix: Float[Tensor, "... m d"], shapes: Float[Tensor, "... d d"]
) -> Float[Tensor, "... m m"]:
    """Return ellipsoids that contain the images of given ellipsoids under matrices with rounding errors."""
    value, error = settled(matrix)
    trace = _traces(shapes)
    squares = gamma(2 * shapes.shape[-1] + _MORE) * torch.linalg.matrix_norm(value).square() * trace
    larger = value
    if error:
        larger = value * (1 + _SHARE)
        squares = (squares + (1 + 1 / _SHARE) * error * error * trace) * (1 + _SHARE)
    return _enlarged(larger @ shapes @ value.mT, squares)


def product(*shapes: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    """Return ellipsoids of all entrywise products of one point from each ellipsoid, of symmetric matrices."""
    found = shapes[0] * shapes[1]
    for factor in shapes[2:]:
        found *= factor
    return _enlarged(found, gamma(_MORE) * _traces(found))


def scaled(
    factors: Float[Tensor, "*batch d"], shapes: Float[Tensor, "*batch d d"]
) -> Float[Tensor, "*batch d d"]:
    """Return ellipsoids of all entrywise products of factors, with rounding errors, with their points."""
    value, error = settled(factors)
    larger = value * (1 + _SHARE) if error else value
    found = shapes * larger[..., None]
    found *= value[..., None, :]
    squares = gamma(_MORE) * _traces(found)
    if error:
        squares = squares + (1 + 1 / _SHARE) * (1 + _SHARE) * error * error * _traces(shapes)
    return _enlarged(found, squares)


def weighted_images(
    matrix: Float[Tensor, "m d"], square: Float[Tensor, "d d"], terms: Sequence[tuple[Tensor, Tensor]]
) -> Float[Tensor, "*batch m m"]:
    """Return ellipsoids that contain all vectors W Σ_i f_i ∘ y_i, where W is a matrix, f_i are given factors,
    and y_i is any point of the i-th given ellipsoid.

    ``terms`` has factors f_i (*batch, d) and ellipsoids (*batch, d, d). As in :func:`ellipsoid_sum`, but the
    weights are chosen for the images, by Wᵀ W about equal to ``square``, and only one matrix is mapped by W.
    """
    shapes = [scaled(*term) for term in terms]
    # Any positive weights are right. A shape that W maps to almost nothing gets a small one, and none only
    # if it is a point.
    least, across = _SHARE**2 * square.diagonal().sum(), square.flatten()
    sizes = [torch.maximum(shape.flatten(-2) @ across, least * _traces(shape)).sqrt() for shape in shapes]
    total = torch.stack(sizes).sum(0) * INFLATION
    whole = torch.zeros_like(shapes[0])
    for size, shape in zip(sizes, shapes, strict=True):
        factor = torch.where(size > 0, total / torch.where(size > 0, size, 1.0), 0.0)
        whole.addcmul_(factor[..., None, None], shape)
    return ellipsoid_image(matrix, _enlarged(whole, gamma(len(shapes) + _MORE) * _traces(whole)))


def mixture(
    weights: Float[Tensor, "heads rows n"], shapes: Float[Tensor, "heads n d d"]
) -> Float[Tensor, "heads rows d d"]:
    """Return ellipsoids whose matrices are sums Σ_j w_ij U_j of given matrices, for weights w_ij ≥ 0."""
    found = torch.einsum("hij,hjop->hiop", weights, shapes)
    return _enlarged(found, gamma(weights.shape[2] + _MORE) * _traces(found))


def half_widths(
    shapes: Float[Tensor, "... d d"], functionals: Float[Tensor, "... m d"]
) -> Float[Tensor, "... m"]:
    """Bound the maxima √(wᵀ U w) of linear functionals w on ellipsoids of matrices U."""
    value, error = settled(functionals)
    trace = _traces(shapes)[..., None]
    slack = gamma(2 * shapes.shape[-1] + _MORE) * value.square().sum(-1) * trace
    found = (((value @ shapes) * value).sum(-1) + slack).clamp_min(0).sqrt()
    return found + error * trace.sqrt() if error else found


def radii(shapes: Float[Tensor, "... d d"], matrix: Float[Tensor, "... m d"] | None = None) -> Tensor:
    """Bound the norm of all points of each ellipsoid, or of their images under a matrix."""
    images = shapes if matrix is None else ellipsoid_image(matrix, shapes)
    return largest_eigenvalues_by_squaring(plain(images)).sqrt()
