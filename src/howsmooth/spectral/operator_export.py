"""Conversion of a linear operator to a dense matrix (for small operators) or to SciPy's
``LinearOperator``.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import linalg as sparse_linalg
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.spectral.operator import LinearOperator

__all__ = ["to_dense", "to_scipy"]


def to_dense(operator: LinearOperator) -> Float[Tensor, "batch out_size in_size"]:
    """Return the matrices (batch, out_size, in_size) of a linear operator, computed by one product for each
    input coordinate.

    Parameters
    ----------
    operator
        The linear operator, a batch of maps of R^in_size to R^out_size.

    """
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


def to_scipy(operator: LinearOperator, member: int = 0) -> sparse_linalg.LinearOperator:
    """Return one map of a batched linear operator as a ``scipy.sparse.linalg.LinearOperator`` of shape
    (out_size, in_size).

    Parameters
    ----------
    operator
        The linear operator, a batch of maps.
    member
        The index of the map in the batch.

    Raises
    ------
    ArgumentError
        If there is no such member.

    """
    if not 0 <= member < operator.batch:
        raise ArgumentError("member", expected=f"0 to {operator.batch - 1}", got=str(member))
    one = operator.select(torch.tensor([member]))

    def vector(x: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(x), dtype=one.dtype, device=one.device).view(1, *shape)

    def matvec(x: np.ndarray) -> np.ndarray:
        return np.asarray(one.product(vector(x, one.in_shape)).reshape(-1).cpu())

    def rmatvec(y: np.ndarray) -> np.ndarray:
        return np.asarray(one.adjoint_product(vector(y, one.out_shape)).reshape(-1).cpu())

    return sparse_linalg.LinearOperator(
        shape=(one.out_size, one.in_size),
        matvec=matvec,
        rmatvec=rmatvec,
        dtype=np.dtype(str(one.dtype).removeprefix("torch.")),
    )
