from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.study import exponents as module
from howsmooth.study.exponents import EXPONENT_COLUMNS, exponents, fit_exponent

PROTOCOL = np.repeat(np.arange(2, 101, 2), 10)


@given(
    st.floats(-2, 2), st.floats(-3, 3), st.lists(st.integers(1, 1000), min_size=3, max_size=40, unique=True)
)
def test_a_power_law_without_noise_is_found_exactly(slope: float, scale: float, lengths: list[int]) -> None:
    n = np.array(lengths)
    fit = fit_exponent(n, np.exp(scale) * n.astype(float) ** slope, np.ones(len(n), dtype=bool))
    assert fit.slope == pytest.approx(slope, abs=1e-9)
    assert fit.intercept == pytest.approx(scale, abs=1e-8)
    assert fit.low == fit.slope == fit.high
    assert fit.spread < 1e-8
    assert fit.at(10.0) == pytest.approx(math.exp(scale) * 10.0**slope)


def spread_of(kind: str, x: np.ndarray) -> np.ndarray:
    return np.full_like(x, 0.1) if kind == "same everywhere" else 0.3 * np.exp(-0.5 * (x - x.min()))


@pytest.mark.parametrize("kind", ["same everywhere", "larger for short sequences"])
@pytest.mark.parametrize(
    ("n", "interval", "least"),
    [
        (PROTOCOL, "bootstrap", 0.88),
        (np.repeat([2, 4, 8, 16, 32], 4), "t", 0.88),
    ],
    ids=["protocol", "few"],
)
def test_the_interval_covers_the_truth_about_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch, kind: str, n: np.ndarray, interval: str, least: float
) -> None:
    """95 % is claimed; chance and the bootstrap's optimism take a few per cent.

    The textbook interval covers in two cases of three where short sequences spread more.
    """
    monkeypatch.setattr(module, "_RESAMPLES", 500)
    generator = np.random.default_rng(5)
    x = np.log(n)
    trials, covered = 300, 0
    for _ in range(trials):
        y = 0.25 * x + spread_of(kind, x) * generator.standard_normal(len(x))
        fit = fit_exponent(n, np.exp(y), np.ones(len(n), dtype=bool))
        assert fit.interval == interval
        covered += fit.low <= 0.25 <= fit.high
    assert least <= covered / trials <= 0.99


def test_unconverged_points_and_zeros_are_left_out_and_counted() -> None:
    n = np.array([2, 4, 8, 16, 32, 64])
    values = n**0.5
    values[1], values[3] = 1e9, 0.0
    fit = fit_exponent(n, values, np.array([True, False, True, True, True, True]))
    assert fit.slope == pytest.approx(0.5)
    assert (fit.left_out, fit.n_points, fit.n_min, fit.n_max) == (2, 4, 2, 64)


@pytest.mark.parametrize("lengths", [[], [5, 5, 5, 5], [4, 8, 4, 8]])
def test_too_few_lengths_give_a_note_and_no_number(lengths: list[int]) -> None:
    n = np.array(lengths, dtype=np.int64)
    fit = fit_exponent(n, np.ones(len(n)), np.ones(len(n), dtype=bool))
    assert math.isnan(fit.slope)
    assert fit.note == "fewer than 3 lengths to fit"
    assert fit.n_points == len(lengths)


def test_every_group_is_fitted_apart_and_heads_may_be_missing() -> None:
    rows = [
        {"model": "m", "text": "t", "scope": scope, "layer": layer, "head": head, "n": n, "converged": True,
         "lipschitz": n ** (0.1 * (layer + 1) + (0 if head is None else 0.5))}
        for scope, head in (("attention", None), ("head", 0), ("head", 1))
        for layer in (0, 1)
        for n in (2, 4, 8)
    ]  # fmt: skip
    table = exponents(pd.DataFrame(rows).astype({"head": "Int64"}))
    assert tuple(table.columns) == EXPONENT_COLUMNS
    assert table["scope"].tolist() == ["attention"] * 2 + ["head"] * 4
    assert table["head"].isna().tolist() == [True, True, False, False, False, False]
    np.testing.assert_allclose(table["slope"].astype(float), [0.1, 0.2, 0.6, 0.6, 0.7, 0.7], atol=1e-12)


def test_the_same_points_give_the_same_interval() -> None:
    generator = np.random.default_rng(1)
    values = np.exp(0.25 * np.log(PROTOCOL) + 0.1 * generator.standard_normal(len(PROTOCOL)))
    usable = np.ones(len(PROTOCOL), dtype=bool)
    assert fit_exponent(PROTOCOL, values, usable) == fit_exponent(PROTOCOL, values, usable)
