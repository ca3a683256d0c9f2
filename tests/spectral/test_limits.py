"""The limits that hold with a probability over the start, and the share of starts for which they do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from howsmooth.spectral import lanczos
from howsmooth.spectral.probabilistic_upper_limits import a_posteriori_upper, start_quantile
from tests._operators import Dense, gaussian


@pytest.mark.parametrize("dimension", [2, 3, 10, 1000])
def test_start_quantile_is_that_of_a_gaussian_direction(dimension: int) -> None:
    x = start_quantile(dimension, 0.99)
    density = stats.beta(0.5, (dimension - 1) / 2)
    assert density.cdf(x) == pytest.approx(0.01, rel=1e-9)
    cosines = gaussian(dimension, 20000, dimension)
    squared = (cosines[:, 0] / cosines.norm(dim=1)) ** 2
    assert float((squared < start_quantile(dimension, 0.7)).double().mean()) == pytest.approx(0.3, abs=0.015)


def test_start_quantile_in_dimension_one() -> None:
    assert start_quantile(1, 0.999) == 1.0


def test_start_quantile_by_quadrature() -> None:
    # Independent of scipy.special: the density of the cosine itself, integrated.
    n, x = 50, start_quantile(50, 0.999)
    norm, _ = integrate.quad(lambda c: (1 - c * c) ** ((n - 3) / 2), 0, 1)
    mass, _ = integrate.quad(lambda c: (1 - c * c) ** ((n - 3) / 2), 0, math.sqrt(x))
    assert mass / norm == pytest.approx(0.001, rel=1e-6)


@given(
    theta=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    log_off=st.floats(-40, 5),
    quantile=st.floats(1e-14, 0.9),
)
def test_a_posteriori_limit_solves_its_equation(theta: list[float], log_off: float, quantile: float) -> None:
    values = np.array(theta)
    t = a_posteriori_upper(values, log_off, quantile)
    assert t >= values.max()
    if t - values.max() > 1e-9:  # else the difference itself has no digits left
        left = np.log(t - values).sum() - log_off
        assert left == pytest.approx(-0.5 * math.log(quantile), abs=1e-5)


def test_a_posteriori_limit_of_one_step_by_hand() -> None:
    # t − θ = β / √x
    assert a_posteriori_upper(np.array([2.0]), math.log(0.1), 0.25) == pytest.approx(2.2)
    assert a_posteriori_upper(np.array([2.0, 1.0]), -math.inf, 0.25) == 2.0


@pytest.mark.parametrize("trials", [600, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("confidence", [0.6, pytest.param(0.9, marks=pytest.mark.slow)])
def test_coverage_is_at_least_the_confidence(confidence: float, trials: int) -> None:
    """The share of random starts whose interval holds, on a spectrum that makes the limit tight.

    One large singular value that few steps can miss: the a-posteriori limit misses it exactly when the
    start's cosine with it is below the quantile, so coverage is the confidence, not merely above it.
    """
    n = 40
    values = [1.0 + 1e-3, *np.linspace(0.0, 1.0, n - 1)]
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64)).expand(trials, n, n)
    for steps in (1, 2, 4):
        options = {"rtol": 1e-12, "confidence": confidence, "max_iterations": steps}
        found = lanczos(Dense(matrix), gaussian(steps, trials, n), **options)
        assert (found.lower <= values[0]).all()
        share = float((found.upper >= values[0]).double().mean())
        assert share >= confidence - 4 * math.sqrt(confidence * (1 - confidence) / trials)


def test_coverage_is_attained_so_that_the_limit_is_not_vacuous() -> None:
    """Where the rest of the spectrum is one value, the first step's limit is exact on the event's border."""
    trials, n, confidence = 2000, 30, 0.8
    values = torch.zeros(n, dtype=torch.float64)
    values[0] = 1.0
    matrix = torch.diag(values).expand(trials, n, n)
    start = gaussian(0, trials, n)
    found = lanczos(Dense(matrix), start, confidence=confidence, max_iterations=1, rtol=1e-12)
    share = float((found.upper >= 1.0).double().mean())
    assert confidence - 0.03 <= share <= 0.97
    # theory: with c² the squared cosine, θ = c² and β = c √(1 − c²), so the limit c² + c√(1−c²)/√x
    # holds exactly where it is at least 1
    x = start_quantile(n, confidence)
    c = (start[:, 0] / start.norm(dim=1)).abs()
    expected = c**2 + c * torch.sqrt(1 - c**2) / math.sqrt(x) >= 1.0
    assert ((found.upper >= 1.0) == expected).double().mean() > 0.999
