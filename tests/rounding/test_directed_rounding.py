"""Allowances against arithmetic of many digits, at the operations that round worst; printed limits."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.rounding import (
    LOST,
    U,
    above,
    below,
    gamma,
    interval_in_digits,
    limit_in_digits,
    log_above,
    log_below,
    product_and_error,
    times,
    up,
)
from howsmooth.rounding.directed_rounding import LOG_MARGIN

FACTORS = st.lists(st.floats(1.0, 2.0), min_size=2, max_size=40)


@given(factors=FACTORS)
def test_a_product_is_moved_past_its_exact_value(factors: list[float]) -> None:
    exact = math.prod(map(Fraction, factors))
    found = math.prod(factors)
    operations = len(factors) - 1
    assert Fraction(below(found, operations)) <= exact <= Fraction(above(found, operations))


@pytest.mark.parametrize("operations", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("mantissa", [1.0, 1.5, 2 - 2.0**-52, 1 + 2.0**-52])
def test_a_number_is_moved_by_the_roundings_that_it_may_have(operations: int, mantissa: float) -> None:
    # Every operation rounded down, or up, by as much as it can.
    value, u = Fraction(mantissa), Fraction(U)
    assert Fraction(above(mantissa, operations)) >= value / (1 - u) ** operations
    assert Fraction(below(mantissa, operations)) <= value / (1 + u) ** operations
    assert above(mantissa, operations) <= mantissa * (1 + 2 * (operations + 4) * U)
    entries = torch.tensor([mantissa], dtype=torch.float64)
    assert float(above(entries, operations)) == above(mantissa, operations)


def test_zero_and_infinity_stay() -> None:
    assert above(0.0, 5) == below(0.0, 5) == 0.0
    assert above(math.inf, 5) == math.inf
    assert log_above(-math.inf) == log_below(-math.inf) == -math.inf
    assert log_above(math.inf) == math.inf
    both = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
    assert log_above(both).tolist() == [-math.inf, math.inf]
    assert times(0.0, math.inf) == times(math.inf, 0.0) == 0.0
    assert times(2.0, 3.0) == 6.0


@given(m=st.integers(1, 10**6))
def test_gamma_covers_so_many_roundings(m: int) -> None:
    u = Fraction(U)
    exact = m * u / (1 - m * u)
    assert abs(Fraction(gamma(m)) - exact) <= 4 * u * exact
    assert U * m <= gamma(m)


@given(logs=st.lists(st.floats(-700.0, 700.0), min_size=1, max_size=8))
def test_a_sum_of_logarithms_is_moved_past_its_exact_value(logs: list[float]) -> None:
    found, exact = sum(logs), sum(map(Fraction, logs))
    assert Fraction(log_below(found)) <= exact <= Fraction(log_above(found))


def test_the_margin_of_a_logarithm_has_the_roundings_that_it_names() -> None:
    # 4000 roundings of the formula, and eight of logarithms of size 512.
    assert math.log1p(gamma(4000)) + 8 * 512 * U <= LOG_MARGIN <= 1e-12
    assert log_above(-1e4) - -1e4 >= LOG_MARGIN + 31 * U * 1e4
    assert -1e4 - log_below(-1e4) >= LOG_MARGIN + 31 * U * 1e4


def test_errors_are_enlarged_by_more_than_their_own_rounding() -> None:
    assert up(1.0) - 1 >= gamma(10**9)
    assert up(1.0) <= 1 + 2e-6
    assert float(up(torch.tensor(3.0, dtype=torch.float64))) == up(3.0)


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_lost_covers_squares_that_underflow(count: int) -> None:
    # The largest number whose square becomes zero; of several, those that leave most of their sum.
    small = 2.0**-538 * math.sqrt(2.0) * (1 - 1e-15)
    vector = torch.full((count,), small, dtype=torch.float64)
    assert float(torch.sum(vector * vector)) == 0
    assert small * math.sqrt(count) <= LOST * math.sqrt(count)


@given(*[st.floats(-1e100, 1e100).filter(lambda t: t == 0 or abs(t) > 1e-100)] * 2)
def test_a_product_is_the_sum_of_its_parts(a: float, b: float) -> None:
    parts = product_and_error(*(torch.tensor(t, dtype=torch.float64) for t in (a, b)))
    assert sum(Fraction(float(part)) for part in parts) == Fraction(a) * Fraction(b)
    assert float(parts[0]) == a * b


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
