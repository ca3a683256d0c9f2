"""Upper bounds that hold in floating point, because every number is rounded up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds import Bound, Quantity
from howsmooth.errors import NonFiniteError

__all__ = ["norm_above", "rounded_up", "times", "upper_bound"]

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

    It is computed in float64. The computed singular values are exact for a matrix that differs from the given
    one by a small multiple of the machine epsilon times its norm (Golub and Van Loan, *Matrix Computations*,
    8.6). The added slack is many times larger.

    Raises
    ------
    NonFiniteError
        If the matrix contains NaN or infinity.

    """
    a = matrix.detach().to(device="cpu", dtype=torch.float64)
    if not bool(torch.isfinite(a).all()):
        raise NonFiniteError(argument, expected="finite numbers", got="NaN or infinity")
    if a.numel() == 0:
        return 0.0
    slack = 16 * (a.shape[0] + a.shape[1]) * torch.finfo(torch.float64).eps
    return float(torch.linalg.matrix_norm(a, 2)) * (1 + slack)


def upper_bound(name: str, source: str, constant: float, radius: float) -> Bound:
    """Return a given upper bound on a Lipschitz constant as a :class:`Bound`.

    The bound holds for tokens of norm at most ``radius``, or everywhere if the radius is infinite.
    """
    quantity = Quantity.EVERYWHERE if math.isinf(radius) else Quantity.GLOBAL
    return Bound.upper(name, quantity, source, formula=constant)
