"""Format limits and intervals as text, rounded outwards, so that the printed numbers are limits, too."""

from __future__ import annotations

import decimal
import functools
from collections.abc import Callable

__all__ = ["COLUMNS_IN_DIGITS", "interval_in_digits", "limit_in_digits"]


def limit_in_digits(value: float, digits: int, *, upper: bool) -> str:
    """Format a limit with a given number of significant digits. An upper limit is rounded up, a lower limit
    down.
    """
    rounding = decimal.ROUND_CEILING if upper else decimal.ROUND_FLOOR
    rounded = decimal.Context(prec=digits, rounding=rounding).create_decimal(value)
    return f"{float(rounded):.{digits}g}"


def interval_in_digits(lower: float, upper: float, digits: int = 6) -> str:
    """Format an interval as text such as ``[1.2345, 1.2347]``, with its ends rounded outwards."""
    low, high = limit_in_digits(lower, digits, upper=False), limit_in_digits(upper, digits, upper=True)
    return f"[{low}, {high}]"


#: Functions that format the ends of intervals in the columns of a table, rounded outwards to six digits.
COLUMNS_IN_DIGITS: dict[str, Callable[[float], str]] = {
    "lower": functools.partial(limit_in_digits, digits=6, upper=False),
    "upper": functools.partial(limit_in_digits, digits=6, upper=True),
}
