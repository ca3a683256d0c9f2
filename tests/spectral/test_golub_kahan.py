"""Golub–Kahan and its limits on matrices whose spectrum is prescribed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from howsmooth.errors import NonFiniteError
from howsmooth.spectral import LeadingTriplet, LinearOperator, golub_kahan
from howsmooth.spectral.golub_kahan import _limits
from howsmooth.spectral.probabilistic_upper_limits import a_posteriori_upper, start_quantile


class Dense(LinearOperator):
    """Matrices (batch, out, in) as an operator; counts its products."""

    def __init__(self, matrices: Tensor) -> None:
        batch, out_size, in_size = matrices.shape
        super().__init__(batch, (in_size,), (out_size,), matrices.dtype, matrices.device)
        self.matrices = matrices
        self.products = 0

    def _product(self, e: Tensor) -> Tensor:
        self.products += 1
        return torch.einsum("boi,bi->bo", self.matrices, e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return torch.einsum("boi,bo->bi", self.matrices, u)


def gaussian(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_spectrum(seed: int, values: list[float], out_size: int, in_size: int) -> Tensor:
    """A matrix of random singular vectors with the given singular values, the others zero."""
    u = torch.linalg.qr(gaussian(seed, out_size, out_size)).Q
    v = torch.linalg.qr(gaussian(seed + 1, in_size, in_size)).Q
    s = torch.tensor(values, dtype=torch.float64)
    return u[:, : len(values)] * s @ v[:, : len(values)].mT


def solve(matrix: Tensor, seed: int = 0, **options: object) -> LeadingTriplet:
    op = Dense(matrix)
    keywords = {"rtol": 1e-8, "confidence": 0.999, "max_iterations": 200} | options
    return golub_kahan(op, gaussian(seed, op.batch, op.in_size, dtype=matrix.dtype), **keywords)


# ---- the limits


@pytest.mark.parametrize("dimension", [2, 3, 10, 1000])
def test_start_quantile_is_that_of_a_gaussian_direction(dimension: int) -> None:
    x = start_quantile(dimension, 0.99)
    density = stats.beta(0.5, (dimension - 1) / 2)
    assert density.cdf(x) == pytest.approx(0.01, rel=1e-9)
    cosines = gaussian(dimension, 20000, dimension)
    squared = (cosines[:, 0] / cosines.norm(dim=1)) ** 2
    assert float((squared < start_quantile(dimension, 0.7)).double().mean()) == pytest.approx(0.3, abs=0.015)


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(torch.float32, (0, -100, -73, 90)), (torch.float64, (0, -990, -540, 700))],
)
def test_maps_whose_squares_leave_the_range(dtype: torch.dtype, exponents: tuple[int, ...]) -> None:
    """A power of two multiplies the result of a member and its interval, whatever the other members are."""
    matrix = gaussian(3, 6, 5, dtype=dtype)
    sizes = torch.tensor([2.0**k for k in exponents], dtype=dtype)
    start = gaussian(4, 5, dtype=dtype).expand(4, 5).contiguous()
    options = {"rtol": 1e-4, "confidence": 0.999, "max_iterations": 20}
    found = golub_kahan(Dense(sizes[:, None, None] * matrix), start, **options)
    truth = torch.linalg.matrix_norm(matrix.double(), 2) * sizes.double()
    assert ((found.lower <= truth) & (truth <= found.upper)).all()
    assert found.converged.all()
    torch.testing.assert_close(found.sigma / sizes, found.sigma[:1].expand(4), rtol=1e-12, atol=0.0)


def test_a_value_out_of_range_is_told_by_its_logarithm() -> None:
    """Products of entries near the largest number are finite only if vectors are small."""
    with pytest.raises(NonFiniteError, match=r"range of float64, got exp\(710\."):
        solve(torch.full((1, 4, 4), 1e308, dtype=torch.float64))


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
        found = solve(matrix, seed=steps, confidence=confidence, max_iterations=steps, rtol=1e-12)
        assert (found.lower <= values[0]).all()
        share = float((found.upper >= values[0]).double().mean())
        assert share >= confidence - 4 * math.sqrt(confidence * (1 - confidence) / trials)


def test_coverage_is_attained_so_that_the_limit_is_not_vacuous() -> None:
    """Where the rest of the spectrum is one value, the first step's limit is exact on the event's border."""
    trials, n, confidence = 2000, 30, 0.8
    values = torch.zeros(n, dtype=torch.float64)
    values[0] = 1.0
    matrix = torch.diag(values).expand(trials, n, n)
    found = solve(matrix, confidence=confidence, max_iterations=1, rtol=1e-12)
    share = float((found.upper >= 1.0).double().mean())
    assert confidence - 0.03 <= share <= 0.97
    # theory: with c² the squared cosine, θ = c² and β = c √(1 − c²), so the limit c² + c√(1−c²)/√x
    # holds exactly where it is at least 1
    x = start_quantile(n, confidence)
    cosine = gaussian(0, trials, n)
    c = (cosine[:, 0] / cosine.norm(dim=1)).abs()
    expected = c**2 + c * torch.sqrt(1 - c**2) / math.sqrt(x) >= 1.0
    assert ((found.upper >= 1.0) == expected).double().mean() > 0.999


# ---- the solver


@given(
    out_size=st.integers(1, 12),
    in_size=st.integers(1, 12),
    rank=st.integers(0, 12),
    decay=st.floats(0.05, 1.0),
    log_scale=st.floats(-30, 30),
    seed=st.integers(0, 1000),
)
def test_value_and_interval_on_prescribed_spectra(
    out_size: int, in_size: int, rank: int, decay: float, log_scale: float, seed: int
) -> None:
    """Full and deficient rank, repeated values (decay 1), tall and wide, any scale."""
    rank = min(rank, out_size, in_size)
    top = 10.0**log_scale
    values = [top * decay**i for i in range(rank)]
    matrix = with_spectrum(seed, values, out_size, in_size)[None]
    found = solve(matrix, seed=seed, rtol=1e-8)
    truth = top if rank else 0.0
    assert float(found.sigma) == pytest.approx(truth, rel=1e-11, abs=1e-300)
    assert float(found.lower) <= truth <= float(found.upper) * (1 + 1e-15)
    assert bool(found.converged)
    if rank:
        image = matrix[0] @ found.right[0]
        assert float(found.right.norm()) == pytest.approx(1.0, rel=1e-12)
        assert float(found.left.norm()) == pytest.approx(1.0, rel=1e-12)
        # A start that lies badly leaves an angle of the order of the square root of the width.
        torch.testing.assert_close(image, found.sigma * found.left[0], rtol=0, atol=3e-4 * top)


def test_width_after_25_steps_with_a_gap_of_ten_percent() -> None:
    values = [1.0, *np.linspace(0.9, 0.0, 199)]
    found = solve(with_spectrum(0, values, 200, 200)[None], max_iterations=25, rtol=1e-12)
    assert 1e-9 < float(found.upper / found.lower - 1) < 2e-5
    assert float(found.steps) == 25


def test_zero_operator() -> None:
    found = solve(torch.zeros(2, 4, 3, dtype=torch.float64))
    assert found.sigma.tolist() == found.lower.tolist() == found.upper.tolist() == [0.0, 0.0]
    assert found.converged.all()
    assert (found.left == 0).all()
    assert torch.allclose(found.right.norm(dim=1), torch.ones(2).double())


def test_identity_in_both_precisions() -> None:
    for dtype, width in ((torch.float64, 1e-6), (torch.float32, 10.0)):
        found = solve(torch.eye(50, dtype=dtype)[None] * 3.0, rtol=1e-4)
        assert float(found.sigma) == pytest.approx(3.0, rel=1e-6)
        assert float(found.lower) <= 3.0 <= float(found.upper)
        assert bool(found.broke_down)
        assert bool(found.converged) == (dtype == torch.float64)
        assert float(found.upper - found.lower) < width


def test_breakdown_keeps_the_last_beta() -> None:
    """α_k = 0 with β_{k−1} ≠ 0: dropping that column of B gives a wrong norm (rank one, out_size 1)."""
    row = gaussian(3, 1, 1, 7)
    found = solve(row)
    assert float(found.sigma) == pytest.approx(float(row.norm()), rel=1e-12)
    assert int(found.steps) == 2


def test_members_stop_by_themselves_and_do_not_depend_on_the_batch() -> None:
    easy = with_spectrum(0, [10.0, 0.1, 0.01], 30, 20)
    hard = with_spectrum(2, [1.0 - 1e-3 * i for i in range(20)], 30, 20)
    zero = torch.zeros(30, 20, dtype=torch.float64)
    # The one that runs longest stands last, so that dropping the others moves it.
    batch = torch.stack((easy, zero, hard))
    start = gaussian(0, 3, 20)
    options = {"rtol": 1e-6, "confidence": 0.999, "max_iterations": 200}
    together = golub_kahan(Dense(batch), start, **options)
    assert len(set(together.steps.tolist())) == 3
    for i in range(3):
        alone = golub_kahan(Dense(batch[i : i + 1]), start[i : i + 1], **options)
        assert int(alone.steps) == int(together.steps[i])
        for name in ("sigma", "lower", "upper", "right", "left"):
            torch.testing.assert_close(
                getattr(alone, name)[0], getattr(together, name)[i], rtol=1e-9, atol=1e-9
            )


def test_unconverged_is_said_and_the_interval_holds() -> None:
    values = [1.0 - 1e-4 * i for i in range(300)]
    found = solve(with_spectrum(0, values, 300, 300)[None], max_iterations=5, rtol=1e-6)
    assert not bool(found.converged)
    assert int(found.steps) == 5
    assert float(found.lower) <= 1.0 <= float(found.upper)


def test_both_bases_stay_orthonormal_long_after_convergence() -> None:
    """The short recurrence alone loses orthogonality as soon as a Ritz value converges."""

    class Recording(Dense):
        def __init__(self, matrices: Tensor) -> None:
            super().__init__(matrices)
            self.given: dict[str, list[Tensor]] = {"v": [], "u": []}

        def _product(self, e: Tensor) -> Tensor:
            self.given["v"].append(e[0].clone())
            return super()._product(e)

        def _adjoint_product(self, u: Tensor) -> Tensor:
            self.given["u"].append(u[0].clone())
            return super()._adjoint_product(u)

    for dtype, loss in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        op = Recording(with_spectrum(0, [100.0, *np.linspace(0.5, 1.0, 99)], 100, 100)[None].to(dtype))
        start = gaussian(1, 1, 100, dtype=dtype)
        golub_kahan(op, start, rtol=0.0, confidence=0.999, max_iterations=40)
        for vectors in op.given.values():
            basis = torch.stack(vectors).double()
            assert len(basis) == 40
            assert (basis @ basis.mT - torch.eye(40)).abs().max() <= loss


def test_a_breakdown_is_taken_for_the_rounding_level_and_not_for_zero() -> None:
    slack, quantile = 1e-14, 1e-10
    sigma, upper = _limits(np.array([2.0]), np.array([0.0]), quantile, slack, complete=False)
    assert sigma == 2.0
    assert upper == pytest.approx(2.0 * math.sqrt(1 + slack / math.sqrt(quantile)), rel=1e-12)
    assert _limits(np.array([2.0]), np.array([0.0]), quantile, slack, complete=True)[1] == pytest.approx(2.0)


def test_the_limit_survives_many_steps() -> None:
    values = [1.0, *np.logspace(-1, -12, 99)]
    found = solve(with_spectrum(0, values, 100, 100)[None], rtol=1e-12, max_iterations=100)
    assert float(found.lower) <= 1.0 <= float(found.upper)
    dense = [1.0 - 0.002 * i for i in range(400)]
    found = solve(with_spectrum(5, dense, 400, 400)[None], rtol=1e-11, max_iterations=400)
    assert bool(found.converged)
    assert float(found.lower) <= 1.0 <= float(found.upper)


def test_products_that_are_not_finite_are_refused() -> None:
    matrix = torch.ones(1, 3, 3, dtype=torch.float64)
    matrix[0, 1, 1] = math.inf
    with pytest.raises(NonFiniteError, match="finite Jacobian products"):
        solve(matrix)
