"""The class ``Enclosed``, a computed number with a proved upper bound that covers rounding. Also the
constants ``LARGEST`` and ``TINY`` for overflow and underflow.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from howsmooth.roundoff import U

__all__ = ["LARGEST", "TINY", "Enclosed"]

#: No number in a certificate may exceed this: larger data raise an error.
LARGEST = 2.0**200

#: All underflows together change no eigenvalue by more than this. Each of them is at most 2^-1022, multiplied
#: by a few numbers up to ``LARGEST``.
TINY = 2.0**-560


class Enclosed(NamedTuple):
    """A number computed by a formula, with a proved upper bound that covers all rounding errors."""

    upper: Tensor
    plain: Tensor

    def root(self) -> Enclosed:
        """Return the square root of the computed number and of its proved upper bound.

        The root of the proved bound is rounded up.
        """
        return Enclosed(self.upper.sqrt() * (1 + 4 * U), self.plain.sqrt())
