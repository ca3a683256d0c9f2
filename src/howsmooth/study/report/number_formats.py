"""Format numbers, names and times for the report."""

from __future__ import annotations

import math

from howsmooth.study.exponents import LEVEL
from howsmooth.study.text_formatting import decimal, readable

__all__ = ["CONFIDENCE", "chance", "number", "plain", "slope"]

CONFIDENCE = f"{LEVEL * 100:.0f} %"
"""The confidence of the intervals of exponents and correlations, as text."""


def number(value: float | None) -> str:
    """Format a number with three significant digits; a missing one is empty."""
    return "" if value is None or math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def slope(value: float | None) -> str:
    """Format an exponent or a correlation with three decimals; a missing one is empty."""
    return "" if value is None or math.isnan(value) else decimal(value, 3)


def chance(value: float | None) -> str:
    """Format a p value; values below 0.001 are shown as "below 0.001"."""
    return "below 0.001" if value is not None and value < 0.001 else slope(value)


def plain(value: object) -> str:
    """Return a name or path without control characters and with at most 300 characters."""
    return readable(str(value), longest=300)
