"""Numbers that are rounded up, so that upper bounds made of them hold in floating point."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.errors import NonFiniteError

__all__ = ["norm_above", "rounded_up", "times"]

# Relative margin for the rounding of a few products, quotients and sums of positive numbers. It is far above
# their rounding errors and far below the digits of a constant that matter.
_MARGIN = 1e-12


def rounded_up(value: float) -> float:
    """Increase a number >= 0 by more than the rounding errors of a few float64 operations."""
    return value * (1 + _MARGIN)


def times(factor: float, value: float) -> float:
    """Return the product of two numbers, where zero times infinity is zero.

    A map with Lipschitz constant zero has a single value, so it maps an infinite ball to a point.
    """
    return factor * value if factor and value else 0.0


def norm_above(argument: str, matrix: Tensor) -> float:
    """Return an upper bound on the spectral norm of a matrix (m, k) that holds despite rounding errors.

    The singular values computed in float64 are exact for a matrix that differs from the given one by a small
    multiple of the machine epsilon times its norm (Golub and Van Loan, *Matrix Computations*, 8.6). The slack
    is many times larger. NonFiniteError names the ``argument`` if the matrix contains NaN or infinity.
    """
    a = matrix.detach().to(device="cpu", dtype=torch.float64)
    if not bool(torch.isfinite(a).all()):
        raise NonFiniteError(argument, expected="finite numbers", got="NaN or infinity")
    if a.numel() == 0:
        return 0.0
    slack = 16 * (a.shape[0] + a.shape[1]) * torch.finfo(torch.float64).eps
    return float(torch.linalg.matrix_norm(a, 2)) * (1 + slack)
