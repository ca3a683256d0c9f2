"""Growth of perturbations along a flow, against dense derivatives of the whole flow and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor
from torchdiffeq import odeint

import howsmooth as hs
from howsmooth.dynamics import Layers, Rescaled, Sphere, flow, growth
from howsmooth.dynamics.flow_equations import Tokens
from howsmooth.dynamics.integrate import Integration
from howsmooth.dynamics.linearised_flow import LinearisedFlow
from howsmooth.dynamics.velocity_fields import as_field
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure, Gaussian
from howsmooth.spectral import LinearOperator
from tests._cases import CASES, D, dense_jacobian, random_attention, tokens
from tests._operators import to_dense
from tests.jacobian.test_weighted import Unknown

ORDERS = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}

QUICK = {"estimate_error": False, "rtol": 1e-8}


def small(seed: int, **keywords: object) -> hs.SelfAttention:
    return random_attention(seed, heads=1, key_dim=2, value_dim=3, d=3, d_out=3, **keywords)


def discrete_flow(
    f: Callable[[Tensor], Tensor], method: str, step: float, end: float
) -> Callable[[Tensor], Tensor]:
    """Return the flow map of torchdiffeq's method."""
    times = torch.tensor([0.0, end], dtype=torch.float64)

    def phi(x: Tensor) -> Tensor:
        return odeint(lambda t, y: f(y), x, times, method=method, options={"step_size": step})[-1]

    return phi


def linearised(
    field: object, x: Tensor, times: list[float], method: str, step: float, kept: int = 0
) -> LinearisedFlow:
    plan = Integration(method, step, 0.0, 0.0, 1000)
    return LinearisedFlow(Tokens(as_field(field), x), times, plan, kept)


def adjoint_dense(operator: LinearOperator) -> Tensor:
    units = torch.eye(operator.out_size, dtype=torch.float64).view(-1, 1, *operator.out_shape)
    return torch.stack([operator.adjoint_product(one).flatten() for one in units])


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def tangent(x: Tensor) -> Tensor:
    """Return the matrix of the projection on the tangent spaces of the spheres on which tokens lie."""
    unit = x / x.norm(dim=1, keepdim=True)
    blocks = torch.eye(x.shape[1], dtype=x.dtype) - unit[:, :, None] * unit[:, None, :]
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("method", ["midpoint", "rk4"])
def test_growth_is_the_norm_of_the_dense_derivative_of_the_whole_flow(method: str) -> None:
    f, x = small(1), tokens(0, 4, 3)
    found = growth(f, x, [0.0, 0.25, 0.75], method=method, step=0.25, **QUICK)
    for frame, end in ((1, 0.25), (2, 0.75)):
        phi = discrete_flow(f, method, 0.25, end)
        truth = norm(dense_jacobian(phi, x))
        assert float(found.lower[frame]) <= truth * (1 + 1e-12)
        assert truth <= float(found.upper[frame]) * (1 + 1e-12)
        assert float(found.upper[frame] - found.lower[frame]) <= 1e-8 * truth
        torch.testing.assert_close(found.states[frame], phi(x), rtol=1e-13, atol=1e-13)
        image = torch.func.jvp(phi, (x,), (found.input_direction[frame],))[1]
        torch.testing.assert_close(image, truth * found.output_direction[frame], rtol=0, atol=1e-4 * truth)
    assert float(found.value[0]) == float(found.product[0]) == float(found.exponential[0]) == 1.0
    assert bool(found.converged.all())
    assert found.remedy == ""


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("multi-head", "rk4"),
        ("pre-norm", "heun3"),
        ("post-norm", "midpoint"),
        ("causal grouped, hot", "heun2"),
        ("masked", "euler"),
    ],
)
def test_steps_and_chains_and_their_adjoints_are_the_dense_derivatives(name: str, method: str) -> None:
    f, x = CASES[name](2), tokens(1, 2, D)
    trajectory = linearised(f, x, [0.0, 0.2, 0.4], method, 0.2)
    one = dense_jacobian(discrete_flow(f, method, 0.2, 0.2), x)
    torch.testing.assert_close(to_dense(trajectory.step(0))[0], one, rtol=1e-11, atol=1e-11)
    both = dense_jacobian(discrete_flow(f, method, 0.2, 0.4), x)
    adjoint = adjoint_dense(trajectory.until(2, torch.zeros(1, dtype=torch.float64)))
    torch.testing.assert_close(adjoint, both, rtol=1e-11, atol=1e-11)


def on_sphere(x: Tensor, radius: float) -> Tensor:
    return radius * x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("method", ["rk4", "residual"])
def test_on_a_sphere_the_growth_is_that_of_perturbations_along_it(method: str) -> None:
    f, radius, h = small(2), 1.7, 0.25
    x = on_sphere(tokens(2, 3, 3), radius)

    def projected(y: Tensor) -> Tensor:
        v = f(y)
        return v - (v * y).sum(-1, keepdim=True) / (y * y).sum(-1, keepdim=True) * y

    def step(y: Tensor) -> Tensor:
        if method == "residual":
            return on_sphere(y + h * f(y), radius)
        return on_sphere(discrete_flow(projected, "rk4", h, h)(y), radius)

    found = growth(Sphere(f, radius), x, [0.0, h, 2 * h], method=method, step=h, **QUICK)
    dense = dense_jacobian(lambda y: step(step(y)), x) @ tangent(x)
    assert float(found.value[2]) == pytest.approx(norm(dense), rel=1e-7)
    torch.testing.assert_close(found.states[2], step(step(x)), rtol=1e-13, atol=1e-13)
    for i, y in enumerate((x, step(x))):
        assert float(found.step_value[i]) == pytest.approx(
            norm(dense_jacobian(step, y) @ tangent(y)), rel=1e-7
        )
    one = linearised(Sphere(f, radius), x, [0.0, h], method, h).step(0)
    torch.testing.assert_close(adjoint_dense(one), to_dense(one)[0], rtol=1e-11, atol=1e-12)
    # Flowing with an output time after each step puts the tokens back after each step, too.
    torch.testing.assert_close(
        flow(Sphere(f, radius), x, [0.0, h, 2 * h], method=method, step=h).final, found.states[2]
    )
    if method == "residual":
        rate = h * norm(tangent(x) @ dense_jacobian(projected, x) @ tangent(x))
        assert float(found.step_rate[0]) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("field", ["map", "rescaled"])
def test_of_a_measure_the_growth_is_in_the_weighted_norm(field: str) -> None:
    f, x = small(3), tokens(3, 3, 3)
    weights = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)
    measure = DiscreteMeasure(x, weights)
    chosen = as_field(f if field == "map" else Rescaled(f))
    velocity = chosen.velocity(0.0, 0.5, measure.weighted_tokens()[1])
    times = torch.tensor([0.0, 0.5], dtype=torch.float64)

    def phi(y: Tensor) -> Tensor:
        return odeint(velocity, y, times, method="midpoint")[-1]

    found = growth(chosen, measure, [0.0, 0.5], method="midpoint", step=0.5, **QUICK)
    root = weights.sqrt().repeat_interleave(3)
    truth = norm(root[:, None] * dense_jacobian(phi, x) / root)
    assert float(found.value[1]) == pytest.approx(truth, rel=1e-7)


def test_maps_without_a_closed_form_are_differentiated_automatically() -> None:
    f, x = small(4), tokens(4, 3, 3)
    for start in (x, DiscreteMeasure(x, torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64))):
        ours, closed = (
            growth(field, start, [0.0, 0.5], method="midpoint", step=0.5, **QUICK)
            for field in (Unknown(f), f)
        )
        assert float(ours.value[1]) == pytest.approx(float(closed.value[1]), rel=1e-7)


def test_layers_in_sequence_and_as_residual_layers() -> None:
    first, second, x = small(5), small(6), tokens(5, 3, 3)
    layers = Layers([first, second], 1.0)
    found = growth(layers, x, [0.0, 1.0], step=0.25, **QUICK)

    def both(y: Tensor) -> Tensor:
        return discrete_flow(second, "rk4", 0.25, 0.5)(discrete_flow(first, "rk4", 0.25, 0.5)(y))

    assert float(found.value[1]) == pytest.approx(norm(dense_jacobian(both, x)), rel=1e-7)
    residual = growth(layers, x, [0.0, 1.0], method="residual", rtol=1e-8)

    def network(y: Tensor) -> Tensor:
        y = y + 0.5 * first(y)
        return y + 0.5 * second(y)

    assert float(residual.value[1]) == pytest.approx(norm(dense_jacobian(network, x)), rel=1e-7)
    assert residual.steps == 2
    assert residual.discretisation_error is None
    assert "not estimated" in repr(residual)


def test_a_linear_field_grows_as_the_matrix_exponential() -> None:
    m, x = tokens(6, 4, 4), tokens(7, 2, 4)
    found = growth(lambda t, y: y @ m.mT, x, [0.0, 0.5], step=0.125, rtol=1e-10)
    truth = norm(torch.linalg.matrix_exp(0.5 * m))
    assert found.discretisation_error is not None
    error = float(found.discretisation_error[1])
    assert 1e-7 < error < 1e-3
    assert abs(float(found.value[1]) - truth) == pytest.approx(error, rel=0.2)
    # ‖J‖ is constant along it, and the quadrature of a constant is exact.
    assert float(found.exponential[1]) == pytest.approx(math.exp(0.5 * norm(m)), rel=1e-3)


def test_a_field_that_depends_on_time_is_differentiated_at_the_time_of_each_stage() -> None:
    m, x = tokens(8, 3, 3), tokens(9, 2, 3)
    found = growth(lambda t, y: torch.cos(3 * t) * y @ m.mT, x, [0.0, 0.4], step=0.2, **QUICK)
    truth = norm(torch.linalg.matrix_exp(math.sin(1.2) / 3 * m))
    assert float(found.value[1]) == pytest.approx(truth, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "step"), [("euler", 1 / 16), ("midpoint", 1 / 8), ("rk4", 1 / 4)])
def test_the_error_of_the_growth_falls_at_the_rate_of_the_method_and_is_estimated(
    method: str, step: float
) -> None:
    f, x = small(7), tokens(10, 2, 3)
    truth = norm(dense_jacobian(discrete_flow(f, "rk4", 1 / 32, 1.0), x))
    coarse = growth(f, x, [0.0, 1.0], method=method, step=step, rtol=1e-9)
    error = abs(float(coarse.value[1]) - truth)
    assert coarse.discretisation_error is not None
    assert error == pytest.approx(float(coarse.discretisation_error[1]), rel=0.3)
    halved = growth(f, x, [0.0, 1.0], method=method, step=step / 2, **QUICK)
    assert math.log2(error / abs(float(halved.value[1]) - truth)) == pytest.approx(ORDERS[method], abs=0.3)


def test_the_growth_is_below_the_product_of_the_steps_constants() -> None:
    f, x = small(8, causal=True), tokens(11, 4, 3)
    found = growth(f, x, [0.0, 0.4, 0.8], step=0.2, rtol=1e-2, estimate_error=False)
    assert found.steps == 4
    assert (found.lower <= found.product).all()
    assert (found.product[1:] <= found.exponential[1:]).all()
    assert float(found.product[2]) == pytest.approx(float(found.step_upper.prod()), rel=1e-13)
    assert float(found.exponential[1]) == pytest.approx(float(found.step_rate[:2].sum().exp()), rel=1e-13)
    one = discrete_flow(f, "rk4", 0.2, 0.2)
    y = x
    for i in range(4):
        truth = norm(dense_jacobian(one, y))
        assert float(found.step_lower[i]) <= truth * (1 + 1e-12)
        assert truth <= float(found.step_upper[i]) * (1 + 1e-12)
        y = one(y)


def test_a_layer_is_a_residual_step_and_its_rate_the_local_constant() -> None:
    f, x = random_attention(7), tokens(12, 4, D)
    found = growth(f, x, [0.0, 0.5], method="residual", step=0.5, **QUICK)
    dense = dense_jacobian(lambda y: y + 0.5 * f(y), x)
    assert float(found.value[1]) == pytest.approx(norm(dense), rel=1e-7)
    local = float(hs.local_lipschitz(f, x).value)
    assert float(found.step_rate[0]) == pytest.approx(0.5 * local, rel=1e-3)


def test_the_constant_of_a_short_layer_is_one_plus_its_logarithmic_norm() -> None:
    f, x, h = small(12), tokens(17, 3, 3), 1e-4
    found = growth(f, x, [0.0, h], method="residual", step=h, rtol=1e-11, estimate_error=False)
    j = dense_jacobian(f, x)
    logarithmic = float(torch.linalg.eigvalsh((j + j.mT) / 2)[-1])
    assert (float(found.product[1]) - 1) / h == pytest.approx(logarithmic, rel=1e-2)
    assert logarithmic < 0.9 * norm(j)


def test_what_is_not_kept_is_made_anew_and_changes_nothing() -> None:
    f, x = random_attention(8), tokens(13, 4, D)
    settings = {"method": "euler", "step": 0.25, "estimate_error": False}
    kept, anew = (growth(f, x, [0.0, 0.5], kept_bytes=b, **settings) for b in (1 << 20, 0))
    assert torch.equal(kept.value, anew.value)
    # Two of the four steps fit: four stages, of three heads of 4 × 4 probabilities each.
    some = linearised(f, x, [0.0, 1.0], "rk4", 0.25, kept=2 * 4 * 3 * 16 * 8)
    assert [some.stages(i) is some.stages(i) for i in range(4)] == [True, True, False, False]


def test_a_run_that_is_cut_short_says_so_and_its_interval_holds() -> None:
    f, x = random_attention(9), tokens(14, 6, D)
    short = growth(f, x, [0.0, 0.5], step=0.5, rtol=1e-10, max_iterations=4, estimate_error=False)
    truth = norm(dense_jacobian(discrete_flow(f, "rk4", 0.5, 0.5), x))
    assert not bool(short.converged[1])
    assert "max_iterations" in short.remedy
    assert "NOT converged" in repr(short)
    assert float(short.lower[1]) <= truth <= float(short.upper[1])
    assert int(short.iterations[1]) == 4


def test_float32_is_measured_in_float64() -> None:
    f, x = small(10).to(dtype=torch.float32), tokens(15, 3, 3).float()
    y = on_sphere(x, 1.0)
    settings = {"method": "residual", "estimate_error": False}
    for field, start in ((f, x), (Layers([f], 1.0), x), (Sphere(f), y), (Rescaled(f), x)):
        single = growth(field, start, [0.0, 1.0], step=1.0, **settings)
        assert single.value.dtype == single.states.dtype == torch.float64
        if isinstance(field, Sphere):
            torch.testing.assert_close(single.states.norm(dim=-1), torch.ones(2, 3, dtype=torch.float64))
    double = growth(f.to(dtype=torch.float64), x.double(), [0.0, 1.0], step=1.0, **settings)
    assert float(growth(f, x, [0.0, 1.0], step=1.0, **settings).value[1]) == float(double.value[1])


def test_blow_up_is_reported_with_its_time() -> None:
    with pytest.raises(NonFiniteError, match=r"between t = 0\.\d+ and t = "):
        growth(lambda t, x: x**3, tokens(0, 2, 2).abs() + 0.5, [0.0, 1.0], step=0.01)


def test_what_a_sensitive_flow_makes_of_rounding_is_in_the_interval() -> None:
    """The logistic map, against 60 digits: after 30 steps a rounding of the start has grown 2^30 times."""
    start = 0.3
    found = growth(
        lambda t, x: 3 * x - 4 * x**2,
        torch.tensor([[start]], dtype=torch.float64),
        [0.0, 30.0],
        method="euler",
        step=1.0,
        **QUICK,
    )
    with mpmath.workdps(60):
        x, truth = mpmath.mpf(start), mpmath.mpf(1)
        for _ in range(30):
            x, truth = 4 * x * (1 - x), truth * (4 - 8 * x)
        value, lower, upper = (mpmath.mpf(float(t[1])) for t in (found.value, found.lower, found.upper))
        assert abs(value / abs(truth) - 1) > 1e-10  # far beyond what the products round
        assert lower <= abs(truth) <= upper


def test_rounding_of_products_adds_up_over_the_steps() -> None:
    """A linear flow, whose derivative does not feel where it starts."""
    found = growth(
        lambda t, x: 0.5 * x, tokens(17, 2, 2), [0.0, 1.0, 30.0], method="euler", step=1.0, **QUICK
    )
    one, all_steps = ((found.upper - found.lower) / found.value)[1:].tolist()
    assert all_steps >= 25 * one > 0


def test_a_time_at_which_rounding_leaves_no_digit_is_named() -> None:
    """Scores of about 1e18, which float64 holds to a hundred: who attends to whom is up to rounding."""
    f, x = small(11), 1e9 * tokens(16, 4, 3)
    with pytest.raises(NonFiniteError, match=r"t = 0\.5, where the growth may be wrong"):
        growth(f, x, [0.0, 0.5, 1.0], method="euler", step=0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "dopri5"}, "method"),
        ({"step": 0.0}, "step"),
        ({"step": None}, "step"),
        ({"times": [0.0]}, "times"),
        ({"times": [0.0, 0.0]}, "times"),
        ({"start": tokens(0, 2, 3, D)}, "start"),
        ({"start": [[1.0]]}, "start"),
        ({"start": Gaussian(torch.zeros(D).double(), torch.eye(D).double())}, "start"),
        ({"start": tokens(0, 3, D) * math.nan}, "start"),
        ({"start": tokens(0, 3, D + 1)}, "X"),
        ({"field": random_attention(0, d_out=4)}, "field"),
        ({"field": lambda t, x: x, "start": tokens(0, 3, D).float()}, "start"),
        ({"rtol": 1e-15}, "rtol"),
        ({"confidence": 1.0}, "confidence"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], named: str) -> None:
    arguments = {"field": random_attention(0), "start": tokens(0, 3, D), "times": [0.0, 1.0]}
    with pytest.raises(ArgumentError) as refused:
        growth(**({"step": 0.5} | arguments | changes))
    assert refused.value.argument == named
