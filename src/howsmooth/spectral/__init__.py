"""Linear operators that are given by products with vectors, and a solver for their largest singular value
with an interval.

Nothing in this package knows of attention.
"""

from howsmooth.spectral.lanczos import lanczos
from howsmooth.spectral.leading_triplet import LeadingTriplet
from howsmooth.spectral.operator import LinearOperator

__all__ = ["LeadingTriplet", "LinearOperator", "lanczos"]
