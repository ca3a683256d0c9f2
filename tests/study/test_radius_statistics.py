from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from howsmooth.study.radius_statistics import radius_correlation, terciles

PROTOCOL = np.repeat(np.arange(2, 101, 2), 10)


@given(arrays(np.float64, st.integers(0, 40), elements=st.floats(0.5, 2)))
def test_thirds_are_apart_ordered_and_hold_every_point(radius: np.ndarray) -> None:
    small, middle, large = terciles(radius)
    together = small.astype(int) + middle + large
    if len(radius) == 0 or np.ptp(radius) <= 1e-6 * radius.max():
        assert not together.any()
        return
    assert (together == 1).all()
    ends = [(part.min(), part.max()) for part in (radius[small], radius[middle], radius[large]) if len(part)]
    assert all(below[1] < above[0] for below, above in pairwise(ends))
    if len(np.unique(radius)) == len(radius):
        assert max(small.sum(), middle.sum(), large.sum()) <= len(radius) // 3 + 1


def test_the_interval_is_the_jackknife_of_fishers_z() -> None:
    draw = np.random.default_rng(3)
    n = draw.integers(2, 100, 30)
    radius = n**0.2 * np.exp(0.4 * draw.standard_normal(30))
    found = radius_correlation(n, radius, 0.95)
    x, y = np.log(n), np.log(radius)
    without = np.array([np.arctanh(np.corrcoef(np.delete(x, i), np.delete(y, i))[0, 1]) for i in range(30)])
    half = stats.t.ppf(0.975, 28) * np.sqrt(29 / 30 * ((without - without.mean()) ** 2).sum())
    centre = np.arctanh(np.corrcoef(x, y)[0, 1])
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert (found.low, found.high) == pytest.approx((np.tanh(centre - half), np.tanh(centre + half)))


@pytest.mark.parametrize("decay", [0.0, 0.5], ids=["same spread", "short sequences spread more"])
@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(decay: float, correlation: float) -> None:
    draw = np.random.default_rng(8)
    x = np.log(PROTOCOL)
    spread = np.exp(-decay * x)
    slope = correlation / math.sqrt(1 - correlation**2) * math.sqrt((spread**2).mean()) / x.std()
    covered = 0
    for _ in range(1000):
        found = radius_correlation(PROTOCOL, np.exp(slope * x + spread * draw.standard_normal(len(x))), 0.95)
        covered += found.low <= correlation <= found.high
    assert 0.92 <= covered / 1000 <= 0.98


def test_a_power_of_the_length_correlates_fully() -> None:
    n = np.array([2, 4, 8, 16])
    up, down = radius_correlation(n, 3 * n**0.1, 0.95), radius_correlation(n, 3 * n**-0.1, 0.95)
    assert (up.value, up.low, up.high) == pytest.approx((1, 1, 1))
    assert (down.value, down.low, down.high) == pytest.approx((-1, -1, -1))


def test_where_one_point_decides_the_interval_says_nothing() -> None:
    found = radius_correlation(np.array([2, 4, 8, 16, 32]), np.array([1.0, 1.0, 1.0, 1.0, 3.0]), 0.95)
    assert found.value == pytest.approx(1 / math.sqrt(2), abs=1e-6)
    assert (found.low, found.high) == (-1, 1)


@pytest.mark.parametrize(
    ("n", "radius"),
    [
        ([], []),
        ([2, 4, 8], [1.0, 2.0, 1.5]),
        ([2, 2, 4, 4], [1.0, 2.0, 1.5, 1.7]),
        ([2, 4, 8, 16], [5.0, 5.0, 5.0, 5.000001]),
        ([2, 4, 8, 16, 32], [0.0, 0.0, 1.0, 2.0, 3.0]),
    ],
    ids=["nothing", "three points", "two lengths", "one radius", "zeros"],
)
def test_no_number_where_a_correlation_has_no_meaning(n: list[int], radius: list[float]) -> None:
    found = radius_correlation(np.array(n, dtype=np.int64), np.array(radius), 0.95)
    assert all(math.isnan(value) for value in (found.value, found.low, found.high))
