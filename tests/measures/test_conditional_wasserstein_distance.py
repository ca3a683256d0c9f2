"""The conditional distance: against one linear program for all, loops over positions, and the definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure, conditional_wasserstein, wasserstein
from tests._cases import random_attention
from tests.measures.test_transport import points


def with_positions(seed: int, counts: list[int], theta: list[float], d: int = 2) -> DiscreteMeasure:
    """Random atoms, so many at each position, whose masses are ``theta``; in random order."""
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for count, mass in zip(counts, theta, strict=True):
        shares = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
        weights.append(mass * shares / shares.sum())
    positions = torch.cat([torch.full((c,), (s + 1) / len(counts)) for s, c in enumerate(counts)]).double()
    order = torch.randperm(sum(counts), generator=generator)
    x = points(seed, sum(counts), d)
    return DiscreteMeasure(x, torch.cat(weights)[order], positions=positions[order])


def by_linear_program(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> float:
    """One transport problem in which moving between positions costs a thousand."""
    assert mu.positions is not None
    assert nu.positions is not None
    C = torch.cdist(mu.points, nu.points, compute_mode="donot_use_mm_for_euclid_dist").numpy() ** p
    C = C + 1e3 * (mu.positions.numpy()[:, None] != nu.positions.numpy()[None])
    n, m = C.shape
    margins = np.concatenate((np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))))
    sums = np.concatenate((mu.weights.numpy(), nu.weights.numpy()))
    found = linprog(C.ravel(), A_eq=margins[:-1], b_eq=sums[:-1], bounds=(0, None), method="highs")
    assert found.status == 0
    return float(found.fun) ** (1 / p)


THETA = [0.2, 0.5, 0.3]


@pytest.mark.parametrize("p", [1, 2, 3.0])
@pytest.mark.parametrize("counts", [([3, 4, 2], [2, 5, 3]), ([1, 4, 2], [3, 1, 1]), ([1, 1, 1], [1, 1, 1])])
def test_agrees_with_a_linear_program(p, counts):
    mu, nu = with_positions(1, counts[0], THETA), with_positions(2, counts[1], THETA)
    truth = by_linear_program(mu, nu, p)
    found = conditional_wasserstein(mu, nu, p)
    assert found.converged
    assert found.method == "conditional"
    assert float(found.value) == pytest.approx(truth, rel=1e-9)
    assert found.lower <= float(found.value) <= found.upper
    assert found.upper - found.lower < 1e-9 * truth
    assert float(wasserstein(mu, nu, p).value) <= found.upper


def test_plan_keeps_positions_and_has_the_marginals():
    mu, nu = with_positions(3, [3, 4, 1], THETA), with_positions(4, [2, 5, 3], THETA)
    found = conditional_wasserstein(mu, nu)
    assert found.plan is not None
    plan = found.plan.to_dense()
    assert mu.positions is not None
    assert nu.positions is not None
    assert float(plan[mu.positions[:, None] != nu.positions[None, :]].abs().max()) == 0
    torch.testing.assert_close(plan.sum(1), mu.weights, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(plan.sum(0), nu.weights, rtol=1e-12, atol=1e-15)
    cost = (plan * torch.cdist(mu.points, nu.points) ** 2).sum().sqrt()
    assert float(cost) == pytest.approx(float(found.value), rel=1e-12)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e3])
def test_distinct_positions_give_the_frobenius_distance(size):
    x = points(5, 40, 3)
    y = x + size * points(6, 40, 3)
    found = conditional_wasserstein(DiscreteMeasure.sequence(x), DiscreteMeasure.sequence(y))
    truth = float(torch.linalg.vector_norm(x - y)) / math.sqrt(40)
    assert float(found.value) == pytest.approx(truth, rel=1e-13)
    assert found.lower <= truth * (1 + 1e-15)
    assert truth * (1 - 1e-15) <= found.upper
    assert found.upper - found.lower < 1e-12 * truth
    # The plain distance may match tokens with others.
    assert wasserstein(DiscreteMeasure(x), DiscreteMeasure(y)).lower <= truth


def test_causal_attention_stays_at_finite_distance():
    f = random_attention(7, heads=2, causal=True)
    x = points(8, 12, f.d)
    y = x + 1e-3 * points(9, 12, f.d)
    found = conditional_wasserstein(*(f(DiscreteMeasure.sequence(z)) for z in (x, y)))
    assert float(found.value) == pytest.approx(float((f(x) - f(y)).norm()) / math.sqrt(12), rel=1e-12)
    assert isinstance(f, hs.SelfAttention)


def test_marginals_that_differ_are_at_infinity():
    one = with_positions(10, [2, 2, 2], THETA)
    for theta, counts in (([0.2, 0.4, 0.4], [2, 2, 2]), ([0.5, 0.5], [3, 3])):
        found = conditional_wasserstein(one, with_positions(11, counts, theta))
        assert float(found.value) == found.lower == found.upper == math.inf
        assert found.plan is None
        assert found.converged
    # A position of no mass in the one.
    assert one.positions is not None
    moved = DiscreteMeasure(one.points, one.weights, positions=one.positions / 2)
    assert float(conditional_wasserstein(one, moved).value) == math.inf


def test_tolerances():
    x, y = points(12, 10, 2), points(13, 10, 2)
    here = DiscreteMeasure.sequence(x)
    assert here.positions is not None
    shifted = (here.positions - 1e-9).clamp(0, 1)
    there = DiscreteMeasure(y, positions=shifted)
    assert float(conditional_wasserstein(here, there).value) == math.inf
    near = conditional_wasserstein(here, there, position_tolerance=1e-8)
    assert float(near.value) == pytest.approx(float((x - y).norm()) / math.sqrt(10), rel=1e-13)
    with pytest.raises(ArgumentError, match="chain of positions"):
        conditional_wasserstein(here, there, position_tolerance=0.15)
    whole = conditional_wasserstein(here, there, position_tolerance=1.0)
    assert float(whole.value) == pytest.approx(
        float(wasserstein(DiscreteMeasure(x), DiscreteMeasure(y)).value)
    )
    heavier = here.weights.clone()
    heavier[0] *= 1 + 1e-6
    other = DiscreteMeasure(y, heavier / heavier.sum(), positions=here.positions)
    assert float(conditional_wasserstein(here, other).value) == math.inf
    loose = conditional_wasserstein(here, other, mass_tolerance=1e-5)
    assert float(loose.value) == pytest.approx(float((x - y).norm()) / math.sqrt(10), rel=1e-13)


def test_positions_of_tiny_mass_count():
    logs = torch.tensor([0.0, -1400.0, -1400.0], dtype=torch.float64)
    places = torch.tensor([0.2, 0.7, 0.7], dtype=torch.float64)
    x = torch.zeros(3, 2, dtype=torch.float64)
    x[2, 0] = 1.0
    y = x.clone()
    y[1:, 1] = 1.0
    mu, nu = (DiscreteMeasure(z, log_weights=logs, positions=places) for z in (x, y))
    found = conditional_wasserstein(mu, nu)
    assert float(found.value.log()) == pytest.approx((-1400 + math.log(2)) / 2, rel=1e-13)
    assert found.converged


def test_derivative_is_that_of_finite_differences():
    mu, nu = with_positions(14, [3, 4, 1], THETA), with_positions(15, [2, 5, 3], THETA)

    def distance(x: Tensor) -> Tensor:
        one = DiscreteMeasure(x, log_weights=mu.log_weights, positions=mu.positions)
        return conditional_wasserstein(one, nu, gradient=True).value

    x = mu.points.clone().requires_grad_()
    (slope,) = torch.autograd.grad(distance(x), x)
    for i in range(mu.n):
        step = torch.zeros_like(x)
        step[i, 1] = 1e-6
        numeric = float((distance(x + step) - distance(x - step)).detach()) / 2e-6
        assert float(slope[i, 1]) == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def test_entropic_for_each_position():
    mu, nu = with_positions(16, [5, 4, 6], THETA), with_positions(17, [4, 5, 6], THETA)
    truth = float(conditional_wasserstein(mu, nu).value)
    found = conditional_wasserstein(mu, nu, method="entropic")
    assert found.converged
    assert found.lower <= truth <= found.upper
    assert 1e-6 < found.upper / found.lower - 1 < 1.1e-2


def test_what_is_refused():
    x = points(18, 4, 2)
    plain, placed = DiscreteMeasure(x), DiscreteMeasure.sequence(x)
    with pytest.raises(ArgumentError, match="nu: expected a measure with positions"):
        conditional_wasserstein(placed, plain)
    with pytest.raises(ArgumentError, match="mu: expected a DiscreteMeasure"):
        conditional_wasserstein(x, placed)
    with pytest.raises(ArgumentError, match="dimension 2"):
        conditional_wasserstein(placed, DiscreteMeasure.sequence(points(19, 4, 3)))
    for name, value in itertools.product(("position_tolerance", "mass_tolerance"), (-1.0, math.nan, "0")):
        with pytest.raises(ArgumentError, match=name):
            conditional_wasserstein(placed, placed, **{name: value})
    logs = torch.full((4,), -math.log(4.0), requires_grad=True)
    weighted = DiscreteMeasure(points(20, 4, 2), log_weights=logs, positions=placed.positions)
    with pytest.raises(ArgumentError, match="weights without gradients"):
        conditional_wasserstein(weighted, placed, gradient=True)
