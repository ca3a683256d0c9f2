"""Sentences about numbers, written from the numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from howsmooth.study.exponents import LEVEL, Exponent
from howsmooth.study.names import decimal

__all__ = ["between", "exp", "interval", "number", "power", "power_label"]

_LARGEST = 700.0  # a logarithm whose number does not overflow


def power(fit: Exponent, digits: int = 2) -> str:
    """Say an exponent with its interval: "n to the power 0.31 (95 % interval 0.29 to 0.33)"."""
    if fit.note:
        return f"n to no power that could be fitted ({fit.note})"
    return (
        f"n to the power {decimal(fit.slope, digits)} ({LEVEL * 100:.0f} % interval {interval(fit, digits)})"
    )


def interval(fit: Exponent, digits: int = 2) -> str:
    """Say the interval of an exponent: "0.29 to 0.33"."""
    return f"{decimal(fit.low, digits)} to {decimal(fit.high, digits)}"


def power_label(fit: Exponent, *, ends: bool = True) -> str:
    """Write an exponent for matplotlib, with its interval: "$n^{0.31}$ [0.29, 0.33]"."""
    if fit.note:
        return "no exponent"
    words = f"$n^{{{decimal(fit.slope, 2)}}}$"
    return f"{words} [{interval(fit).replace(' to ', ', ')}]" if ends else words


def number(value: float) -> str:
    """Say a number in three digits: "1.04", "0.0307", "1.2e+08"."""
    return f"{value:.3g}"


def between(values: pd.Series) -> str:
    """Say the smallest and the largest of some numbers, in three digits: "0.3 to 1.2", or "1.2" alone."""
    there = values.dropna()
    low, high = number(float(there.min())), number(float(there.max()))
    return low if low == high else f"{low} to {high}"


def exp(logs: pd.Series) -> pd.Series:
    """Give numbers of their logarithms, infinite where they overflow."""
    values = logs.to_numpy(np.float64)
    return pd.Series(np.where(values > _LARGEST, math.inf, np.exp(np.minimum(values, _LARGEST))), logs.index)
