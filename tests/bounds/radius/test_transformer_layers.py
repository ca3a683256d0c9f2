"""Values and derivatives of the stages, against torch.func."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from mpmath import iv
from torch import Tensor

from howsmooth.bounds.radius import ACTIVATIONS, Stage
from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from tests.bounds.radius._networks import decoder, normal, post_norm, pre_norm

STAGES = [
    pytest.param(stage, state, id=f"{name} {stage.name}")
    for name, (network, x) in (("post", post_norm(0)), ("pre", pre_norm(1)), ("rotary", decoder(2)))
    for stage, state in zip(network.stages, network.states(x), strict=False)
]


@pytest.mark.parametrize(("stage", "state"), STAGES)
def test_derivatives_are_those_of_autodiff(stage: Stage, state: Tensor) -> None:
    g = torch.Generator().manual_seed(3)
    pairs = Pairs(3)
    tangents, adjoint = normal(g, *state.shape, 3), normal(g, *stage.value(state).shape)
    jacobian = torch.func.jacrev(stage.value)(state)
    close = {"rtol": 1e-10, "atol": 1e-11}
    pushed = torch.einsum("iojd,jdk->iok", jacobian, tangents)
    torch.testing.assert_close(stage.push(state, tangents), pushed, **close)
    pulled = torch.einsum("iojd,io->jd", jacobian, adjoint)
    torch.testing.assert_close(stage.pull(state, adjoint[..., None])[..., 0], pulled, **close)
    hessian = torch.func.hessian(lambda u: (adjoint * stage.value(u)).sum())(state)
    bent = torch.einsum("iojd,jdk->iok", hessian, tangents)
    torch.testing.assert_close(stage.curvature(state, adjoint, tangents), bent, **close)
    second = torch.func.jacfwd(torch.func.jacfwd(lambda d: stage.value(state + tangents @ d)))
    own = stage.output_adjoint(state, second(torch.zeros(3, dtype=state.dtype)))
    torch.testing.assert_close(pairs.matrices(stage.second(state, tangents, pairs)), own, **close)


def test_pairs_keep_inner_products_and_values() -> None:
    g = torch.Generator().manual_seed(0)
    pairs, delta = Pairs(5), normal(g, 5)
    left, right = normal(g, 5), normal(g, 5)
    square = pairs.square(delta)
    assert float(square @ square) == pytest.approx(float(delta @ delta) ** 2, rel=1e-13)
    product = pairs.product(left, right)
    assert float(product @ square) == pytest.approx(float((left @ delta) * (right @ delta)), rel=1e-12)
    torch.testing.assert_close(pairs.packed(pairs.matrices(product)), product)
    torch.testing.assert_close(pairs.square(left), pairs.product(left, left))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_the_stated_derivatives_and_suprema(name: str) -> None:
    activation = ACTIVATIONS[name]
    z = torch.linspace(-6, 6, 97, dtype=torch.float64)
    width = torch.rand(97, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    suprema = dict(enumerate(activation.largest, start=3))
    stated = activation.derivatives
    for order, function in enumerate(stated, start=1):

        def slope(z: Tensor, function: Callable[[Tensor], Tensor] = function) -> Tensor:
            return torch.func.jvp(function, (z,), (torch.ones_like(z),))[1]

        if order < len(stated):
            torch.testing.assert_close(stated[order](z), slope(z), rtol=1e-9, atol=1e-12)
        if order in suprema:
            seen = slope(z + torch.linspace(-1, 1, 81).double()[:, None] * width).abs().amax(0)
            bound = suprema[order](z, width)
            assert bool((bound >= seen * (1 - 1e-12)).all())
            assert bool((bound <= seen * 1.01 + 1e-3).all())


@pytest.mark.parametrize("name", [name for name, known in ACTIVATIONS.items() if not known.kink])
def test_rests_of_taylor_polynomials_are_bounded_and_nearly_attained(name: str) -> None:
    activation = ACTIVATIONS[name]
    z = torch.linspace(-4, 4, 33, dtype=torch.float64)
    t = torch.linspace(-1, 1, 801, dtype=torch.float64)[:, None]
    for width in (0.2, 1.0, 4.0):
        found, change = activation.rests(z, torch.full_like(z, width)), width * t
        rest = activation.derivatives[0](z + change) - activation.derivatives[0](z)
        for degree in range(1, 5):
            term = change**degree / math.factorial(degree) * activation.derivatives[degree](z)
            rest, noise = rest - term, 1e-14 * (1 + width**degree)
            size = (rest.abs() - noise).clamp_min(0)
            by_square = size / change.square().clamp_min(1e-300)
            for bounds, reached, slack in ((found.size, size, 1.1), (found.relative, by_square, 1.8)):
                bound, largest = bounds[degree - 1], reached.amax(0)
                assert bool((bound >= largest).all())
                assert bool((bound <= slack * largest + 0.06 * float(largest.max()) + 1e-9).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("order", [4, 5, 6])
def test_the_derivatives_have_no_other_zeros(name: str, order: int) -> None:
    """Interval arithmetic: each interval without a stated zero has none, each with one has no second."""
    iv.dps = 30
    slope = iv.mpf(1) / 2 if name == "silu" else iv.sqrt(2 / iv.pi)
    cubic = iv.mpf(0) if name == "silu" else slope * iv.mpf("0.044715")
    largest = ACTIVATIONS[name].largest[order - 4]
    zeros = [z for z in largest.__closure__[0].cell_contents if z >= 0]  # type: ignore[attr-defined]

    def scaled(z, order: int, y=None):
        """Return the derivative, divided by the factorial, by 1 − y² and by ½."""
        g = slope * z + cubic * z**3
        slopes = [slope + 3 * cubic * z**2, 3 * cubic * z, cubic]
        y = 1 - 2 / (iv.exp(2 * g) + 1) if y is None else y
        rest, Y = [iv.mpf(1)], [iv.mpf(0)]
        for m in range(order):
            Y.append(sum(rest[m - j] * (j + 1) * slopes[j] for j in range(min(3, m + 1))) / (m + 1))
            inner = sum((Y[i] * Y[m + 1 - i] for i in range(1, m + 1)), iv.mpf(0))
            rest.append(-2 * y * Y[m + 1] - (1 - y**2) * inner)
        return Y[order], Y[order - 1]

    def value(z, order: int):
        own, before = scaled(z, order)
        return z * own + before

    left, found = [(0.0, 12.0)], 0
    while left:
        low, high = left.pop()
        z = iv.mpf([low, high])
        if 0 not in value(z, order):
            continue
        inside = [one for one in zeros if low <= one <= high]
        # φ⁽ᵏ⁺¹⁾ without a zero: φ⁽ᵏ⁾ is monotone here.
        if high - low < 0.1 and 0 not in value(z, order + 1) and inside:
            found += 1
            continue
        assert high - low > 1e-6, (low, high)
        middle = (low + high) / 2 if not inside else _beside(low, high, inside)
        left += [(low, middle), (middle, high)]
    assert found >= len(zeros) - (0.0 in zeros)
    if name == "silu":
        own, before = scaled(iv.mpf(0), order, y=iv.mpf([1 - 2e-5, 1]))
        assert 0 not in own + before * iv.mpf([0, 1 / 12])


def _beside(low: float, high: float, zeros: list[float]) -> float:
    """Return a point that halves an interval nearly, but not at a zero."""
    middle = (low + high) / 2
    return middle if all(abs(middle - z) > 1e-3 * (high - low) for z in zeros) else middle + (high - low) / 64
