"""Linear operators given by products with vectors, and solvers for their largest singular value with an
interval.

Nothing in this package knows of attention.
"""

from howsmooth.spectral.golub_kahan import LeadingTriplet, golub_kahan
from howsmooth.spectral.lanczos import lanczos
from howsmooth.spectral.operator import LinearOperator

__all__ = [
    "LeadingTriplet",
    "LinearOperator",
    "golub_kahan",
    "lanczos",
]
