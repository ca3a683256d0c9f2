"""Spectral norms of matrices and of products, rounded up and differentiable.

The gradient holds leading singular vectors fixed. It is one of the subgradients if the largest singular value
is multiple, and zero at the zero matrix.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.rounding import U, above

__all__ = ["grams", "norms", "products_norms", "reach", "root"]

# For larger matrices only the leading eigenvector is computed, instead of all.
_LARGE = 96
# A norm ⟨u, M v⟩ at computed singular vectors is below the norm by the square of their errors, which counts
# as so many roundings.
_OF_VECTORS = 64


def norms(matrix: Float[Tensor, "*lead rows columns"]) -> Float[Tensor, "*lead"]:
    """Return spectral norms of matrices, rounded up and differentiable. A norm is ⟨u, M v⟩."""
    with torch.no_grad():
        u, v = _singular_vectors(matrix)
    found: Tensor = torch.einsum("...m,...mk,...k->...", u, matrix, v)
    return above(found, sum(matrix.shape[-2:]) + _OF_VECTORS)


def products_norms(
    left: Float[Tensor, "*lead m k"], right: Float[Tensor, "*lead k d"]
) -> Float[Tensor, "*lead"]:
    """Return differentiable spectral norms of the products left @ right, rounded up.

    Leading singular vectors u and v are computed from the product of the triangular QR factors, which is
    small. The norm is ⟨Lᵀu, R v⟩.
    """
    with torch.no_grad():
        q_left, r_left = torch.linalg.qr(left)
        q_right, r_right = torch.linalg.qr(right.mT)
        u, v = _leading(q_left, r_left @ r_right.mT, q_right)
    found: Tensor = ((left.mT @ u[..., None]) * (right @ v[..., None])).sum(dim=(-2, -1))
    return above(found, 2 * sum(left.shape[-2:]) + right.shape[-1] + _OF_VECTORS)


def grams(maps: Tensor, value: Tensor) -> Tensor:
    """Return the norms ‖(W_h V_h)ᵀ W_g V_g‖ for all pairs h, g of heads, (heads, heads).

    The singular vectors are computed from k × k matrices. The gradient is taken with the
    singular vectors held fixed.
    """
    count = len(value)
    h, g = torch.triu_indices(count, count, device=value.device)
    with torch.no_grad():
        q, r = torch.linalg.qr(value.mT)
        folded = maps @ r.mT
        u, v = _leading(q[h], folded[h].mT @ folded[g], q[g])
    left = maps[h] @ (value[h] @ u[..., None])
    right = maps[g] @ (value[g] @ v[..., None])
    norms = above((left * right).sum(dim=(-2, -1)), 2 * sum(value.shape[1:]) + maps.shape[1] + _OF_VECTORS)
    found = torch.zeros(count, count, dtype=norms.dtype, device=norms.device)
    upper = found.index_put((h, g), norms)
    return upper + upper.mT - torch.diag(upper.diagonal())


def reach(
    sizes: Float[Tensor, "heads"], bias: Tensor | None, radius: float, eps: float | None = None
) -> Float[Tensor, "heads"]:
    """Bound the queries, keys or values of each head, given the norms of its matrix and its bias, for tokens
    of norm at most R. With ``eps`` they are normalised to u/√(|u|² + ε).
    """
    if eps is not None and not math.isfinite(radius):
        return torch.ones_like(sizes)
    found = radius * sizes
    if bias is not None:
        found = found + above(torch.linalg.vector_norm(bias.double(), dim=-1), bias.shape[-1])
    return found if eps is None else found / torch.sqrt(found.square() + eps)


def root(square: Tensor) -> Tensor:
    """Return the square root of each entry, or 0 with derivative 0 where the entry is at most zero."""
    positive = ~(square <= 0)  # also true for NaN, which an overflow leaves
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _leading(q_left: Tensor, small: Tensor, q_right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors of the product q_left @ small @ q_rightᵀ.

    They are computed from the leading singular vectors of ``small``. ``q_left`` and ``q_right`` have
    orthonormal columns. The left vector is zero if the matrix is zero.
    """
    u, v = _singular_vectors(small)
    return (q_left @ u[..., None])[..., 0], (q_right @ v[..., None])[..., 0]


def _singular_vectors(
    matrix: Float[Tensor, "*lead rows columns"],
) -> tuple[Float[Tensor, "*lead rows"], Float[Tensor, "*lead columns"]]:
    """Return the leading singular vectors u, v of M, where u = 0 if M = 0, and NaN if an entry is not finite.

    v is an eigenvector of the Gram matrix, scaled so that it neither overflows nor underflows, and
    u = Mv/|Mv|. The norm |Mv| has a relative error of a few units of rounding.
    """
    scale = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = matrix / torch.where(scale > 0, scale, 1.0)
    wide = matrix.shape[-2] < matrix.shape[-1]
    tall = scaled.mT if wide else scaled
    gram = tall.mT @ tall
    if not bool(torch.isfinite(gram).all()):
        v = torch.full_like(tall[..., 0, :], math.nan)
    elif gram.ndim == 2 and len(gram) > _LARGE:
        v = _last_eigenvector(gram)
    else:
        v = torch.linalg.eigh(gram)[1][..., -1]
    image = (tall @ v[..., None])[..., 0]
    length = torch.linalg.vector_norm(image, dim=-1, keepdim=True)
    u = image / torch.where(length > 0, length, 1.0)
    return (v * (length > 0), u) if wide else (u, v)


def _last_eigenvector(gram: Float[Tensor, "k k"]) -> Float[Tensor, "k"]:
    """Return an eigenvector for the largest eigenvalue of a Gram matrix, faster than ``eigh``.

    The method is inverse iteration.
    """
    largest = torch.linalg.eigvalsh(gram)[-1]
    shift = torch.where(largest > 0, largest * (1 + 4 * len(gram) * torch.finfo(gram.dtype).eps), 1.0)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factors, pivots, _ = torch.linalg.lu_factor_ex(gram - shift * identity)
    # The start has no symmetry by which it could be orthogonal to the eigenvector.
    v = torch.cos(torch.arange(1.0, len(gram) + 1, dtype=gram.dtype, device=gram.device).square())
    for _ in range(3):
        v = torch.linalg.lu_solve(factors, pivots, v[:, None])[:, 0]
        v = v / torch.linalg.vector_norm(v)
    # NaN, or converged to another eigenvalue
    if not bool(v @ gram @ v >= largest * (1 - 1024 * U * len(gram))):
        v = torch.linalg.eigh(gram)[1][:, -1]
    return v
