"""Linear operators as dense matrices, and matrices of prescribed spectra as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.spectral import LinearOperator


def to_dense(operator: LinearOperator) -> Tensor:
    """The matrices of a linear operator, by one product for each input coordinate."""
    matrix = torch.empty(
        operator.batch, operator.out_size, operator.in_size, dtype=operator.dtype, device=operator.device
    )
    unit = torch.zeros(operator.batch, operator.in_size, dtype=operator.dtype, device=operator.device)
    for column in range(operator.in_size):
        unit[:, column] = 1.0
        image = operator.product(unit.view(operator.batch, *operator.in_shape))
        matrix[:, :, column] = image.reshape(operator.batch, -1)
        unit[:, column] = 0.0
    return matrix


class Dense(LinearOperator):
    """Matrices (batch, out, in) as an operator; counts its products."""

    def __init__(self, matrices: Tensor) -> None:
        batch, out_size, in_size = matrices.shape
        super().__init__(batch, (in_size,), (out_size,), matrices.dtype, matrices.device)
        self.matrices = matrices
        self.products = 0

    def _product(self, e: Tensor) -> Tensor:
        self.products += 1
        return torch.einsum("boi,bi->bo", self.matrices, e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return torch.einsum("boi,bo->bi", self.matrices, u)


def gaussian(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_spectrum(seed: int, values: list[float], out_size: int, in_size: int) -> Tensor:
    """A matrix of random singular vectors with the given singular values, the others zero."""
    u = torch.linalg.qr(gaussian(seed, out_size, out_size)).Q
    v = torch.linalg.qr(gaussian(seed + 1, in_size, in_size)).Q
    s = torch.tensor(values, dtype=torch.float64)
    return u[:, : len(values)] * s @ v[:, : len(values)].mT


class Diagonal(LinearOperator):
    """A diagonal matrix."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(1, values.shape, values.shape, values.dtype, values.device)
        self.values = values

    def _product(self, e: Tensor) -> Tensor:
        return self.values * e

    _adjoint_product = _product
