"""Linear operators as dense matrices."""

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
