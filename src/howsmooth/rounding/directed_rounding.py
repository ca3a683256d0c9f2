"""Directed rounding in float64: constants of rounding errors, and functions that move a number up or down by
more than its error.

Every rounding allowance that the documentation calls proved rests on these assumptions. Numbers are rounded
to nearest. A computed sum of m products equals Σ a_l b_l (1 + θ_l) with |θ_l| ≤ γ_m, in any order of
summation. Elementary functions such as exp are correct to a few units in the last place.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "INFLATION", "LARGEST", "LEAST_DIVISOR", "LOG_MARGIN", "LOST", "STEP", "TINY", "UNDERFLOW", "U",
    "above", "below", "gamma", "log_above", "log_below", "product_and_error", "times", "up",
]  # fmt: skip

Number = TypeVar("Number", float, Tensor)

U = 2.0**-53
"""Unit roundoff of float64."""

UNDERFLOW = 2.0**-1000
"""Bound on the absolute error of an attention weight that underflows."""

LOST = 2.0**-530
"""Bound on the absolute error of a vector's norm, divided by √(number of entries), if squares underflow."""

LARGEST = 2.0**200
"""No number in a certificate may exceed this: larger data raise an error."""

TINY = 2.0**-560
"""All underflows of a certificate together change no eigenvalue by more than this. Each of them is at most
2^-1022, multiplied by a few numbers up to ``LARGEST``.
"""

LOG_MARGIN = 2.0**-40
"""Allowance on the logarithm of a formula in numbers >= 0, which is 8192 u.

Half of it covers 4000 roundings of products, quotients, roots and sums of numbers >= 0, or of elementary
functions at eight each: γ_4000 < 4096 u. The other half covers the roundings of logarithms that are added
and scaled: eight of them, at a size of up to 512. For larger logarithms see :func:`log_above`.
"""

# Roundings of a logarithm relative to its own size: a sum of up to some thirty logarithms of one sign.
_LOG_ROUNDINGS = 32


def gamma(m: int) -> float:
    """Return γ_m, the bound on the total relative error of m roundings in float64.

    It is γ_m = m u / (1 − m u), with the unit roundoff u; the order of the roundings is arbitrary.
    """
    return m * U / (1 - m * U)


def above(value: Number, operations: int) -> Number:
    """Round up a number >= 0, or each entry of a float64 tensor of such numbers, by more than the error of
    ``operations`` roundings.

    If ``value`` was computed by so many products, quotients, square roots and sums of exact numbers >= 0,
    what exact arithmetic gives is at most the result: it is at most value / (1 − u)^m ≤ value (1 + γ_m), and
    three more roundings cover the evaluation of this. An elementary function such as exp counts as eight.
    Zero stays zero, infinity infinity. Numbers that underflow are not covered.
    """
    return value * (1 + gamma(operations + 3))


def below(value: Number, operations: int) -> Number:
    """Round down a number >= 0 by more than the error of ``operations`` roundings, as :func:`above` rounds
    up.

    What exact arithmetic gives is at least value / (1 + u)^m ≥ value (1 − γ_m).
    """
    return value * (1 - gamma(operations + 3))


def log_above(log: Number) -> Number:
    """Round up the computed logarithm of a formula, by ``LOG_MARGIN`` and 32 unit roundoffs of its size."""
    return log + _log_allowance(log)


def log_below(log: Number) -> Number:
    """Round down the computed logarithm of a formula, by ``LOG_MARGIN`` and 32 unit roundoffs of its size."""
    return log - _log_allowance(log)


def _log_allowance(log: Number) -> Number:
    if isinstance(log, Tensor):
        size = torch.where(log.isfinite(), log.abs(), 0.0)
    else:
        size = abs(log) if math.isfinite(log) else 0.0
    return LOG_MARGIN + _LOG_ROUNDINGS * U * size


def up(errors: Number) -> Number:
    """Round up a bound on errors by the factor 1 + 10^-6.

    Bounds on errors are sums and products of numbers >= 0, so that 10^9 roundings change them by 10^-7 at
    most. As they need no more than a few digits, they are moved by 10^-6.
    """
    return errors * (1 + 1e-6)


def product_and_error(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of the entries of two float64 tensors, and their rounding errors. Without over- or
    underflow, the exact product is the sum of the two (Dekker, 1971).
    """
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    high = (2.0**27 + 1) * a
    high = high - (high - a)
    return high, a - high


LEAST_DIVISOR = 1e-300
"""Stands for a divisor of zero where the dividend is zero as well, so that the quotient is zero."""

INFLATION = 1 + gamma(90_000_000)
"""Factor, nearly 1 + 10^-8, by which a formula in numbers >= 0 is enlarged once at its end. It covers some
hundred sums of as many as 10^5 terms, one after the other.
"""

STEP = 1 + gamma(9_000_000)
"""Factor, nearly 1 + 10^-9, by which the result of one rule for errors is enlarged. It covers a norm of as
many as 10^7 numbers, and a few sums and products.
"""


def times(factor: float, value: float) -> float:
    """Return the product of two numbers >= 0, where zero times infinity is zero.

    A map with Lipschitz constant zero has a single value, so it maps an infinite ball to a point.
    """
    return factor * value if factor and value else 0.0
