"""Bounds on rounding errors in float64: directed rounding, spectral norms, tensors that carry their errors.

``directed_rounding`` moves numbers past their errors, ``spectral_norms`` has proved norms.
Tensors of ``rounded_tensor`` and ``entry_bounds`` carry bounds on their own errors, and
``digits`` prints limits rounded outwards.
"""

from howsmooth.rounding.directed_rounding import (
    INFLATION,
    LARGEST,
    LEAST_DIVISOR,
    LOST,
    STEP,
    TINY,
    UNDERFLOW,
    U,
    above,
    below,
    gamma,
    log_above,
    log_below,
    product_and_error,
    times,
    up,
)
from howsmooth.rounding.entry_bounds import along_entries, entries_of, known_to
from howsmooth.rounding.printed_limits import COLUMNS_IN_DIGITS, interval_in_digits, limit_in_digits
from howsmooth.rounding.rounded_tensor import MissingRuleError, Rounded, exact, plain, settled
from howsmooth.rounding.spectral_norms import (
    Enclosed,
    MatrixNorms,
    Triangles,
    absolute_norms_above,
    largest_eigenvalues_above,
    largest_eigenvalues_by_squaring,
    product_norms_above,
    shrink,
    spectral_norm_above,
    spectral_norm_below,
    spectral_norms,
    spectral_norms_above,
    with_gradient,
)

__all__ = [
    "COLUMNS_IN_DIGITS",
    "INFLATION",
    "LARGEST",
    "LEAST_DIVISOR",
    "LOST",
    "STEP",
    "TINY",
    "UNDERFLOW",
    "Enclosed",
    "MatrixNorms",
    "MissingRuleError",
    "Rounded",
    "Triangles",
    "U",
    "above",
    "absolute_norms_above",
    "along_entries",
    "below",
    "entries_of",
    "exact",
    "gamma",
    "interval_in_digits",
    "known_to",
    "largest_eigenvalues_above",
    "largest_eigenvalues_by_squaring",
    "limit_in_digits",
    "log_above",
    "log_below",
    "plain",
    "product_and_error",
    "product_norms_above",
    "settled",
    "shrink",
    "spectral_norm_above",
    "spectral_norm_below",
    "spectral_norms",
    "spectral_norms_above",
    "times",
    "up",
    "with_gradient",
]
