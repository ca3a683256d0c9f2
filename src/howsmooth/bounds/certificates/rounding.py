"""Constants of floating-point error analysis; every certificate accounts for its rounding with them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from howsmooth.roundoff import U

__all__ = ["LARGEST", "TINY", "Enclosed"]

#: Data are scaled so that no number in a certificate exceeds this ...
LARGEST = 2.0**200

#: ... so that all underflows together, each at most 2^-1022 and multiplied by a few such numbers, move no
#: eigenvalue by more than this.
TINY = 2.0**-560


class Enclosed(NamedTuple):
    """A number that is proved to be an upper bound, and what the formula gives without allowances."""

    upper: Tensor
    plain: Tensor

    def root(self) -> Enclosed:
        """Return the square root."""
        return Enclosed(self.upper.sqrt() * (1 + 4 * U), self.plain.sqrt())
