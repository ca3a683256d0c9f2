"""Rates of flows, held against flows integrated at high accuracy and against closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.integrate import solve_ivp

import howsmooth as hs
from howsmooth.bounds import Head
from howsmooth.dynamics import Sphere, clustering_bound, finite_context_bound, flow, log_stability_bound
from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure, wasserstein
from tests._cases import tokens
from tests._selection import others_slow

F64 = torch.float64


def identity_head(beta: float, d: int) -> hs.SelfAttention:
    eye = torch.eye(d, dtype=F64)[None]
    return hs.SelfAttention(beta * eye, eye, eye, scale=1.0)


def cap(seed: int, n: int, d: int, spread: float) -> torch.Tensor:
    """Return tokens of the unit sphere near the first axis."""
    x = spread * tokens(seed, n, d)
    x[:, 0] = 1.0
    return x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("beta", "weighted"),
    others_slow(
        itertools.product((-3.0, 0.0, 1.0, 6.0), (False, True)), [(-3.0, True), (0.0, False), (6.0, True)]
    ),
)
def test_tokens_in_a_cap_cluster_at_least_as_fast(beta: float, weighted: bool) -> None:
    x = cap(1, 7, 4, 0.3)
    cosine = float((x @ x.mT).min())
    assert 0.2 < cosine < 0.9
    weights = torch.tensor([1e-3, 0.5, 1e-2, 0.1, 0.2, 0.1, 0.089], dtype=F64)
    start = DiscreteMeasure(x, weights / weights.sum()) if weighted else x
    times = [0.0, 0.3, 1.0, 3.0]
    states = flow(Sphere(identity_head(beta, 4)), start, times, rtol=1e-10).states
    for time, state in zip(times, states, strict=True):
        reached = state.points if isinstance(state, DiscreteMeasure) else state
        apart = 1 - float((reached @ reached.mT).min())
        assert apart <= clustering_bound(beta, cosine, time) * (1 + 1e-8) + 1e-12


def test_the_rate_of_clustering_is_reached_by_two_near_tokens() -> None:
    # Two tokens at the angle a under equal weights have a' = −sin a, integrated here by SciPy.
    angle = 0.02
    found = solve_ivp(lambda t, a: -math.sin(a[0]), (0, 4), [angle], rtol=1e-11, atol=1e-14).y[0, -1]
    bound = clustering_bound(0.0, math.cos(angle), 4.0)
    assert 0.999 * bound < 1 - math.cos(found) <= bound * (1 + 1e-6)


def test_two_flows_part_no_faster() -> None:
    draw = torch.Generator().manual_seed(2)
    query, key, value = (0.2 * torch.randn(1, 3, 3, generator=draw, dtype=F64) for _ in range(3))
    f = hs.SelfAttention(query, key, value)
    x = tokens(3, 6, 3)
    x = x / x.norm(dim=1).amax()
    y = x + 1e-3 * tokens(4, 6, 3)
    y = y / max(1.0, float(y.norm(dim=1).amax()))
    before = wasserstein(DiscreteMeasure(x), DiscreteMeasure(y))
    for time in (0.2, 1.0):
        ends = [DiscreteMeasure(flow(f, start, [0, time], rtol=1e-10).final) for start in (x, y)]
        assert float(wasserstein(*ends).upper) <= math.exp(log_stability_bound(f, 1.0, time)) * float(
            before.lower
        )


def test_stability_is_exact_without_scores() -> None:
    # All tokens have the velocity v times their mean, so a shift grows by e^{vt}.
    zero, one = torch.zeros(1, 2, 2, dtype=F64), torch.eye(2, dtype=F64)[None]
    f = hs.SelfAttention(zero, one, 0.7 * one)
    assert log_stability_bound(f, 1.0, 3.0) == pytest.approx(2.1, rel=1e-9)
    assert log_stability_bound(f, 1.0, 0.0) == 0
    # ∫ L(R e^{vs}) ds with L(R) = v (a + e^a √(1 + a²)), a = βR², by SciPy.
    f = hs.SelfAttention(0.5 * one, one, 0.7 * one, scale=1.0)

    def constant(t: float, _: object) -> list[float]:
        a = 0.5 * math.exp(2 * 0.7 * t)
        return [0.7 * (a + math.exp(a) * math.hypot(1, a))]

    integral = solve_ivp(constant, (0, 1), [0.0], rtol=1e-10).y[0, -1]
    assert integral <= log_stability_bound(f, 1.0, 1.0) <= integral * 1.01
    assert log_stability_bound(f, 1.0, 50.0) == math.inf


def test_tokens_drawn_from_a_measure_stay_near_its_flow() -> None:
    f = hs.SelfAttention(
        0.3 * torch.eye(2, dtype=F64)[None],
        torch.eye(2, dtype=F64)[None],
        -0.4 * torch.eye(2, dtype=F64)[None],
    )
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64)
    weights = torch.tensor([0.5, 0.5], dtype=F64)
    for length, time in ((1, 0.0), (4, 0.0), (4, 1.0), (12, 1.0)):
        exact = (
            flow(f, DiscreteMeasure(x, weights), [0, time], rtol=1e-7).final
            if time
            else DiscreteMeasure(x, weights)
        )
        mean = 0.0
        for count in range(length + 1):
            shares = torch.tensor([count / length, 1 - count / length], dtype=F64)
            drawn = DiscreteMeasure(x[shares > 0], shares[shares > 0])
            reached = flow(f, drawn, [0, time], rtol=1e-7).final if time else drawn
            mean += math.comb(length, count) / 2**length * float(wasserstein(exact, reached).upper)
        bound = finite_context_bound(f, 1.0, time, 2, length)
        assert mean <= bound * (1 + 1e-9)
        if length == 1:
            assert mean == pytest.approx(bound, rel=1e-9)  # √2, half of the mass travels twice the radius
    assert finite_context_bound(f, 1.0, 1.0, 1, 5) == 0


def test_arguments_of_rates() -> None:
    assert clustering_bound(torch.tensor(1.0), torch.tensor(0.5), 2) == clustering_bound(1.0, 0.5, 2.0)
    f = identity_head(1.0, 2)
    masked = hs.SelfAttention(f.query, f.key, f.value, causal=True)
    biased = hs.SelfAttention(f.query, f.key, f.value, value_bias=torch.ones(1, 2, dtype=F64))
    for name, call in {
        "cosine": lambda: clustering_bound(1.0, 0.0, 1.0),
        "beta": lambda: clustering_bound(torch.ones(2), 0.5, 1.0),
        "time": lambda: clustering_bound(1.0, 0.5, -1.0),
        "radius": lambda: log_stability_bound(f, 0.0, 1.0),
        "attention": lambda: log_stability_bound(masked, 1.0, 1.0),
        "atoms": lambda: finite_context_bound(f, 1.0, 1.0, 0, 5),
        "length": lambda: finite_context_bound(f, 1.0, 1.0, 2, 0),
    }.items():
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.argument == name
    with pytest.raises(ArgumentError, match="bias"):
        log_stability_bound(biased, 1.0, 1.0)


def test_a_cosine_near_the_smallest_numbers_has_the_right_bound() -> None:
    """1/g overflows for g = 1e-309, and s underflows at long times; the numbers are mpmath's."""
    assert clustering_bound(1.0, 1e-309, 1.0) == pytest.approx(1.0)
    assert clustering_bound(0.0, 1e-309, 700.0) == pytest.approx(9.721322155e-300, rel=1e-8)
    assert clustering_bound(1.0, 1e-309, 1000.0) == pytest.approx(2.910565567e-11, rel=1e-8)
    assert clustering_bound(1.0, 0.5, 1e300) > 0
    assert clustering_bound(1.0, 1.0, 2.0) == 0


def test_tiny_times_and_values_do_not_make_the_growth_zero() -> None:
    tiny = Head(torch.eye(1).double(), 1e-300 * torch.eye(1).double())
    assert log_stability_bound(tiny, 1.0, 1e-300) > 0
    assert log_stability_bound(Head(torch.eye(1).double(), 0 * torch.eye(1).double()), 1.0, 1e300) == 0
