"""Limits that are printed with few digits."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.rounding import interval_in_digits, limit_in_digits

POSITIVE = st.floats(1e-300, 1e300)


@given(value=POSITIVE, digits=st.integers(2, 8))
def test_a_limit_holds_as_printed_and_is_near(value: float, digits: int) -> None:
    low, high = (Decimal(limit_in_digits(value, digits, upper=upper)) for upper in (False, True))
    assert low <= Decimal(value) <= high
    assert high - low <= Decimal(value).scaleb(1 - digits)


@pytest.mark.parametrize(
    ("value", "upper", "printed"),
    [
        (1.1554001, True, "1.1555"),
        (1.1554999, False, "1.1554"),
        (2.0, True, "2"),
        (float("inf"), True, "inf"),
    ],
)
def test_few_digits(value: float, upper: bool, printed: str) -> None:
    assert limit_in_digits(value, 5, upper=upper) == printed


def test_an_interval_in_few_digits_contains_it() -> None:
    # To nearest it would be [64.063, 64.068], which excludes the constant 64.06254.
    assert interval_in_digits(64.062542, 64.067661, 5) == "[64.062, 64.068]"
