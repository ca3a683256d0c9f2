"""How numbers, names and times are shown on the page."""

from __future__ import annotations

import math
from datetime import timedelta

from howsmooth.study.exponents import LEVEL
from howsmooth.study.names import decimal, readable

__all__ = ["CONFIDENCE", "chance", "duration", "number", "plain", "slope"]

CONFIDENCE = f"{LEVEL * 100:.0f} %"
"""Of the intervals of exponents and correlations."""


def number(value: float | None) -> str:
    """Show a positive number with three digits, a missing one as nothing."""
    return "" if value is None or math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def slope(value: float | None) -> str:
    """Show an exponent or a correlation, a missing one as nothing."""
    return "" if value is None or math.isnan(value) else decimal(value, 3)


def chance(value: float | None) -> str:
    """Show a p value; very small ones only as such, since their digits mean nothing."""
    return "below 0.001" if value is not None and value < 0.001 else slope(value)


def plain(value: object) -> str:
    """Make a name or a path fit to be shown: no control or direction characters, not endless."""
    return readable(str(value), longest=300)


def duration(seconds: float) -> str:
    """Show a time in words."""
    if seconds < 60:
        return f"{seconds:.1f} seconds"
    return f"{timedelta(seconds=round(seconds))} (hours:minutes:seconds)"
