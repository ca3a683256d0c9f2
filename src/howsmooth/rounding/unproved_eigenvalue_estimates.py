"""Unproved estimates of largest eigenvalues, with which the search for proved bounds starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["largest_eigenpairs", "largest_eigenvalue_estimates"]

# Size of matrices above which the largest eigenvalue is estimated alone, without the others.
_FULL_SPECTRUM = 256

# So many rounds of steps take about as long as the full spectrum.
_ROUNDS, _STEPS = 10, 30

# The rounds end when one raises the estimate by less than this fraction.
_GAIN = 1e-10


def largest_eigenvalue_estimates(g: Float[Tensor, "batch r r"]) -> Float[Tensor, " batch"]:
    """Estimate the largest eigenvalue of each positive semidefinite matrix, of large ones by Lanczos steps.

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
        top, vector = largest_eigenpairs(lambda row: row @ matrix, vector, _STEPS)
        if top <= last * (1 + _GAIN):
            break
        last = top
    else:
        top = torch.linalg.eigvalsh(matrix)[-1:]
    return torch.maximum(top, last)[0]


def largest_eigenpairs(
    image: Callable[[Float[Tensor, "n r"]], Float[Tensor, "n r"]], b: Float[Tensor, "n r"], steps: int
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n r"]]:
    """Estimate leading eigenvalues and eigenvectors of positive semidefinite matrices by Lanczos steps.

    ``image`` multiplies row i by matrix i. The steps start at the rows of ``b``. The estimates are below the
    eigenvalues, up to rounding.
    """
    alphas, betas, vectors = [], [], []
    beta = size = b.new_zeros(len(b), 1)
    b, last = torch.nn.functional.normalize(b, dim=1), torch.zeros_like(b)
    for _ in range(steps):
        vectors.append(b)
        z = image(b)
        alpha = (b * z).sum(1, keepdim=True)
        size = torch.maximum(size, alpha)
        z = z - alpha * b - beta * last
        beta = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        # A length this small is rounding: the vectors span an invariant space, and the steps of this row end.
        beta = torch.where(beta > 3 * torch.finfo(b.dtype).eps ** 0.5 * size, beta, 0.0)
        last, b = b, torch.where(beta > 0, z / beta, 0.0)
        alphas.append(alpha)
        betas.append(beta)
    side = torch.diag_embed(torch.cat(betas[:-1], dim=1), offset=-1)
    values, coordinates = torch.linalg.eigh(torch.diag_embed(torch.cat(alphas, dim=1)) + side)
    found = (torch.stack(vectors, dim=-1) @ coordinates[:, :, -1:])[..., 0]
    return values[:, -1].clamp_min(0), found
