"""Constants and functions for proved bounds on float64 rounding errors.

Every rounding allowance that the documentation calls proved rests on these assumptions. Numbers are rounded
to nearest. A computed sum of m products equals Σ a_l b_l (1 + θ_l) with |θ_l| ≤ γ_m, in any order of
summation. Elementary functions such as exp are correct to a few units in the last place.
"""

from __future__ import annotations

import decimal
import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "COLUMNS_IN_DIGITS",
    "LOST",
    "UNDERFLOW",
    "MatrixNorms",
    "U",
    "gamma",
    "interval_in_digits",
    "limit_in_digits",
    "up",
]

U = 2.0**-53
"""Unit roundoff of float64."""

UNDERFLOW = 2.0**-1000
"""Bound on the absolute error of an attention weight that underflows."""

LOST = 2.0**-530
"""Bound on the absolute error of a vector's norm, divided by √(number of entries), if squares underflow."""

# Error bounds are sums and products of nonnegative numbers, so their own relative rounding error is far
# below this number.
_ERROR_OF_ERRORS = 1e-6


def gamma(m: int) -> float:
    """Return γ_m, the bound on the total relative error of m roundings in float64.

    It is γ_m = m u / (1 − m u), with the unit roundoff u; the order of the roundings is arbitrary.
    """
    return m * U / (1 - m * U)


def limit_in_digits(value: float, digits: int, *, upper: bool) -> str:
    """Format an upper limit rounded up, or a lower limit rounded down, with a given number of significant
    digits.
    """
    rounding = decimal.ROUND_CEILING if upper else decimal.ROUND_FLOOR
    rounded = decimal.Context(prec=digits, rounding=rounding).create_decimal(value)
    return f"{float(rounded):.{digits}g}"


def interval_in_digits(lower: float, upper: float, digits: int = 6) -> str:
    """Format an interval as text such as ``[1.2345, 1.2347]``, with its ends rounded outwards."""
    low, high = limit_in_digits(lower, digits, upper=False), limit_in_digits(upper, digits, upper=True)
    return f"[{low}, {high}]"


#: Functions that format the ends of intervals in the columns of a table, rounded outwards to six digits.
COLUMNS_IN_DIGITS: dict[str, Callable[[float], str]] = {
    "lower": functools.partial(limit_in_digits, digits=6, upper=False),
    "upper": functools.partial(limit_in_digits, digits=6, upper=True),
}


def up(error: Tensor) -> Tensor:
    """Increase an error bound slightly, so that it covers the rounding errors of its own computation."""
    return error * (1 + _ERROR_OF_ERRORS)


class MatrixNorms:
    """Upper bounds on the norms of matrices, each computed once and then cached.

    A matrix is identified by its address in memory, shape and strides. The cache keeps a reference to the
    matrix, so that no other tensor can reuse its address. The matrices must not be changed in place.
    """

    def __init__(self) -> None:
        self._found: dict[object, tuple[Tensor, Tensor]] = {}

    def spectral(self, matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
        """Return a tight upper bound on the spectral norm ‖W‖₂ of each matrix W.

        The bound is the Schatten norm (Σ σ⁸)^(1/8) = ‖(W Wᵀ)²‖_F^(1/4), which takes two matrix products.
        """
        return self._once("spectral", matrices, _schatten)

    def absolute(self, matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
        """Return, for each matrix W, an upper bound on the spectral norm of the matrix |W| of absolute
        values.

        The bound is √(‖W‖₁ ‖W‖_∞), computed from the largest column sum and the largest row sum of |W|.
        """
        return self._once("absolute", matrices, _of_sums)

    def _once(self, name: str, matrices: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
        key = (name, matrices.data_ptr(), matrices.shape, matrices.stride())
        if key not in self._found:
            self._found[key] = matrices, form(matrices)
        return self._found[key][1]


def _schatten(matrices: Tensor) -> Tensor:
    # Entries are scaled to at most 1, because their eighth powers could overflow or underflow.
    size = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = matrices / torch.where(size > 0, size, 1.0)
    gram = scaled @ scaled.mT if matrices.shape[-2] <= matrices.shape[-1] else scaled.mT @ scaled
    found: Tensor = torch.linalg.matrix_norm(gram @ gram).sqrt().sqrt() * size[..., 0, 0]
    return up(found)


def _of_sums(matrices: Tensor) -> Tensor:
    size = matrices.abs()
    return up((size.sum(dim=-1).amax(dim=-1) * size.sum(dim=-2).amax(dim=-1)).sqrt())
