"""Proved norms: above the norm in many digits, near it, and at the edges of the range of float64."""

from __future__ import annotations

import mpmath
import pytest
import torch
from mpmath import mpf
from torch import Tensor

from howsmooth.rounding import (
    TINY,
    MatrixNorms,
    Triangles,
    absolute_norms_above,
    gamma,
    largest_eigenvalues_above,
    largest_eigenvalues_by_squaring,
    product_norms_above,
    spectral_norm_above,
    spectral_norm_below,
    spectral_norms,
    spectral_norms_above,
)
from tests._cases import tokens
from tests._exact import exact_norm

F64 = torch.float64


def _norm(matrix: Tensor) -> mpf:
    with mpmath.workdps(40):
        return exact_norm(mpmath.matrix(matrix.tolist()))


def _matrices() -> dict[str, Tensor]:
    rotation = torch.linalg.qr(tokens(1, 7, 7)).Q
    u, v = tokens(2, 9), tokens(3, 4)
    steep = tokens(4, 6, 8) * 10.0 ** -torch.arange(8, dtype=F64)
    small, large = 2.0**-530, 2.0**1000
    return {
        "square": tokens(5, 6, 6),
        "tall": tokens(6, 40, 3),
        "wide": tokens(7, 3, 40),
        "row": tokens(8, 1, 30),
        "column": tokens(9, 30, 1),
        "rotation": rotation,  # all singular values alike, so that the verification fails first
        "rank one": u[:, None] * v,
        "steep": steep,
        "ones": torch.ones(8, 8, dtype=F64),
        "squares underflow": small * 2.0**-100 * tokens(10, 5, 6),
        "squares overflow": large * tokens(11, 5, 6),
        "both": tokens(12, 5, 6) * torch.tensor([small, large, 1.0, 0.0, small], dtype=F64)[:, None],
        "subnormal": tokens(13, 4, 4) * 2.0**-1073,
        "rounds down to the smallest": torch.tensor([[5e-324, 5e-324]], dtype=F64),
        "smallest": torch.full((2, 2), 5e-324, dtype=F64),
    }


@pytest.mark.parametrize("kind", list(_matrices()))
def test_a_norm_is_proved_and_near(kind: str) -> None:
    matrix = _matrices()[kind]
    exact, above, below = _norm(matrix), spectral_norm_above(matrix), spectral_norm_below(matrix)
    tiny = mpf(2) ** -1070
    assert mpf(below) <= exact <= mpf(above)
    assert mpf(above) <= exact * (1 + mpf("1e-12")) + tiny
    assert mpf(below) >= exact * (1 - mpf("1e-12")) - tiny
    by_squaring = float(spectral_norms_above(matrix, squarings=2))
    assert exact <= mpf(by_squaring) <= exact * min(matrix.shape) ** (1 / 16) * (1 + mpf("1e-9")) + 2 * tiny


def test_norms_of_a_batch_are_those_of_its_members() -> None:
    matrices = tokens(20, 2, 3, 5, 4) * torch.tensor([1.0, 1e-200, 1e200], dtype=F64)[:, None, None]
    matrices[1, 1] = 0
    for squarings in (None, 1):
        found = spectral_norms_above(matrices, squarings)
        assert found.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                alone = spectral_norms_above(matrices[i, j], squarings)
                assert float(found[i, j]) == pytest.approx(float(alone), rel=1e-12)


def test_nothing_has_norm_zero_and_what_is_not_finite_infinity() -> None:
    assert spectral_norm_above(torch.zeros(3, 4)) == spectral_norm_below(torch.zeros(3, 4)) == 0
    assert spectral_norm_above(torch.zeros(0, 4)) == spectral_norm_below(torch.zeros(0, 4)) == 0
    assert spectral_norms(torch.zeros(3, 0, 2, dtype=F64)).upper.tolist() == [0, 0, 0]
    matrices = torch.ones(3, 2, 2, dtype=F64)
    matrices[0, 0, 0], matrices[1, 1, 0] = torch.nan, torch.inf
    for squarings in (None, 2):
        found = spectral_norms_above(matrices, squarings)
        assert found[:2].isposinf().all()
        assert 2 <= float(found[2]) <= 2 * 2 ** (1 / 16)


@pytest.mark.parametrize("r", [2, 30, 300])
def test_flat_spectra_leave_no_room(r: int) -> None:
    # Of an orthogonal matrix times 1 − 2^-53, both forms attain what they may be too large by at most.
    matrix = torch.eye(r, dtype=F64) * (1 - 2.0**-53)
    assert 1 - 2.0**-53 <= spectral_norm_above(matrix) <= 1 + 1e-12 + r * (r + 2) * 2.0**-53
    assert spectral_norm_below(matrix) <= 1 - 2.0**-53
    for squarings in (1, 4):
        attained = r ** (0.5 ** (squarings + 2))
        found = float(spectral_norms_above(matrix, squarings))
        # For 300 rows the errors of four squarings may grow by (2 √r)³ √r γ_r, of which the root is taken.
        least = 1 + 2e-10 if (r, squarings) == (300, 4) else 1 - 1e-14
        assert attained * least <= found <= attained * (1 + 1e-9)


def test_allowances_are_those_of_the_analysis() -> None:
    """Libraries round less than they may, so that no example would show a missing allowance."""
    r, s = 50, 1000
    diagonal = torch.zeros(1, r, r, dtype=F64)
    diagonal[0, 0, 0] = 1
    none = torch.zeros(1, dtype=F64)
    found = largest_eigenvalues_above(diagonal.clone(), none)
    assert float(found.upper - found.plain) >= gamma(r + 1) * (r - 1)
    assert float(largest_eigenvalues_above(diagonal.clone(), none + 0.25).upper) >= 1.25
    assert float(largest_eigenvalues_above(0 * diagonal, none).upper) >= TINY
    # r orthonormal rows of length s
    rows = torch.linalg.qr(tokens(32, s, r)).Q.mT
    wide = spectral_norms(rows)
    assert float(wide.upper - wide.plain) >= 0.45 * (gamma(s) * r)
    assert spectral_norm_below(torch.eye(r, dtype=F64)) <= 1 - 0.9 * gamma(r) * r**0.5
    triangles = Triangles.of(rows.mT)
    assert float(triangles.stretch) >= 1 + 0.45 * gamma(s) * r
    assert float(triangles.rest) >= gamma(r) * r * 0.9
    # The rounding of the product of the triangles, and what is left of the other matrix, without all else.
    one, side = torch.ones((), dtype=F64), torch.ones(1, 2, dtype=F64)
    first = Triangles(torch.ones(1, 1, dtype=F64), side, one, 0 * one)
    other = Triangles(torch.ones(1, 1, dtype=F64), side * torch.tensor([1.0, -1.0], dtype=F64), one, 0 * one)
    assert float(first.product_norms(other)[0]) >= gamma(2) * 2
    assert float(first.product_norms(other._replace(rest=0.5 * one))[0]) >= 0.5 * 2**0.5
    # A product that cancels is known up to the rounding of its terms, whichever way it is formed.
    left, right = torch.ones(9, 2, dtype=F64), torch.ones(2, 8, dtype=F64)
    right[1] = -1
    for factors in ((left, right), (left[:1], right)):
        sizes = float(factors[0].norm() * factors[1].norm())
        assert float(product_norms_above(*factors)) >= gamma(2) * sizes


def test_squaring_bounds_eigenvalues_of_any_sign_and_counts_slack() -> None:
    symmetric = torch.diag(torch.tensor([-3.0, 2.0, 1.0], dtype=F64))
    assert 3 <= float(largest_eigenvalues_by_squaring(symmetric)) <= 3 * 3 ** (1 / 32)
    more = largest_eigenvalues_by_squaring(symmetric, slack=torch.tensor(0.5, dtype=F64))
    assert float(more) >= 3.5


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e300])
def test_norms_of_absolute_values(scale: float) -> None:
    matrices = scale * tokens(30, 3, 5, 7)
    found = absolute_norms_above(matrices)
    for matrix, bound in zip(matrices, found, strict=True):
        exact = _norm(matrix.abs())
        assert exact <= mpf(float(bound)) <= 2 * exact
    for entry in torch.linspace(0.1, 1.0, 20, dtype=F64):  # the bound is attained
        flat = entry.expand(3, 7)
        assert mpmath.sqrt(21) * mpf(float(entry)) <= mpf(float(absolute_norms_above(flat)))


def test_a_norm_is_computed_once() -> None:
    norms, matrix = MatrixNorms(), tokens(31, 4, 6)
    norms.learn(other := tokens(32, 6, 4), matrix, tokens(33, 4, 6))
    first = norms.spectral(matrix)
    assert norms.spectral(matrix) is first
    norms.learn(other, matrix)
    assert norms.spectral(matrix) is first
    for one in (other, matrix):
        assert MatrixNorms().spectral(one) == norms.spectral(one)
        assert MatrixNorms().absolute(one) == norms.absolute(one)
    assert norms.spectral(matrix.mT) is not first
    assert float(first) >= float(torch.linalg.matrix_norm(matrix, 2)) * (1 - 1e-14)
    assert float(norms.absolute(matrix)) >= float(torch.linalg.matrix_norm(matrix.abs(), 2)) * (1 - 1e-14)


def test_gradients_are_those_of_the_norm_of_all_shapes() -> None:
    """Against singular values of LAPACK and their gradient in PyTorch; large ones have a way of their own."""
    for m, d in ((4, 4), (4, 7), (7, 4), (130, 130), (130, 133)):
        matrix, other = tokens(m, m, d).requires_grad_(), tokens(m + d, d, m)
        for ours, theirs in (
            (spectral_norms_above(matrix), torch.linalg.matrix_norm(matrix, 2)),
            (product_norms_above(matrix, other), torch.linalg.matrix_norm(matrix @ other, 2)),
        ):
            assert theirs.item() * (1 - 1e-13) <= ours.item() <= theirs.item() * (1 + 3e-11)
            torch.testing.assert_close(
                torch.autograd.grad(ours, matrix)[0],
                torch.autograd.grad(theirs, matrix)[0],
                rtol=1e-7,
                atol=1e-9,
            )
    zero = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    norm = spectral_norms_above(zero)
    assert norm.item() == 0
    assert not torch.autograd.grad(norm, zero)[0].any()


@pytest.mark.parametrize("kind", ["plain", "cancelling", "low rank", "wide factors"])
def test_norms_of_products_are_proved(kind: str) -> None:
    left, right = tokens(41, 9, 3), tokens(42, 3, 8)
    if kind == "cancelling":  # all but rounding of the product is lost
        left[:, 1], right[1] = left[:, 0], -right[0] * (1 + 2.0**-50)
        left[:, 2] = 0
    elif kind == "low rank":
        left[:, 2], right[1] = left[:, 1], right[0]
    elif kind == "wide factors":
        left, right = tokens(43, 3, 9), tokens(44, 9, 2)
    with mpmath.workdps(40):
        exact = exact_norm(mpmath.matrix(left.tolist()) * mpmath.matrix(right.tolist()))
    found = mpf(float(product_norms_above(left, right)))
    sizes = float(left.norm() * right.norm())
    assert exact <= found <= exact * (1 + mpf("1e-12")) + mpf("1e-13") * sizes


def test_norms_of_products_with_a_matrix_between() -> None:
    a, m, b = tokens(45, 3, 9, 4), tokens(46, 3, 4, 5), tokens(47, 3, 8, 5)
    found, u, v = Triangles.of(a).product_norms(Triangles.of(b), m)
    for i in range(3):
        with mpmath.workdps(40):
            factors = (mpmath.matrix(t.tolist()) for t in (a[i], m[i], b[i].mT))
            exact = exact_norm(mpmath.fprod(factors))
        assert exact <= mpf(float(found[i])) <= exact * (1 + mpf("1e-11"))
        assert float(u[i] @ a[i] @ m[i] @ b[i].mT @ v[i]) == pytest.approx(float(exact), rel=1e-12)


def test_bad_factors_only_widen_the_bound() -> None:
    # Nothing about the factors is trusted: any orthogonality and any remainder count.
    matrix = tokens(48, 8, 3)
    exact = _norm(matrix)
    good = Triangles.of(matrix)
    eye = Triangles.of(torch.eye(3, dtype=F64))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.linalg, "qr", lambda t: (1.001 * good.q, good.r * 0.998))
        bad = Triangles.of(matrix)
    assert exact <= mpf(float(bad.product_norms(eye)[0])) <= 1.02 * exact
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.linalg, "qr", lambda t: (1.5 * good.q, good.r / 1.5))
        bad = Triangles.of(matrix)
    assert exact <= mpf(float(bad.product_norms(eye)[0])) <= 3 * exact
