"""What rounding does is inside the interval: against many digits at the edges, and errors made on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from mpmath import mpf
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import NonFiniteError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.closed_form import _Form, _linearise
from howsmooth.jacobian.fixed_measure_derivative import frozen_derivatives
from howsmooth.jacobian.projections import projections
from howsmooth.jacobian.rounding_bounds import image_off
from howsmooth.rounding import MatrixNorms
from howsmooth.spectral import LinearOperator, lanczos
from howsmooth.spectral.krylov_basis import Basis
from howsmooth.spectral.operator import ProductError
from howsmooth.spectral.probabilistic_upper_limits import start_quantile
from tests._cases import CASES, D, dense_jacobian, tokens
from tests._edges import KINDS, exact_constant, look
from tests._operators import to_dense
from tests._selection import others_slow

STREAMED = 1 << 14  # bytes, too few to keep probabilities


@pytest.mark.parametrize("inputs", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__.strip("_") for kind in KINDS])
def test_no_interval_misses_at_the_edges(kind: int, inputs: int) -> None:
    found = [look(seed) for seed in range(kind, inputs * len(KINDS), len(KINDS))]
    assert [f for f in found if f.miss > 0] == []
    assert any(f.status == "converged" for f in found)


def _matrices(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 3, 3, generator=generator, dtype=torch.float64)
    return q, k, v


def _agrees(f: TokenMap, x: Tensor, truth: mpf, *, memory: int | None = None) -> None:
    found = hs.local_lipschitz(f, x, rtol=1e-6, memory=memory)
    assert bool(found.converged)
    assert float(found.lower) <= truth <= float(found.upper)
    assert abs(float(found.value) - truth) <= 1e-13 * truth


@pytest.mark.parametrize("memory", [None, STREAMED], ids=["kept", "streamed"])
@pytest.mark.parametrize("sink", [-100.0, 0.0, 30.0, 40.0, 50.0, 100.0])
def test_a_sink_that_takes_nearly_all_of_a_row_costs_no_digits(sink: float, memory: int | None) -> None:
    f = hs.SelfAttention(*_matrices(), sinks=torch.tensor([sink], dtype=torch.float64))
    x = tokens(0, 2, 3)
    _agrees(f, x, exact_constant(f, x), memory=memory)


@pytest.mark.parametrize("memory", [None, STREAMED], ids=["kept", "streamed"])
@pytest.mark.parametrize("size", [1e-12, 1e-16, 1e-150])
def test_a_value_bias_costs_no_digits(size: float, memory: int | None) -> None:
    q, k, v = _matrices()
    f = hs.SelfAttention(q, k, size * v, value_bias=torch.ones(1, 3, dtype=torch.float64))
    x = tokens(0, 4, 3)
    _agrees(f, x, exact_constant(hs.SelfAttention(q, k, size * v), x, 400), memory=memory)


def test_a_value_bias_costs_the_frozen_derivative_no_digits() -> None:
    q, k, v = _matrices()
    x, weighting = tokens(0, 4, 3), Weighting(torch.full((4,), -math.log(4)).double())
    plain, biased = (
        torch.cat(list(frozen_derivatives(hs.SelfAttention(q, k, 1e-14 * v, value_bias=b), x, weighting)))
        for b in (None, torch.ones(1, 3, dtype=torch.float64))
    )
    torch.testing.assert_close(biased, plain, rtol=1e-12, atol=0)


def test_a_kink_has_no_constant() -> None:
    clip, directions = hs.nn.ClipTokens(2.0), tokens(4, 5, 6)
    at_the_radius = 2.0 * directions / directions.norm(dim=-1, keepdim=True)
    with pytest.raises(NonFiniteError, match="has a kink at these tokens"):
        hs.local_lipschitz(clip, at_the_radius, batch_dims=0)
    found = hs.local_lipschitz(clip, 0.99 * at_the_radius, batch_dims=0)
    assert float(found.value) == pytest.approx(1.0)


def test_values_that_are_zero_give_zero() -> None:
    q, k, v = _matrices()
    f = hs.SelfAttention(q, k, 0 * v, value_bias=torch.ones(1, 3, dtype=torch.float64))
    found = hs.local_lipschitz(f, tokens(0, 4, 3))
    assert bool(found.converged)
    assert float(found.lower) == float(found.value) == float(found.upper) == 0.0


@pytest.mark.parametrize("name", CASES)
def test_what_is_proved_of_a_jacobian_holds_its_errors(name: str) -> None:
    f, x = CASES[name](4), tokens(50, 1, 4, D)
    at = closed_form_jacobian(f, x)
    proved = at.proved
    assert proved is not None
    dense = dense_jacobian(f, x[0])
    off = torch.linalg.matrix_norm(to_dense(at)[0] - dense, 2)
    norm = torch.linalg.matrix_norm(dense, 2)
    # The oracle rounds as well, by a few units.
    assert float(off) <= float(proved.total) + 1e-14 * float(norm)
    assert float(norm) <= float(proved.size)
    assert float(proved.total) <= 1e-8 * float(norm)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", others_slow(range(3), [0]))
def test_tokens_that_are_off_move_jacobian_and_image_by_no_more_than_is_said(name: str, seed: int) -> None:
    f, x = CASES[name](4), tokens(60 + seed, 1, 4, D)
    moved = x + 1e-7 * tokens(70 + seed, 1, 4, D)
    off = (moved - x).norm(dim=-1)
    (at,) = _linearise(f, moved, off, _Form(projections([torch.float64], 4)))
    proved = at.proved
    assert proved is not None
    change = torch.linalg.matrix_norm(dense_jacobian(f, moved[0]) - dense_jacobian(f, x[0]), 2)
    assert float(change) <= float(proved.model)
    assert bool(((f(moved) - f(x)).norm(dim=-1) <= image_off(f, moved, off, MatrixNorms())).all())
    # A layer scale has no second derivative.
    assert float(proved.model) <= 1e5 * float(change) or float(change) == 0.0


class Adversary(LinearOperator):
    """A diagonal J whose products lose along the leading direction whatever their rounding may take."""

    def __init__(self, values: Tensor, loss: float, stated: float) -> None:
        size = len(values)
        of = torch.tensor([stated], dtype=torch.float64)
        proved = ProductError(torch.zeros_like(of), of, values.amax()[None])
        super().__init__(1, (size,), (size,), values.dtype, values.device, proved=proved)
        self.values = values
        self.loss = loss

    def _product(self, e: Tensor) -> Tensor:
        out, most = self.values * e, self.loss * float(e.norm())
        out[:, 0] -= out[:, 0].clamp(-most, most)
        return out

    _adjoint_product = _product


@pytest.mark.parametrize(("second", "unit"), [(0.9, 1.0), (0.999, 1.0), (0.5, 2.0**-300), (0.5, 2.0**300)])
def test_the_limit_holds_for_products_that_hide_the_leading_direction(second: float, unit: float) -> None:
    """Also of maps whose squares of squares are out of range."""
    size = 60
    values = torch.cat((torch.ones(1), second * torch.linspace(1, 0, size - 1))).double() * unit
    loss = 1.001 * math.sqrt(start_quantile(size, 0.999)) * unit
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, size, generator=generator, dtype=torch.float64)
    # As little along the leading direction as the event leaves.
    start[0, 0] = math.sqrt(start_quantile(size, 0.999)) * start[0, 1:].norm()
    found = [
        lanczos(Adversary(values, loss, stated), start, rtol=1e-8, confidence=0.999, max_iterations=40)
        for stated in (loss, 0.0)
    ]
    assert float(found[0].lower) <= unit <= float(found[0].upper) < 3 * unit
    assert float(found[0].sigma) <= (second + 1e-6) * unit
    # Were nothing said of what products lose, the interval would be wrong.
    assert float(found[1].upper) < unit


@pytest.mark.parametrize("off", [1e-8, 1e-11])
def test_heads_that_cancel_at_a_measure(off: float) -> None:
    q, k, v = _matrices(1)
    twice = [torch.cat((t, t)) for t in (k, v)]
    output = torch.cat((torch.eye(3), -torch.eye(3)), dim=1).double()
    f, x = hs.SelfAttention(torch.cat((q, (1 + off) * q)), *twice, output), tokens(3, 4, 3)
    found = hs.local_lipschitz(f, hs.measures.DiscreteMeasure(x), rtol=1e-2)
    # Weights that are equal change nothing.
    truth = exact_constant(f, x)
    assert float(found.lower) <= truth <= float(found.upper)
    assert abs(float(found.value) - truth) > 1e-12 * truth


@pytest.mark.parametrize("seed", others_slow(range(5), [0, 1]))
def test_float32_has_a_proved_lower_limit(seed: int) -> None:
    f = CASES["multi-head"](5).to(dtype=torch.float32)
    x = tokens(seed, 5, D, dtype=torch.float32)
    found = hs.local_lipschitz(f, x, rtol=1e-3, seed=seed)
    truth = exact_constant(f, x)
    assert float(found.lower) <= truth <= float(found.upper)
    assert abs(float(found.value) - float(found.lower)) <= 1e-9 * float(truth)


def test_what_reorthogonalisation_takes_is_measured() -> None:
    size = 40
    basis = Basis(size, torch.float64, torch.float64)
    basis.taken = torch.zeros(2, dtype=torch.float64)
    rows = torch.linalg.qr(tokens(0, 2, size, 3))[0].mT
    for row in rows.unbind(1):
        basis.append(row)
    z = tokens(1, 2, size)
    before = z.clone()
    basis.orthogonalise_(z, [])
    moved = (before - z).square().sum(dim=1)
    assert bool((basis.taken >= moved).all())
    assert bool((basis.taken <= 6 * moved).all())
