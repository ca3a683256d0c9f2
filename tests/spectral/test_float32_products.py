"""Float32 products that float64 products around them check."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from howsmooth.spectral import LeadingTriplet, lanczos
from howsmooth.spectral.float32_products import CheckedProducts
from tests._operators import Dense, gaussian, with_spectrum

SPECTRUM = [1.0 - 0.02 * i for i in range(40)]


class Off(Dense):
    """Products that lose digits, as where terms cancel."""

    def __init__(self, matrices: Tensor, off: float) -> None:
        super().__init__(matrices)
        self.off = off

    def _product(self, e: Tensor) -> Tensor:
        return super()._product(e) * (1 + self.off)


def checked(off: float, basis_bytes: int | None = None) -> tuple[CheckedProducts, Dense]:
    matrices = torch.stack([with_spectrum(seed, SPECTRUM, 60, 50) for seed in (0, 2)])
    exact = Dense(matrices)
    return CheckedProducts(Off(matrices.float(), off), exact, basis_bytes), exact


def solve(operator: CheckedProducts, rtol: float) -> LeadingTriplet:
    start = gaussian(4, 2, 50, dtype=torch.float32)
    return lanczos(operator, start, rtol=rtol, confidence=0.999, max_iterations=100)


def test_one_product_in_float64_gives_value_and_interval() -> None:
    """At a loose tolerance the Ritz residual is large, and is not taken for rounding."""
    for rtol in (0.3, 1e-4):
        operator, exact = checked(0.0)
        found = solve(operator, rtol)
        assert exact.products == 1
        assert isinstance(operator.single, Dense)
        assert operator.single.products == int(found.steps.max())
        assert found.converged.all()
        assert ((found.lower <= 1.0) & (found.upper >= 1.0)).all()
        image = torch.einsum("boi,bi->bo", exact.matrices, found.right.double())
        torch.testing.assert_close(found.sigma, image.norm(dim=1), rtol=1e-6, atol=0.0)
        assert (found.sigma - found.lower < 1e-13).all()
        assert found.right.dtype == found.left.dtype == torch.float32


def test_twice_the_error_of_a_product_is_allowed_for() -> None:
    """One across the direction, which leaves the value as it is."""
    operator, exact = checked(0.0)
    _, _, right = torch.linalg.svd(exact.matrices)
    v, across = right[:, 0], right[:, 1]
    one, steps = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    found = LeadingTriplet(one, one, one, steps > 0, steps > 0, steps, v.float(), gaussian(0, 2, 60).float())
    judged = operator.judged(found, v + 1e-3 * across, 1e-2)
    assert judged.converged.all()
    assert (judged.upper - judged.sigma > 1.99e-3).all()


@pytest.mark.parametrize("basis_bytes", [None, 50 * 8 * 40, 0])
def test_members_that_lost_digits_are_measured_again_where_memory_has_room(basis_bytes: int | None) -> None:
    operator, exact = checked(1e-3, basis_bytes)
    found = solve(operator, 1e-4)
    assert ((found.lower <= 1.0) & (found.upper >= 1.0)).all()
    assert found.converged.tolist() == [basis_bytes != 0] * 2
    assert (exact.products > 5) == (basis_bytes != 0)
    assert ((found.upper - found.lower) < (1e-4 if basis_bytes != 0 else 2e-2)).all()


def test_float32_products_are_given_up_before_float64_ones_are_made() -> None:
    matrices = with_spectrum(0, SPECTRUM, 60, 50)[None]
    single = Dense(matrices.float())
    alive = weakref.ref(single)

    def exact() -> Dense:
        assert alive() is None
        return Dense(matrices)

    operator = CheckedProducts(single, exact)
    del single
    start = gaussian(4, 1, 50, dtype=torch.float32)
    for basis_dtype in (None, torch.float16):
        options = {"rtol": 1e-3, "confidence": 0.999, "max_iterations": 60, "basis_dtype": basis_dtype}
        if basis_dtype is not None:
            operator = CheckedProducts(Dense(matrices.float()), exact)
        found = lanczos(operator, start, **options)
        assert bool(found.converged)
        assert float(found.lower) <= 1.0 <= float(found.upper)
