"""Distances between Gaussians: against POT, commuting covariances, samples and each other."""

from __future__ import annotations

import math

import mpmath
import ot
import pytest
import torch
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure, Gaussian, Transport, wasserstein


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(seed: int, d: int, rank: int | None = None) -> Tensor:
    factor = draw(seed, d, d if rank is None else rank)
    return factor @ factor.T


def gaussian(seed: int, d: int, rank: int | None = None) -> Gaussian:
    return Gaussian(draw(seed + 100, d), covariance(seed, d, rank))


def by_many_digits(mu: Gaussian, nu: Gaussian) -> float:
    """The textbook formula with sixty digits."""
    with mpmath.workdps(60):
        one, other = (mpmath.matrix(g.covariance.tolist()) for g in (mu, nu))

        def root(matrix: mpmath.matrix) -> mpmath.matrix:
            values, vectors = mpmath.eigsy(matrix)
            values = mpmath.diag([mpmath.sqrt(max(value, 0)) for value in values])
            return vectors * values * vectors.T

        half = root(one)
        both = root(half * other * half)
        squares = [
            (mpmath.mpf(x) - mpmath.mpf(y)) ** 2
            for x, y in zip(mu.mean.tolist(), nu.mean.tolist(), strict=True)
        ]
        traces = [sum(m[i, i] for i in range(mu.d)) for m in (one, other, both)]
        return float(mpmath.sqrt(mpmath.fsum(squares) + traces[0] + traces[1] - 2 * traces[2]))


def holds(found: Transport, truth: float, slack: float = 1e-14) -> bool:
    return found.lower <= truth * (1 + slack) and truth * (1 - slack) <= found.upper


@pytest.mark.parametrize("d", [1, 2, 5, 20])
def test_regular_covariances_agree_with_pot(d):
    mu, nu = gaussian(1, d), gaussian(2, d)
    truth = ot.gaussian.bures_wasserstein_distance(mu.mean, nu.mean, mu.covariance, nu.covariance)
    found = wasserstein(mu, nu)
    assert found.method == "bures"
    assert found.plan is None
    assert found.converged
    assert float(found.value) == pytest.approx(float(truth), rel=1e-11)
    assert found.upper - found.lower < 1e-9 * float(truth)


@pytest.mark.parametrize(
    ("ranks", "d"), [((1, 1), 2), ((1, 3), 5), ((2, 5), 5), ((0, 4), 4), ((0, 0), 3), ((3, 3), 6)]
)
def test_singular_covariances_agree_with_many_digits(ranks, d):
    mu, nu = gaussian(3, d, ranks[0]), gaussian(4, d, ranks[1])
    truth = by_many_digits(mu, nu)
    found = wasserstein(mu, nu)
    assert found.converged
    assert holds(found, truth)
    assert float(found.value) == pytest.approx(truth, rel=1e-7)


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
def test_close_gaussians_lose_no_digits(size):
    mu = gaussian(5, 4)
    nu = Gaussian(mu.mean, mu.covariance + size * covariance(6, 4))
    truth = by_many_digits(mu, nu)
    found = wasserstein(mu, nu, rtol=1e-4)
    assert holds(found, truth)
    assert found.converged
    assert float(found.value) == pytest.approx(truth, rel=1e-13 / size)
    plain = ot.gaussian.bures_wasserstein_distance(mu.mean, nu.mean, mu.covariance, nu.covariance)
    assert abs(float(found.value) - truth) <= abs(float(plain) - truth)


def test_commuting_covariances_are_apart_by_their_roots():
    one, other = torch.tensor([4.0, 1.0, 0.0]).double(), torch.tensor([1.0, 0.0, 9.0]).double()
    turn = torch.linalg.qr(draw(7, 3, 3))[0]
    mean = torch.zeros(3, dtype=torch.float64)
    mu, nu = (Gaussian(mean, turn @ (values.diag() @ turn.T)) for values in (one, other))
    found = wasserstein(mu, nu)
    assert float(found.value) == pytest.approx(math.sqrt(1 + 1 + 9), rel=1e-7)
    assert holds(found, math.sqrt(11), 1e-14)


def test_dirac_masses_translation_and_symmetry():
    mu = gaussian(8, 3)
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert float(wasserstein(Gaussian(mu.mean, zero), Gaussian(mu.mean + 1, zero)).value) == pytest.approx(
        3**0.5
    )
    found = wasserstein(mu, mu)
    assert found.lower == 0
    assert found.upper < 1e-10
    assert found.converged
    shift = draw(9, 3)
    moved = Gaussian(mu.mean + shift, mu.covariance)
    assert float(wasserstein(mu, moved).value) == pytest.approx(float(shift.norm()), rel=1e-13)
    nu = gaussian(10, 3)
    assert float(wasserstein(mu, nu).value) == pytest.approx(float(wasserstein(nu, mu).value), rel=1e-13)


@pytest.mark.parametrize("scale", [1e-140, 1e-20, 1e150])
def test_scale(scale):
    mu, nu = gaussian(11, 3), gaussian(12, 3)
    truth = float(wasserstein(mu, nu).value)
    scaled = (Gaussian(g.mean * scale, g.covariance * scale**2) for g in (mu, nu))
    assert float(wasserstein(*scaled).value) == pytest.approx(truth * scale, rel=1e-12)


def test_samples_come_close():
    mu, nu = gaussian(13, 1), gaussian(14, 1)
    truth = wasserstein(mu, nu)
    found = wasserstein(mu.sample(20_000, 0), nu.sample(20_000, 1))
    # W_2 of a sample of a normal law in one dimension: about √(log log n / n) standard deviations.
    spread = float(mu.covariance.sqrt() + nu.covariance.sqrt())
    assert abs(float(found.value) - float(truth.value)) < 5 * spread / math.sqrt(20_000)


def test_derivative_is_that_of_pot():
    mu, nu = gaussian(15, 4), gaussian(16, 4)
    tensors = [t.clone().requires_grad_() for t in (mu.mean, mu.covariance, nu.mean, nu.covariance)]
    found = wasserstein(Gaussian(*tensors[:2]), Gaussian(*tensors[2:]), gradient=True)
    mine = torch.autograd.grad(found.value, tensors)
    theirs = ot.gaussian.bures_wasserstein_distance(tensors[0], tensors[2], tensors[1], tensors[3])
    expected = torch.autograd.grad(theirs, tensors)
    for one, other in zip(mine, expected, strict=True):
        if one.ndim == 2:  # of symmetric matrices only the symmetric part is a derivative
            one, other = one + one.mT, other + other.mT
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_derivative_by_a_singular_covariance_is_refused():
    mu, nu = gaussian(17, 3, 1), gaussian(18, 3)
    by_mean = Gaussian(mu.mean.clone().requires_grad_(), mu.covariance)
    found = wasserstein(by_mean, nu, gradient=True)
    (slope,) = torch.autograd.grad(found.value, by_mean.mean)
    torch.testing.assert_close(slope, (mu.mean - nu.mean) / float(found.value.detach()))
    with pytest.raises(ArgumentError, match="singular"):
        wasserstein(Gaussian(mu.mean, mu.covariance.clone().requires_grad_()), nu, gradient=True)


def test_what_is_refused():
    mu = gaussian(19, 2)
    with pytest.raises(ArgumentError, match="2 for Gaussians"):
        wasserstein(mu, mu, 1)
    with pytest.raises(ArgumentError, match="'bures' for Gaussians"):
        wasserstein(mu, mu, method="exact")
    with pytest.raises(ArgumentError, match=r"gaussian\.sample"):
        wasserstein(mu, DiscreteMeasure(draw(20, 4, 2)))
    with pytest.raises(ArgumentError, match="dimension 2"):
        wasserstein(mu, gaussian(21, 3))
