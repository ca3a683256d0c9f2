"""Constants of floating-point error analysis; every certificate accounts for its rounding with them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["LARGEST", "TINY", "UNDERFLOW", "Enclosed", "U", "gamma", "up"]

#: Unit roundoff of float64.
U = 2.0**-53

#: Data are scaled so that no number in a certificate exceeds this ...
LARGEST = 2.0**200

#: ... so that all underflows together, each at most 2^-1022 and multiplied by a few such numbers, move no
#: eigenvalue by more than this.
TINY = 2.0**-560

#: What an attention weight that underflows may be off by.
UNDERFLOW = 2.0**-1000

# Terms of an error bound are nonnegative numbers, computed with relative errors far below this.
_ERROR_OF_ERRORS = 1e-6


class Enclosed(NamedTuple):
    """A number that is proved to be an upper bound, and what the formula gives without allowances."""

    upper: Tensor
    plain: Tensor

    def root(self) -> Enclosed:
        """Return the square root."""
        return Enclosed(self.upper.sqrt() * (1 + 4 * U), self.plain.sqrt())


def gamma(m: int) -> float:
    """Return γ_m = m u / (1 − m u): relative error of a sum or product of m roundings, in any order."""
    return m * U / (1 - m * U)


def up(error: Tensor) -> Tensor:
    """Round an error bound, itself computed in floating point, up."""
    return error * (1 + _ERROR_OF_ERRORS)
