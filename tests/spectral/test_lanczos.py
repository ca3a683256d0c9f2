"""One-sided Lanczos on matrices of prescribed spectra, and its limits that hold with a probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.spectral import LeadingTriplet, lanczos
from howsmooth.spectral import krylov_basis as basis_module
from howsmooth.spectral.accurate_sums import PIECE, squared_lengths
from howsmooth.spectral.krylov_basis import Basis
from howsmooth.spectral.lanczos import lanczos_together
from howsmooth.spectral.operator import Subset
from howsmooth.spectral.probabilistic_upper_limits import a_posteriori_upper, start_quantile
from tests._operators import Dense, Diagonal, gaussian, with_spectrum

HALF, OWN = torch.float16, None
BASES = pytest.mark.parametrize("basis", [OWN, HALF], ids=["own precision", "half precision"])


class Recording(Dense):
    """Keeps the vectors that it is applied to, and counts."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__(matrices)
        self.given: list[Tensor] = []
        self.adjoints = 0

    def _product(self, e: Tensor) -> Tensor:
        self.given.append(e[0].clone())
        return super()._product(e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        self.adjoints += 1
        return super()._adjoint_product(u)


def solve(matrix: Tensor, seed: int = 0, **options: object) -> LeadingTriplet:
    operator = Dense(matrix)
    keywords = {"rtol": 1e-8, "confidence": 0.999, "max_iterations": 200} | options
    return lanczos(operator, gaussian(seed, operator.batch, operator.in_size, dtype=matrix.dtype), **keywords)


# ---- value and interval


@given(
    out_size=st.integers(1, 12),
    in_size=st.integers(1, 12),
    rank=st.integers(0, 12),
    decay=st.floats(0.05, 1.0),
    log_scale=st.floats(-30, 30),
    half=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_value_and_interval_on_prescribed_spectra(
    out_size: int, in_size: int, rank: int, decay: float, log_scale: float, half: bool, seed: int
) -> None:
    """Full and deficient rank, repeated values (decay 1), tall and wide, any scale, both bases."""
    rank = min(rank, out_size, in_size)
    top = 10.0**log_scale
    matrix = with_spectrum(seed, [top * decay**i for i in range(rank)], out_size, in_size)[None]
    found = solve(matrix, seed=seed, basis_dtype=HALF if half else OWN)
    truth = top if rank else 0.0
    assert float(found.sigma) == pytest.approx(truth, rel=2e-7 if half else 1e-11, abs=1e-300)
    assert float(found.lower) <= truth <= float(found.upper) * (1 + 1e-15)
    assert float(found.lower) <= float(found.sigma) <= float(found.upper)
    assert bool(found.converged) or half
    assert float(found.right.norm()) == pytest.approx(1.0, rel=1e-12)
    if rank:
        assert float(found.left.norm()) == pytest.approx(1.0, rel=1e-12)
        image = matrix[0] @ found.right[0]
        torch.testing.assert_close(image, found.sigma * found.left[0], rtol=0, atol=3e-4 * top)
    else:
        assert (found.left == 0).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12, 1e25])
@BASES
def test_float32_at_any_scale(scale: float, basis: torch.dtype | None) -> None:
    """The fourth power of the norm, which lengths of JᵀJ v are squared to, leaves float32's range early."""
    values = [scale * s for s in (1.0, 0.7, 0.5, 0.1)]
    matrix = torch.stack([with_spectrum(seed, values, 40, 30) for seed in (0, 2)]).float()
    found = solve(matrix, basis_dtype=basis, rtol=1e-4)
    truth = torch.linalg.matrix_norm(matrix.double(), 2)
    torch.testing.assert_close(found.sigma, truth, rtol=1e-6, atol=0)
    assert ((found.lower <= truth) & (truth <= found.upper)).all()
    left = matrix[0].double() @ found.right[0].double() / truth[0]
    torch.testing.assert_close(found.left[0].double(), left, rtol=0, atol=1e-5)


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
    found = lanczos(Dense(sizes[:, None, None] * matrix), start, **options)
    truth = torch.linalg.matrix_norm(matrix.double(), 2) * sizes.double()
    assert ((found.lower <= truth) & (truth <= found.upper)).all()
    assert found.converged.all()
    torch.testing.assert_close(found.sigma / sizes, found.sigma[:1].expand(4), rtol=1e-12, atol=0.0)


def test_a_value_out_of_range_is_told_by_its_logarithm() -> None:
    """Products of entries near the largest number are finite only if vectors are small."""
    with pytest.raises(NonFiniteError, match=r"range of float64, got exp\(710\."):
        solve(torch.full((1, 4, 4), 1e308, dtype=torch.float64))


def test_width_after_25_steps_with_a_gap_of_ten_percent() -> None:
    values = [1.0, *np.linspace(0.9, 0.0, 199)]
    found = solve(with_spectrum(0, values, 200, 200)[None], max_iterations=25, rtol=1e-12)
    assert 1e-9 < float(found.upper / found.lower - 1) < 2e-5
    assert float(found.steps) == 25


def test_the_limit_survives_many_steps() -> None:
    values = [1.0, *np.logspace(-1, -12, 99)]
    found = solve(with_spectrum(0, values, 100, 100)[None], rtol=1e-12, max_iterations=100)
    assert float(found.lower) <= 1.0 <= float(found.upper)
    dense = [1.0 - 0.002 * i for i in range(400)]
    found = solve(with_spectrum(5, dense, 400, 400)[None], rtol=1e-11, max_iterations=400)
    assert bool(found.converged)
    assert float(found.lower) <= 1.0 <= float(found.upper)


@pytest.mark.parametrize(
    ("values", "width"),
    [
        (np.linspace(1.0, 0.5, 12), 3e-14),
        (np.linspace(1.0, 0.1, 12), 3e-14),
        (np.arange(1, 13) ** -0.5, 3e-14),
        (0.5 ** np.arange(12), 5e-14),
        (np.array([1.0, 1 - 1e-4, 0.5, 0.3]), 3e-14),
        (np.linspace(1.0, 0.99, 8), 2e-13),
        # Of few distinct values, the start sees each in few directions of many.
        (np.repeat([1.0, 0.9], 6), 2e-11),
        (np.ones(5), 3e-11),
    ],
    ids=["to 0.5", "to 0.1", "power law", "geometric", "a close pair", "to 0.99", "two values", "one value"],
)
def test_an_interval_is_narrow_where_the_rank_ends_the_run(values: np.ndarray, width: float) -> None:
    """If so much is asked for: a run that may stop earlier does not make the step that shows the end."""
    matrix = with_spectrum(1, values.tolist(), 300, 300)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    for rtol, widest in ((1e-10, 1e-10), (1e-13, width)):
        found = solve(matrix.expand(20, -1, -1), rtol=rtol)
        assert bool(((found.lower <= truth) & (truth <= found.upper)).all())
        assert float(((found.upper - found.lower) / found.sigma).max()) <= widest
        assert int(found.steps.max()) <= len(set(values)) + 3


@BASES
def test_one_singular_value_for_all_breaks_down_at_the_rounding_level(basis: torch.dtype | None) -> None:
    class Identity(Diagonal):
        def _product(self, e: Tensor) -> Tensor:
            return e  # the very tensor that it was given

        _adjoint_product = _product

    for dtype, width in ((torch.float64, 1e-9), (torch.float32, 0.1)):
        start = gaussian(0, 1, 50, dtype=dtype)
        given = start.clone()
        options = {"rtol": 1e-4, "confidence": 0.999, "max_iterations": 9, "basis_dtype": basis}
        found = lanczos(Identity(torch.ones(50, dtype=dtype)), start, **options)
        assert (start == given).all()
        assert bool(found.broke_down)
        assert int(found.steps) == 1
        assert float(found.lower) <= 1.0 <= float(found.upper)
        assert float(found.upper) - 1 < (width if basis is None else 0.1)
        torch.testing.assert_close(found.right, start / start.norm(), rtol=0, atol=3e-4)


def test_an_operator_may_use_its_memory_again() -> None:
    class Reusing(Diagonal):
        def __init__(self, values: Tensor) -> None:
            super().__init__(values)
            self.memory = torch.empty(2, 1, *values.shape, dtype=values.dtype)

        def _product(self, e: Tensor) -> Tensor:
            return torch.mul(self.values, e, out=self.memory[0])

        def _adjoint_product(self, u: Tensor) -> Tensor:
            return torch.mul(self.values, u, out=self.memory[1])

    values, start = torch.linspace(0, 1, 40).double(), gaussian(0, 1, 40)
    options = {"rtol": 1e-9, "confidence": 0.99, "max_iterations": 40}
    one, two = (lanczos(operator(values), start, **options) for operator in (Reusing, Diagonal))
    assert float(one.sigma) == pytest.approx(float(two.sigma), rel=1e-14)
    torch.testing.assert_close(one.right, two.right)


def test_one_output_exhausts_after_two_steps() -> None:
    row = gaussian(3, 1, 1, 7)
    found = solve(row)
    assert float(found.sigma) == pytest.approx(float(row.norm()), rel=1e-12)
    assert int(found.steps) == 2
    assert bool(found.broke_down)


@BASES
def test_the_whole_space_is_a_proof(basis: torch.dtype | None) -> None:
    """After N steps no chance is left: the limit is the value up to rounding."""
    found = solve(torch.diag(torch.tensor([1.0, 0.9, 0.3, 0.1]).double())[None], basis_dtype=basis, rtol=0.0)
    assert int(found.steps) == 4
    assert bool(found.broke_down)
    assert 1.0 <= float(found.upper) <= 1 + (1e-13 if basis is None else 1e-6)


# ---- the basis


@BASES
def test_orthogonality_long_after_convergence(basis: torch.dtype | None) -> None:
    """The short recurrence alone has copies of the first value by then: 40 steps, one value far out."""
    for dtype, own_loss, neighbours in ((torch.float64, 1e-13, 1e-13), (torch.float32, 1e-5, 1e-5)):
        operator = Recording(with_spectrum(0, [100.0, *np.linspace(0.5, 1.0, 99)], 100, 100)[None].to(dtype))
        options = {"rtol": 0.0, "confidence": 0.999, "max_iterations": 40, "basis_dtype": basis}
        lanczos(operator, gaussian(1, 1, 100, dtype=dtype), **options)
        vectors = torch.stack(operator.given[:40]).double()
        overlaps = (vectors @ vectors.mT - torch.eye(40)).abs()
        # Half precision rounds by 2^-11 at most: what it leaves of far vectors is a little of that.
        assert overlaps.max() <= (own_loss if basis is None else 2.0**-11)
        assert overlaps.diagonal(1).max() <= neighbours


def test_half_precision_enters_in_second_order() -> None:
    """What float16 does to the Ritz value is near the square of its rounding, 2^-22, and not 2^-11."""
    errors = []
    for seed in range(5):
        matrix = with_spectrum(seed, [100.0, *np.linspace(0.5, 1.0, 29)], 40, 30)[None]
        options = {"seed": seed, "rtol": 0.0, "max_iterations": 25}
        own, half = (solve(matrix, basis_dtype=basis, **options) for basis in (OWN, HALF))
        errors.append(abs(float(half.sigma / own.sigma) - 1))
    assert max(errors) <= 2.0**-22


@pytest.mark.parametrize("size", [10, 2**12, 2**26, 2**38])
def test_entries_of_half_precision_keep_their_digits_in_any_dimension(size: int) -> None:
    """Those of a unit vector in 2^38 dimensions are near 2^-19: float16 itself lost half its digits."""
    own, some = torch.float64, gaussian(0, 1, 1000)
    row = some / some.norm() * math.sqrt(1000 / size)
    basis = Basis(size, HALF, own)
    basis.append(row)
    kept, first = torch.empty(1, 1000, dtype=own), np.zeros(1, dtype=np.int64)
    basis.combine(first, np.ones((1, 1)), kept, first)
    assert float((kept - some / some.norm()).norm()) <= 2.0**-11
    corner = Basis(size, HALF, own)
    corner.append(torch.eye(1, 1000, dtype=own))
    corner.combine(first, np.ones((1, 1)), kept, first)
    assert float(kept[0, 0]) == 1.0


@pytest.mark.parametrize("size", [300, 3 * PIECE // 2])
@BASES
def test_members_together_are_those_one_by_one(
    size: int, basis: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other devices than a processor take them; one of three needs a second projection, one is zero."""
    rows = torch.stack([gaussian(k, 3, size).float() for k in range(5)])
    rows = torch.linalg.qr(rows.permute(1, 2, 0))[0].permute(2, 0, 1).contiguous()  # (step, member, size)
    start = gaussian(9, 3, size).float()
    start[1] = rows[2, 1] + 1e-3 * start[1]
    start[2] = 0.0

    def left() -> tuple[Tensor, Tensor]:
        kept = Basis(size, basis or torch.float32, torch.float32)
        for row in rows:
            kept.append(row)
        z = start.clone()
        return z, kept.orthogonalise_(z, [rows[4], rows[3]])

    alone, lengths = left()
    monkeypatch.setattr(Basis, "_together", lambda self, z: [slice(0, len(z))])
    together, same = left()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(same, lengths, rtol=1e-5, atol=1e-7)
    digits = 2.0**-10 if basis == HALF else 1e-5
    overlaps = torch.einsum("kmp,mp->km", rows.double(), together.double())
    assert (overlaps.abs() <= digits * same.clamp_min(1e-30)).all()
    assert float(same[2]) == 0.0


@BASES
def test_many_maps_are_those_few_at_a_time(
    basis: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end at different steps; some thirty at the first of them, which are then written together."""
    leading = [5.0 if i < 35 else 1.0 + 0.05 * (i - 34) for i in range(50)]
    values = torch.tensor([[top, *np.linspace(1.0, 0.1, 40)] for top in leading], dtype=torch.float64)
    maps = values[..., None] * torch.linalg.qr(gaussian(3, 50, 600, 41)).Q.mT
    operator, start = Dense(maps), gaussian(7, 50, 600)
    options = {"rtol": 1e-3, "confidence": 0.999, "max_iterations": 40, "basis_dtype": basis}
    many = lanczos(operator, start, **options)
    monkeypatch.setattr("howsmooth.spectral.krylov_basis._MANY", 1000)
    few = lanczos(operator, start, **options)
    assert len(set(many.steps.tolist())) > 3
    assert bool(many.converged.all())
    assert many.steps.tolist() == few.steps.tolist()
    digits = 1e-11 if basis is None else 1e-3
    for name in ("sigma", "lower", "upper", "right", "left"):
        torch.testing.assert_close(getattr(many, name), getattr(few, name), rtol=digits, atol=digits)
    assert (many.lower * (1 - 1e-12) <= values[:, 0]).all()
    assert (values[:, 0] <= many.upper).all()


@pytest.mark.parametrize(("allowed", "steps"), [(2, [2, 2]), (8, [3, 8])])
def test_members_of_fewer_dimensions_than_their_operator(allowed: int, steps: list[int]) -> None:
    """Each has the quantile of its own dimension, and ends where its own space does, with no chance left."""
    values = [1.0, *np.linspace(0.999, 0.5, 11)]
    small, large = with_spectrum(0, [2.0, 1.9, 1.8], 14, 3), with_spectrum(1, values, 14, 12)
    whole, start = torch.zeros(2, 14, 12, dtype=torch.float64), gaussian(2, 2, 12)
    whole[0, :, :3], whole[1] = small, large
    start[0, 3:] = 0.0
    options = {"rtol": 0.0, "confidence": 0.999, "max_iterations": allowed}

    def products(operators: list[Dense], vectors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [op.energy_product(v) for op, v in zip(operators, vectors, strict=True)]

    (found,) = lanczos_together([Dense(whole)], [start], products=products, sizes=[[3, 12]], **options)
    alone = [
        lanczos(Dense(small[None]), start[:1, :3], **options),
        lanczos(Dense(large[None]), start[1:], **options),
    ]
    assert found.steps.tolist() == steps
    assert found.broke_down.tolist() == [steps[0] == 3, False]
    for i, one in enumerate(alone):
        for name in ("sigma", "lower", "upper"):
            torch.testing.assert_close(getattr(found, name)[i], getattr(one, name)[0], rtol=1e-14, atol=0)
    assert not found.right[0, 3:].any()


def test_a_full_basis_stops_with_an_honest_interval() -> None:
    values = [1.0 - 1e-3 * i for i in range(300)]
    matrix = with_spectrum(0, values, 300, 300)[None]
    for basis, size in ((HALF, 2), (torch.float32, 4), (torch.float64, 8)):
        found = solve(matrix, basis_dtype=basis, basis_bytes=10 * 300 * size + 7, rtol=1e-6)
        assert int(found.steps) == 10
        assert not bool(found.converged)
        assert not bool(found.broke_down)
        assert float(found.lower) <= 1.0 <= float(found.upper)


def test_the_basis_is_in_half_precision_where_64_vectors_do_not_fit() -> None:
    """Told by the steps that are made when the memory ends; a tight tolerance takes float32."""
    matrix = with_spectrum(0, [1.0 - 1e-4 * i for i in range(300)], 300, 300)[None]
    roomy, tight, small = 64 * 300 * 8, 64 * 300 * 8 - 1, 15 * 300 * 8
    assert int(solve(matrix, basis_bytes=roomy, rtol=2e-5).steps) == 64
    assert int(solve(matrix, basis_bytes=small, rtol=2e-5).steps) == 60
    assert int(solve(matrix, basis_bytes=small, rtol=1.9e-5).steps) == 30
    assert 64 < int(solve(matrix, basis_bytes=tight, rtol=1e-9).steps) <= tight // 1200


def test_a_small_basis_reaches_a_tight_tolerance() -> None:
    """In float32 beside float64 products, whose error in second order is below theirs."""
    matrix = with_spectrum(0, [1.0, *np.linspace(0.9, 0, 199)], 200, 200)[None]
    found = solve(matrix, basis_bytes=40 * 200 * 4, rtol=1e-10)
    assert bool(found.converged)
    assert int(found.steps) <= 40
    assert float(found.sigma) == pytest.approx(1.0, rel=1e-12)
    assert float(found.lower) <= 1.0 <= float(found.upper)


def test_peak_memory_is_five_vectors_and_half_a_vector_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's allocator counts it: a second basis, or one in float32, would be two vectors more."""
    monkeypatch.setitem(basis_module._BLOCK_BYTES, "cpu", 1)  # every row of the basis by itself
    n, steps = 1 << 20, 4
    operator, start = Diagonal(torch.linspace(0.9, 1.0, n)), torch.ones(1, n)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        lanczos(operator, start, max_iterations=steps, rtol=0.0, confidence=0.9, basis_dtype=HALF)
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    # Five, and what is cut off a vector to work on it.
    assert 4.5 < alive.max() / (4 * n) - steps / 2 <= 5.5


def test_bases_that_are_none_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"basis_bytes: expected room for two vectors, 1200 bytes, got 1199"
    ):
        solve(torch.eye(300, dtype=torch.float64)[None], basis_bytes=1199, rtol=1e-4)
    with pytest.raises(ArgumentError, match=r"basis_dtype: expected torch\.float64, float32 or"):
        solve(torch.eye(3, dtype=torch.float64)[None], basis_dtype=torch.bfloat16)


# ---- the run


def test_a_step_is_one_product_with_the_gram_matrix() -> None:
    operator = Recording(with_spectrum(0, [1.0 - 0.01 * i for i in range(60)], 60, 60)[None])
    found = lanczos(operator, gaussian(0, 1, 60), rtol=1e-6, confidence=0.9, max_iterations=100)
    assert operator.adjoints == int(found.steps)
    assert operator.products == int(found.steps) + 1  # the left direction


@BASES
def test_members_stop_by_themselves_and_do_not_depend_on_the_batch(basis: torch.dtype | None) -> None:
    easy = with_spectrum(0, [10.0, 0.1, 0.01], 30, 20)
    hard = with_spectrum(2, [1.0 - 1e-3 * i for i in range(20)], 30, 20)
    small = 1e-20 * with_spectrum(4, [1.0, 0.9, 0.5, 0.2, 0.1], 30, 20)
    zero = torch.zeros(30, 20, dtype=torch.float64)
    # The one that runs longest stands last, so that dropping the others moves it.
    batch = torch.stack((easy, zero, small, hard))
    start = gaussian(0, 4, 20)
    options = {"rtol": 1e-6, "confidence": 0.999, "max_iterations": 200, "basis_dtype": basis}
    together = lanczos(Dense(batch), start, **options)
    assert len(set(together.steps.tolist())) >= 3
    for i in range(4):
        alone = lanczos(Dense(batch[i : i + 1]), start[i : i + 1], **options)
        assert int(alone.steps) == int(together.steps[i])
        for name in ("sigma", "lower", "upper", "right", "left"):
            torch.testing.assert_close(
                getattr(alone, name)[0], getattr(together, name)[i], rtol=1e-9, atol=1e-9
            )


@BASES
def test_float32_in_large_dimensions(basis: torch.dtype | None) -> None:
    """Lengths and projections summed in float32 were wrong by 1e-4, and the lower limit above the norm."""
    n = 4_000_000
    generator = torch.Generator().manual_seed(0)
    values, start = torch.rand(n, generator=generator) / 2, torch.randn(1, n, generator=generator)
    values[0] = 1.0
    options = {"rtol": 0.0, "confidence": 0.999, "max_iterations": 10}
    found = lanczos(Diagonal(values), start, basis_dtype=basis, **options)
    # In units u = 2^-24 of float32: |v|² is one to 4 u (the factor 1/|z| and its products are rounded), and
    # the three roundings of z act like a change of JᵀJ by 3 u. Half of that is left in the root, 3.5 u.
    assert float(found.sigma) == pytest.approx(1.0, abs=3.5 * 2.0**-24)
    assert float(found.lower) <= 1.0 <= float(found.upper)


def test_long_sums_weights_in_memory() -> None:
    """Against float64, where one float32 sum is wrong in the fourth digit."""
    x = torch.full((1, 10**7 + 3), 0.1)
    assert float(squared_lengths(x)) == pytest.approx(x.shape[1] * float(x[0, 0]) ** 2, rel=1e-12)
    assert float(torch.linalg.vector_norm(x)) != pytest.approx(math.sqrt(squared_lengths(x)), rel=1e-5)


def test_products_that_are_not_finite_are_refused() -> None:
    matrix = torch.ones(1, 3, 3, dtype=torch.float64)
    matrix[0, 1, 1] = math.inf
    with pytest.raises(NonFiniteError, match="finite Jacobian products"):
        solve(matrix)
    no_digit = Diagonal(torch.ones(3))
    no_digit.rounding = torch.full((1,), 0.2, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="keep a digit"):
        lanczos(no_digit, torch.ones(1, 3), rtol=1e-4, confidence=0.9, max_iterations=5)


def test_operators_made_of_others_pass_the_gram_product_on() -> None:
    class OnePass(Dense):
        def _adjoint_product(self, u: Tensor) -> Tensor:
            raise AssertionError("two products where one pass was offered")

        def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
            image = self._product(e)
            return image, torch.einsum("boi,bo->bi", self.matrices, image)

    matrices = gaussian(0, 3, 5, 4)
    e = gaussian(1, 2, 4)
    chosen = matrices[[2, 0]]
    image = torch.einsum("boi,bi->bo", chosen, e)
    back = torch.einsum("boi,bo->bi", chosen, image)
    subset = Subset(OnePass(matrices), torch.tensor([2, 0]))
    one, two = subset.gram_product(e)
    torch.testing.assert_close(one, image)
    torch.testing.assert_close(two, back)


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
