"""Transport distances: against linear programs, permutations, quantiles and closed forms."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure, Transport, wasserstein
from howsmooth.measures.presolve import Pair
from howsmooth.measures.transport_problem import TransportPlan, TransportProblem


def points(seed: int, n: int, d: int, shift: float = 0.0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def measure(seed: int, n: int, d: int, shift: float = 0.0) -> DiscreteMeasure:
    """Gaussian atoms with random weights."""
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) + 0.01
    return DiscreteMeasure(points(seed, n, d, shift), weights / weights.sum())


def costs(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> np.ndarray:
    difference = mu.points.detach().numpy()[:, None] - nu.points.detach().numpy()[None]
    return np.sqrt((difference**2).sum(2)) ** p


def by_linear_program(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> float:
    """Minimal Σ P_ij |x_i − y_j|^p by SciPy's HiGHS, to the power 1/p."""
    C = costs(mu, nu, p)
    n, m = C.shape
    margins = np.concatenate((np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))))
    sums = np.concatenate((mu.weights.detach().numpy(), nu.weights.detach().numpy()))
    found = linprog(C.ravel(), A_eq=margins[:-1], b_eq=sums[:-1], bounds=(0, None), method="highs")
    assert found.status == 0
    return float(found.fun) ** (1 / p)


def holds(transport: Transport, truth: float, slack: float = 1e-9) -> bool:
    """Whether the interval holds ``truth``, which is itself right to ``slack``."""
    return transport.lower <= truth * (1 + slack) and truth * (1 - slack) <= transport.upper


# ---- against other solvers


@pytest.mark.parametrize("p", [1, 2, 1.5, 4.0])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 5, 2), (6, 6, 2), (12, 7, 3), (9, 14, 1)])
def test_exact_agrees_with_a_linear_program(p, n, m, d):
    mu, nu = measure(1, n, d), measure(2, m, d, shift=0.3)
    truth = by_linear_program(mu, nu, p)
    for method in ("auto", "exact"):
        found = wasserstein(mu, nu, p, method=method)
        assert found.converged
        assert holds(found, truth)
        assert float(found.value) == pytest.approx(truth, rel=1e-9)
        assert found.lower <= float(found.value) <= found.upper
        assert found.upper - found.lower <= 1e-9 * truth


def test_equal_weights_are_an_assignment():
    mu, nu = DiscreteMeasure(points(3, 60, 4)), DiscreteMeasure(points(4, 60, 4, 0.5))
    C = costs(mu, nu, 2)
    rows, columns = linear_sum_assignment(C)
    truth = math.sqrt(C[rows, columns].mean())
    found = wasserstein(mu, nu)
    assert holds(found, truth, 1e-13)
    assert found.plan is not None
    plan = found.plan.to_dense().numpy()
    assert np.array_equal(plan.argmax(1), columns)


def test_every_permutation_of_few_atoms():
    mu, nu = DiscreteMeasure(points(5, 5, 2)), DiscreteMeasure(points(6, 5, 2))
    C = costs(mu, nu, 3)
    truth = min(sum(C[i, s[i]] for i in range(5)) / 5 for s in itertools.permutations(range(5))) ** (1 / 3)
    assert holds(wasserstein(mu, nu, 3), truth, 1e-13)


@pytest.mark.parametrize("p", [1, 2, 2.5])
def test_on_the_line_is_the_integral_of_quantiles(p):
    mu, nu = measure(7, 40, 1), measure(8, 25, 1, 0.4)
    sides = []
    for one in (mu, nu):
        order = one.points[:, 0].argsort()
        sides.append((one.points[order, 0].numpy(), np.cumsum(one.weights[order].numpy())))
    levels = np.sort(np.concatenate([ends for _, ends in sides]))
    middles = (levels + np.concatenate(([0.0], levels[:-1]))) / 2
    quantiles = [x[np.minimum(np.searchsorted(ends, middles), len(x) - 1)] for x, ends in sides]
    integral = np.diff(levels, prepend=0.0) @ np.abs(quantiles[0] - quantiles[1]) ** p
    found = wasserstein(mu, nu, p)
    assert found.method == "1d"
    assert found.converged
    assert holds(found, integral ** (1 / p), 1e-13)
    assert holds(wasserstein(mu, nu, p, method="exact"), float(found.value), 1e-13)


@pytest.mark.parametrize("p", [1, 2])
def test_entropic_interval_holds_the_exact_distance(p):
    mu, nu = measure(9, 30, 2), measure(10, 20, 2, 0.5)
    truth = float(wasserstein(mu, nu, p).value)
    found = wasserstein(mu, nu, p, method="entropic")
    assert found.method == "entropic"
    assert found.converged
    assert 0 < found.upper - found.lower <= 1e-2 * found.upper
    assert holds(found, truth, 1e-13)
    strong = wasserstein(mu, nu, p, method="entropic", regularisation=1.0)
    assert not strong.converged
    assert "regularisation" in strong.remedy
    assert holds(strong, truth, 1e-13)
    assert strong.upper > found.upper
    few = wasserstein(mu, nu, p, method="entropic", max_iterations=3)
    assert not few.converged
    assert holds(few, truth, 1e-13)


def test_plan_has_the_marginals_and_the_cost():
    mu, nu = measure(11, 30, 3), measure(12, 45, 3, 0.2)
    for method in ("exact", "entropic"):
        found = wasserstein(mu, nu, method=method)
        assert found.plan is not None
        plan = found.plan.to_dense().numpy()
        assert (plan >= 0).all()
        assert np.abs(plan.sum(1) - mu.weights.numpy()).max() < 1e-15
        assert np.abs(plan.sum(0) - nu.weights.numpy()).max() < 1e-15
        assert math.sqrt((plan * costs(mu, nu, 2)).sum()) == pytest.approx(float(found.value), rel=1e-12)


# ---- the certificates by themselves


def _problem(seed: int, n: int, m: int) -> TransportProblem:
    mu, nu = measure(seed, n, 2), measure(seed + 5, m, 2)
    x, y = mu.points.numpy() / 16, nu.points.numpy() / 16
    return TransportProblem(x, y, mu.weights.numpy(), nu.weights.numpy(), 2.0)


def test_any_potentials_are_below_and_any_plan_above():
    problem = _problem(13, 15, 11)
    truth = ot.emd2(problem.a, problem.b, problem.costs)
    rng = np.random.default_rng(0)
    for _ in range(20):
        right = rng.normal(scale=0.01, size=11)
        below, f, g = problem.cost_below(right)
        assert (g >= right - 1e-15).all()
        assert g.sum() > right.sum()
        assert below <= truth * (1 + 1e-12)
        assert (f[:, None] + g[None] <= problem.costs * (1 + 1e-12)).all()
        rows, columns = rng.integers(15, size=20), rng.integers(11, size=20)
        plan = problem.repaired(TransportPlan(rows, columns, rng.random(20) / 5))
        matrix = plan.matrix((15, 11)).toarray()
        assert (plan.masses >= 0).all()
        assert np.abs(matrix.sum(1) - problem.a).max() < 1e-15
        assert np.abs(matrix.sum(0) - problem.b).max() < 1e-15
        assert problem.cost_above(plan) >= truth


def test_mass_that_one_side_does_not_have_is_charged():
    x = np.array([[0.0], [0.5]])
    problem = TransportProblem(x, x, np.array([0.5, 0.5]), np.array([0.5, 0.5 - 1e-10]), 2.0)
    plan = problem.repaired(TransportPlan(np.arange(2), np.arange(2), np.array([0.5, 0.5])))
    assert plan.unplaced == pytest.approx(1e-10)
    assert problem.cost_above(plan) == pytest.approx(1e-10 * 0.5**2)
    still = DiscreteMeasure(torch.full((4, 2), 3.0)), DiscreteMeasure(torch.full((3, 2), 3.0))
    assert wasserstein(*still).upper == 0


def test_a_solver_that_stops_early_is_not_believed(monkeypatch):
    monkeypatch.setattr("howsmooth.measures.transport_solvers._PIVOTS", 3)
    mu, nu = measure(14, 40, 2), measure(15, 40, 2, 0.5)
    found = wasserstein(mu, nu, method="exact")
    truth = math.sqrt(ot.emd2(mu.weights.numpy(), nu.weights.numpy(), costs(mu, nu, 2)))
    assert not found.converged
    assert found.remedy
    assert "NOT converged" in repr(found)
    assert found.lower < truth < found.upper


# ---- sizes that float64 hardly holds


def test_small_perturbations_are_matched_by_the_identity():
    x = points(16, 30, 3)
    step = 1e-9 * points(17, 30, 3)
    weights = measure(18, 30, 3).weights
    found = wasserstein(DiscreteMeasure(x, weights), DiscreteMeasure(x + step, weights))
    moved = (x + step) - x
    truth = float((weights * (moved**2).sum(1)).sum().sqrt())
    assert found.method == "matched"
    assert found.upper - found.lower < 1e-12 * truth
    assert float(found.value) == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize("d", [1, 2])
def test_small_perturbations_in_another_order(d):
    x, weights = points(16, 30, d), measure(18, 30, d).weights
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    y = (x + 1e-10 * points(17, 30, d))[order]
    found = wasserstein(DiscreteMeasure(x, weights), DiscreteMeasure(y, weights[order]))
    truth = float((weights[order] * ((y - x[order]) ** 2).sum(1)).sum().sqrt())
    assert found.method != "matched"
    assert found.converged
    assert holds(found, truth, 1e-12)
    # Rounding of the weights alone, were it moved across, would be hundreds of times as far.
    assert found.upper - found.lower < 1e-6 * truth


def test_matched_is_not_taken_where_another_image_is_nearer():
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    found = wasserstein(DiscreteMeasure(x), DiscreteMeasure(x.flip(0)), method="exact")
    assert found.method == "exact"
    assert float(found.value) == 0
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    found = wasserstein(DiscreteMeasure(x, weights), DiscreteMeasure(x.flip(0), weights))
    assert float(found.value) == pytest.approx(math.sqrt(0.5), rel=1e-12)


@pytest.mark.parametrize("d", [1, 2])
def test_weights_that_float64_cannot_hold(d):
    logs = torch.tensor([0.0, -1400.0], dtype=torch.float64)
    x = torch.zeros(2, d, dtype=torch.float64)
    x[1] = 1.0
    y = x.clone()
    y[1] = 1.5
    found = wasserstein(DiscreteMeasure(x, log_weights=logs), DiscreteMeasure(y, log_weights=logs))
    assert found.method == "matched"
    assert float(found.value.log()) == pytest.approx(-700 + math.log(0.5 * math.sqrt(d)), rel=1e-12)
    assert found.lower <= float(found.value) <= found.upper
    # Different weights: the light atoms are in the interval, and there alone.
    other = torch.tensor([0.0, -1200.0], dtype=torch.float64)
    found = wasserstein(DiscreteMeasure(x, log_weights=logs), DiscreteMeasure(x, log_weights=other))
    assert found.lower == 0
    assert math.log(found.upper) >= -600 + math.log(math.sqrt(d))
    assert found.upper < 1e-255


def test_light_atoms_widen_the_interval_by_their_mass():
    x = torch.tensor([[5.0, 0.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    logs = torch.tensor([-1400.0, math.log(0.5), math.log(0.5)], dtype=torch.float64)
    plain = DiscreteMeasure(x[1:], torch.tensor([0.25, 0.75], dtype=torch.float64))
    found = wasserstein(DiscreteMeasure(x, log_weights=logs), plain)
    assert holds(found, 0.5, 1e-13)
    assert found.plan is not None
    expected = torch.tensor([[0.0, 0.0], [0.25, 0.25], [0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(found.plan.to_dense(), expected)
    assert found.converged


def test_methods_do_not_contradict_each_other():
    """Two orders of one measure, with atoms that coincide and weights over a range that sums do not hold."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        n = int(rng.integers(4, 12))
        x, order = torch.tensor(rng.integers(-2, 3, (n, 1)).astype(float)), torch.tensor(rng.permutation(n))
        logs = torch.tensor(-200 * rng.random(n)).log_softmax(0)
        mu, nu = DiscreteMeasure(x, log_weights=logs), DiscreteMeasure(x[order], log_weights=logs[order])
        on_line, solved = wasserstein(mu, nu, 1, method="1d"), wasserstein(nu, mu, 1, method="exact")
        assert on_line.lower <= solved.upper
        assert solved.lower <= on_line.upper


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e200])
def test_scale_of_the_points(scale):
    mu, nu = measure(19, 10, 2), measure(20, 12, 2, 0.7)
    truth = float(wasserstein(mu, nu).value)
    scaled = (DiscreteMeasure(one.points * scale, one.weights) for one in (mu, nu))
    found = wasserstein(*scaled)
    assert float(found.value) == pytest.approx(truth * scale, rel=1e-12)
    assert found.converged


def test_far_from_the_origin_no_digits_are_lost():
    x = points(21, 8, 2)
    far = torch.tensor([1e6, -1e6], dtype=torch.float64)
    mu, nu = DiscreteMeasure(x + far), DiscreteMeasure(points(22, 8, 2) + far)
    truth = by_linear_program(mu, nu, 2)
    assert holds(wasserstein(mu, nu), truth, 1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_scaled_points_are_as_large_as_costs_below_one_allow(scale):
    x = scale * (points(23, 30, 3) + 1e3)
    pair = Pair.of(DiscreteMeasure(x), DiscreteMeasure(2 * x[:1] - x), 2.0)
    largest = pair.problem.costs.max()
    assert 1 / 64 < largest <= 1
    apart = torch.cdist(x / scale, (2 * x[:1] - x) / scale).max()
    assert math.sqrt(largest) * 2.0**pair.exponent / scale == pytest.approx(float(apart), rel=1e-10)


def test_distances_beyond_float64_are_refused():
    huge = DiscreteMeasure(torch.tensor([[1.7e308, 1.7e308]], dtype=torch.float64))
    other = DiscreteMeasure(torch.tensor([[-1.7e308, -1.7e308]], dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"below 1\.8e308"):
        wasserstein(huge, other)
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    logs = torch.tensor([0.0, -2000.0], dtype=torch.float64)
    with pytest.raises(ArgumentError, match="float64 can hold"):
        wasserstein(DiscreteMeasure(x, log_weights=logs), DiscreteMeasure(1.5 * x, log_weights=logs))
    with pytest.raises(ArgumentError, match="float64 can hold"):
        wasserstein(DiscreteMeasure(1e-310 * x), DiscreteMeasure(2e-310 * x))


def test_measures_that_are_equal_are_at_distance_zero():
    mu = measure(23, 20, 2)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    same = DiscreteMeasure(mu.points[order], mu.weights[order])
    split = DiscreteMeasure(mu.points.repeat(2, 1), mu.weights.repeat(2) / 2)
    for other in (mu, same, split):
        found = wasserstein(mu, other)
        assert found.lower == 0
        assert found.upper < 1e-7
        assert found.converged


@pytest.mark.slow
def test_thousands_of_atoms_in_seconds():
    mu, nu = measure(50, 3000, 8), measure(51, 3000, 8, 0.2)
    began = time.process_time()
    found = wasserstein(mu, nu)
    assert time.process_time() - began < 60
    assert found.converged
    assert found.upper - found.lower < 1e-9 * found.upper


def test_orders_so_large_that_powers_underflow_are_not_taken_for_known():
    mu, nu = measure(52, 6, 2), measure(53, 5, 2, 3.0)
    found = wasserstein(mu, nu, 900)
    # Between the mean and the greatest displacement of any plan.
    far = torch.cdist(mu.points, nu.points)
    assert found.lower <= float(far.max())
    assert found.upper >= float(wasserstein(mu, nu, 4).value)
    assert found.converged == (found.upper - found.lower <= 1e-6 * found.upper)
    close = DiscreteMeasure(torch.cat((mu.points, mu.points + 1e-4)), torch.cat((mu.weights, mu.weights)) / 2)
    assert not wasserstein(mu, close, 10).converged


# ---- what a distance has to be

seeds = st.integers(0, 10_000)


@settings(max_examples=15, deadline=None)
@given(
    seeds,
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3.0]),
)
def test_symmetry_and_triangle_inequality(seed, k, m, n, d, p):
    one, two, three = measure(seed, k, d), measure(seed + 1, m, d), measure(seed + 2, n, d)
    here, there = wasserstein(one, two, p), wasserstein(two, one, p)
    assert holds(here, float(there.value), 1e-12)
    assert here.lower <= wasserstein(one, three, p).upper + wasserstein(three, two, p).upper
    assert here.lower <= float(here.value) <= here.upper


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 8), st.integers(1, 3), st.floats(1e-3, 1e6))
def test_translation(seed, n, d, size):
    mu = measure(seed, n, d)
    shift = size * points(seed + 9, 1, d)[0]
    moved = DiscreteMeasure(mu.points + shift, mu.weights)
    for p in (1, 2):
        assert holds(wasserstein(mu, moved, p), float(shift.norm()), 1e-9)


@settings(max_examples=10, deadline=None)
@given(seeds, st.integers(2, 8), st.integers(2, 3))
def test_larger_orders_are_larger_distances(seed, n, d):
    mu, nu = measure(seed, n, d), measure(seed + 1, n, d)
    found = [wasserstein(mu, nu, p) for p in (1, 1.5, 2, 4)]
    assert all(one.lower <= other.upper for one, other in itertools.pairwise(found))


# ---- derivatives


@pytest.mark.parametrize("p", [1, 2, 3.0])
@pytest.mark.parametrize("d", [1, 2])
def test_derivative_by_points_is_that_of_finite_differences(p, d):
    x, y = points(30, 6, d), points(31, 5, d, 0.5)
    a, b = measure(30, 6, d).weights, measure(31, 5, d).weights

    def distance(x: Tensor, y: Tensor) -> Tensor:
        return wasserstein(DiscreteMeasure(x, a), DiscreteMeasure(y, b), p, gradient=True).value

    x, y = x.requires_grad_(), y.requires_grad_()
    value = distance(x, y)
    left, right = torch.autograd.grad(value, (x, y))
    for points_, gradient in ((x, left), (y, right)):
        for place in [(0, 0), (3, d - 1)]:
            step = torch.zeros_like(points_)
            step[place] = 1e-6
            pair = [
                distance(x + sign * step, y) if points_ is x else distance(x, y + sign * step)
                for sign in (1, -1)
            ]
            assert float(gradient[place]) == pytest.approx(
                float((pair[0] - pair[1]).detach()) / 2e-6, rel=1e-6, abs=1e-9
            )


def test_derivative_is_that_of_pot():
    x, y = points(32, 12, 3).requires_grad_(), points(33, 9, 3)
    weights = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
    logs = (weights / weights.sum()).log().requires_grad_()
    nu = measure(33, 9, 3)
    found = wasserstein(DiscreteMeasure(x, log_weights=logs), nu, gradient=True)
    mine = torch.autograd.grad(found.value, (x, logs))
    theirs = ot.emd2(
        logs.softmax(0), nu.weights, torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    )
    expected = torch.autograd.grad(theirs.sqrt(), (x, logs))
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_derivative_where_the_atoms_are_matched_and_where_they_coincide():
    x = points(34, 10, 2)
    y = (x + 1e-3 * points(35, 10, 2)).requires_grad_()
    found = wasserstein(DiscreteMeasure(x), DiscreteMeasure(y), gradient=True)
    assert found.method == "matched"
    (mine,) = torch.autograd.grad(found.value, y)
    (expected,) = torch.autograd.grad(torch.linalg.vector_norm(y - x) / math.sqrt(10), y)
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=0)
    still = x.clone().requires_grad_()
    found = wasserstein(DiscreteMeasure(x), DiscreteMeasure(still), gradient=True)
    assert torch.equal(torch.autograd.grad(found.value, still)[0], torch.zeros_like(x))
    assert not wasserstein(DiscreteMeasure(x), DiscreteMeasure(y)).value.requires_grad


def test_entropic_derivative_descends():
    x, nu = points(36, 15, 2).requires_grad_(), measure(37, 15, 2, 1.0)
    for _ in range(2):
        found = wasserstein(DiscreteMeasure(x), nu, method="entropic", gradient=True)
        (slope,) = torch.autograd.grad(found.value, x)
        before = wasserstein(DiscreteMeasure(x), nu)
        x = (x - 0.1 * slope / slope.norm()).detach().requires_grad_()
        # A unit step downhill of a function that falls by |slope| a unit, to first order.
        assert wasserstein(DiscreteMeasure(x), nu).upper < before.lower - 0.05 * float(slope.norm())


# ---- bad input


def test_what_is_refused():
    mu, line = measure(40, 4, 2), measure(43, 4, 1)
    logs = torch.full((3,), -math.log(3.0), requires_grad=True)
    weighted = DiscreteMeasure(points(42, 3, 1), log_weights=logs)
    crowd = DiscreteMeasure(torch.zeros(30_000, 2))
    for nu, other, keywords, words in (
        (mu, measure(41, 4, 3), {}, "dimension 2"),
        (mu, mu.points, {}, "DiscreteMeasure"),
        *((mu, mu, {"p": p}, "order >= 1") for p in (0.5, math.inf, math.nan, "2", True)),
        (mu, mu, {"method": "1d"}, "d = 2"),
        (mu, mu, {"method": "sinkhorn"}, "method"),
        (mu, mu, {"method": "bures"}, "two Gaussians"),
        (mu, mu, {"regularisation": 0.1}, "regularisation"),
        *(
            (mu, mu, {"method": "entropic", "regularisation": s}, "regularisation")
            for s in (0.0, -1.0, math.nan)
        ),
        *((mu, mu, {"rtol": rtol}, "rtol") for rtol in (0.0, math.nan)),
        (mu, mu, {"method": "entropic", "max_iterations": 0}, "max_iterations"),
        (weighted, line, {"gradient": True}, "gradient"),
        (crowd, crowd, {}, "merged"),
    ):
        with pytest.raises(ArgumentError, match=words):
            wasserstein(nu, other, **keywords)
