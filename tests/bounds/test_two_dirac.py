"""Proposition 3.6 through measures: two Diracs, up to where e^{2γR²} leaves float64, and beyond."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import mean_field_upper_bound, theorem_3_5
from howsmooth.bounds.mean_field_bounds import (
    proposition_3_6,
    proposition_3_6_rate,
    two_dirac,
    weighted_two_atom_lower_bound,
)
from howsmooth.errors import NonFiniteError
from howsmooth.measures import DiscreteMeasure, wasserstein_lipschitz

# g = γR², half the gap of scores; e^{2g} overflows float64 at 2g = 709.8, and the weight underflows at 745.
STRENGTHS = (0.05, 0.7, 3.0, 20.0, 100.0, 300.0, 354.0, 356.0, 373.0, 500.0, 703.0)


def diracs(g: float, odds: float, ratio: float, u: Tensor) -> DiscreteMeasure:
    """Mass 1/(1 + e^odds) at Ru and the rest at ratio · Ru, R = √g."""
    tail = math.log1p(math.exp(-odds))
    points = math.sqrt(g) * torch.stack([u, ratio * u])
    return DiscreteMeasure(points, log_weights=torch.tensor([-odds - tail, -tail], dtype=torch.float64))


def attention(A: Tensor, V: Tensor) -> hs.SelfAttention:
    return hs.SelfAttention(A[None], torch.eye(len(A), dtype=torch.float64)[None], V[None], scale=1.0)


@pytest.mark.parametrize("g", STRENGTHS)
@pytest.mark.parametrize(("gamma", "ratio"), [(-1.0, -1.0), (8.0, 0.5)])
def test_the_best_weight_up_to_the_end_of_float64(g: float, gamma: float, ratio: float) -> None:
    """On the line the bound two_dirac is the constant itself, and it lies between its neighbours."""
    one = torch.ones(1, 1, dtype=torch.float64)
    mu = diracs(g, math.log(3) + 2 * g, ratio, one[0])
    found = wasserstein_lipschitz(attention(gamma * one, one), mu, rtol=1e-9)
    radius = math.sqrt(g)
    bound = two_dirac(gamma, radius, cluster="opposite" if gamma < 0 else "half")
    log = math.log(found.value)
    assert log == pytest.approx(bound.log_value, abs=1e-9)
    assert math.log(found.lower) <= bound.log_value + 1e-9
    assert math.log(found.upper) >= bound.log_value
    assert found.converged
    for lower in (weighted_two_atom_lower_bound, proposition_3_6_rate):
        assert lower(gamma, radius).log_value <= log + 1e-9
    f = attention(gamma * one, one)
    assert log <= mean_field_upper_bound(f, radius).log_value <= theorem_3_5(f, radius).log_value + 1e-9


@pytest.mark.parametrize("g", STRENGTHS)
@pytest.mark.parametrize(("gamma", "ratio"), [(-1.0, -1.0), (8.0, 0.5)])
def test_the_papers_weight(g: float, gamma: float, ratio: float) -> None:
    """p = e^{−2g}: the finite form is a lower bound of the constant there; log-odds are log(e^{2g} − 1)."""
    one = torch.ones(1, 1, dtype=torch.float64)
    odds = 2 * g + math.log(-math.expm1(-2 * g))
    found = hs.local_lipschitz(attention(gamma * one, one), diracs(g, odds, ratio, one[0]), rtol=1e-9)
    log, paper = math.log(float(found.value)), proposition_3_6(gamma, math.sqrt(g)).log_value
    assert paper <= log + 1e-9
    assert proposition_3_6_rate(gamma, math.sqrt(g)).log_value <= log
    if g >= 20:  # one entry of the matrix is then all of it
        assert log == pytest.approx(paper, abs=2.0 / g)
    if math.exp(-2 * g) > 0 and g > 0.5:
        exact = two_dirac(
            gamma, math.sqrt(g), weight=math.exp(-2 * g), cluster="opposite" if gamma < 0 else "half"
        )
        assert log == pytest.approx(exact.log_value, abs=1e-9)


def test_a_head_in_three_dimensions_has_at_least_what_its_line_has() -> None:
    generator = torch.Generator().manual_seed(5)
    V = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    A = turn @ torch.diag(torch.tensor([-1.0, 0.3, 0.1]).double()) @ turn.mT
    for g in (2.0, 50.0, 360.0):
        mu = diracs(g, math.log(3) + 2 * g, -1.0, turn[:, 0])
        found = hs.local_lipschitz(attention(A, V), mu, rtol=1e-9)
        bound = two_dirac(attention(A, V), math.sqrt(g))
        assert bound.log_value <= math.log(float(found.value)) + 1e-9
        assert math.log(float(found.value)) <= mean_field_upper_bound(attention(A, V), math.sqrt(g)).log_value


def test_beyond_the_range_of_float64_it_says_so() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    for g in (715.0, 2000.0):
        with pytest.raises(NonFiniteError):
            hs.local_lipschitz(attention(-one, one), diracs(g, math.log(3) + 2 * g, -1.0, one[0]))


def test_the_rate_as_the_radius_grows() -> None:
    """The logarithm of the constant grows by g and log g: (√3/4) e^g (1 + 3g/2) with the better weight."""
    one = torch.ones(1, 1, dtype=torch.float64)
    for g in (100.0, 600.0):
        mu = diracs(g, math.log(3) + 2 * g, -1.0, one[0])
        value = float(hs.local_lipschitz(attention(-one, one), mu).value)
        assert math.log(value) - g == pytest.approx(math.log(math.sqrt(3) / 4 * (1 + 1.5 * g)), abs=1e-6)
