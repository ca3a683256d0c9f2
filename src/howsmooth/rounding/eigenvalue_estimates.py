"""Estimates of largest eigenvalues, which are not proved: certificates start from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["lanczos", "largest_eigenvalue_estimates"]

# Size of matrices above which the largest eigenvalue is estimated alone, without the others.
_FULL_SPECTRUM = 256

# So many rounds of steps take about as long as the full spectrum.
_ROUNDS, _STEPS = 10, 30

# The rounds end when one raises the estimate by less than this fraction.
_GAIN = 1e-10


def largest_eigenvalue_estimates(g: Float[Tensor, "batch r r"]) -> Float[Tensor, " batch"]:
    """Estimate the largest eigenvalues of positive semidefinite matrices, of large ones by Lanczos steps.

    ARPACK would do so too, but the threads of SciPy then slow down those of PyTorch.
    """
    if g.shape[-1] <= _FULL_SPECTRUM:
        spectra: Tensor = torch.linalg.eigvalsh(g)
        return spectra[..., -1]
    return torch.stack([_largest(matrix) for matrix in g])


def _largest(matrix: Float[Tensor, "r r"]) -> Float[Tensor, ""]:
    vector = torch.randn(1, len(matrix), generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    vector = vector.to(matrix.device)
    last = matrix.new_zeros(1)
    for _ in range(_ROUNDS):
        top, vector = lanczos(lambda y: y, matrix, vector, _STEPS)
        if top <= last * (1 + _GAIN):
            break
        last = top
    else:
        top = torch.linalg.eigvalsh(matrix)[-1:]
    return torch.maximum(top, last)[0]


def lanczos(
    image: Callable[[Float[Tensor, "n m"]], Float[Tensor, "n m"]],
    gram: Float[Tensor, "m m"],
    b: Float[Tensor, "n m"],
    steps: int,
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n m"]]:
    """Estimate the largest eigenvalues of the matrices O B_i Oᵀ, for one matrix O and many matrices B_i, by
    Lanczos steps.

    ``image`` multiplies row i by B_i, and ``gram`` is OᵀO. The steps start at the rows of ``b``. A row b
    stands for the vector O b, so that a step needs one product with ``gram`` and none with O. The estimates
    are below the eigenvalues, up to rounding. They are returned with their vectors, as rows like ``b``.
    """
    eps = torch.finfo(b.dtype).eps
    noise = (16 * eps * torch.linalg.matrix_norm(gram)).sqrt()

    def lengths(z: Tensor, y: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        # A length this small is rounding: the vectors span an invariant space, and the steps of this row end.
        # Parts of z that gram maps to nearly zero count in the rounding of y alone.
        length = (z * y).sum(1, keepdim=True).clamp_min(0).sqrt()
        rounding = noise * torch.linalg.vector_norm(z, dim=1, keepdim=True)
        length = torch.where(length > torch.maximum(least, rounding), length, 0.0)
        return length, torch.where(length > 0, 1 / length, 0.0)

    alphas, betas, vectors = [], [], []
    y = b @ gram
    beta = size = b.new_zeros(len(b), 1)
    _, inverse = lengths(b, y, size)
    b, y, last = b * inverse, y * inverse, torch.zeros_like(b)
    for _ in range(steps):
        vectors.append(b)
        z = image(y)
        alpha = (y * z).sum(1, keepdim=True)
        size = torch.maximum(size, alpha)
        z = z - alpha * b - beta * last
        y = z @ gram
        beta, inverse = lengths(z, y, 3 * eps**0.5 * size)
        alphas.append(alpha)
        betas.append(beta)
        last, b, y = b, z * inverse, y * inverse
    side = torch.cat(betas[:-1], dim=1)
    tridiagonal = torch.diag_embed(torch.cat(alphas, dim=1)) + torch.diag_embed(side, offset=-1)
    values, coordinates = torch.linalg.eigh(tridiagonal)
    found = (torch.stack(vectors, dim=-1) @ coordinates[:, :, -1:])[..., 0]
    return values[:, -1].clamp_min(0), found
