"""Format fitted exponents and ranges of numbers as text for the sentences and labels of the figures."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from howsmooth.study.exponents import LEVEL, Exponent
from howsmooth.words import decimal

__all__ = ["between", "exp", "power", "power_label"]

_LARGEST = 700.0  # a logarithm whose number does not overflow


def power(fit: Exponent) -> str:
    """Return a fitted exponent and its confidence interval as text, such as "n to the power 0.31 (95 %
    interval 0.29 to 0.33)".
    """
    if fit.note:
        return f"n to no power that could be fitted ({fit.note})"
    slope, low, high = (decimal(value, 2) for value in (fit.slope, fit.low, fit.high))
    return f"n to the power {slope} ({LEVEL * 100:.0f} % interval {low} to {high})"


def power_label(fit: Exponent, *, ends: bool = True) -> str:
    """Return a fitted exponent and its confidence interval as a matplotlib label, such as "$n^{0.31}$ [0.29,
    0.33]".
    """
    slope, low, high = (decimal(value, 2) for value in (fit.slope, fit.low, fit.high))
    return "no exponent" if fit.note else f"$n^{{{slope}}}$" + (f" [{low}, {high}]" if ends else "")


def between(values: pd.Series, say: str = "{:.3g}") -> str:
    """Return the range of some numbers as text, such as "0.3 to 1.2", or a single number if all are equal."""
    low, high = (say.format(float(end)) for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def exp(logs: pd.Series) -> pd.Series:
    """Return the exponentials of the given logarithms; an exponential that overflows is infinite."""
    values = logs.to_numpy(np.float64)
    return pd.Series(np.where(values > _LARGEST, math.inf, np.exp(np.minimum(values, _LARGEST))), logs.index)
