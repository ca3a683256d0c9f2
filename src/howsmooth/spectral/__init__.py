"""Linear operators given by products with vectors, and solvers for their largest singular value with an
interval.

Nothing in this package knows of attention.
"""

from howsmooth.spectral.golub_kahan import TRIPLET_FIELDS, LeadingTriplet, golub_kahan
from howsmooth.spectral.lanczos import lanczos, lanczos_together
from howsmooth.spectral.operator import LinearOperator, ProductError, Subset
from howsmooth.spectral.operator_export import to_dense, to_scipy
from howsmooth.spectral.probabilistic_upper_limits import a_posteriori_upper, a_priori_upper, start_quantile

__all__ = [
    "TRIPLET_FIELDS",
    "LeadingTriplet",
    "LinearOperator",
    "ProductError",
    "Subset",
    "a_posteriori_upper",
    "a_priori_upper",
    "golub_kahan",
    "lanczos",
    "lanczos_together",
    "start_quantile",
    "to_dense",
    "to_scipy",
]
