"""Flows of tokens and discrete measures: against SciPy, closed forms and layers written naively."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import L2Attention, SinkhornAttention
from howsmooth.dynamics import Layers, Sphere, flow, log_interaction_energy, number_of_clusters
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure
from tests._cases import D, random_attention, tokens
from tests._forked import memory_added

FIXED = {"euler": 1, "residual": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}
ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")


def naive_attention(f: hs.SelfAttention, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Multi-head attention with biases, head by head and row by row."""
    n = len(x)
    weights = np.full(n, 1 / n) if weights is None else weights
    heads = []
    for h in range(f.heads):
        q, k, v = (
            x @ part[h].numpy().T + (0 if bias is None else bias[h].numpy())
            for part, bias in ((f.query, f.query_bias), (f.key, f.key_bias), (f.value, f.value_bias))
        )
        rows = []
        for i in range(n):
            seen = slice(0, i + 1) if f.causal else slice(None)
            scores = f.scale * k[seen] @ q[i]
            p = weights[seen] * np.exp(scores - scores.max())
            rows.append(p @ v[seen] / p.sum())
        heads.append(np.stack(rows))
    out = np.concatenate(heads, axis=1) @ f.output.numpy().T
    return out if f.output_bias is None else out + f.output_bias.numpy()


def scipy_flow(velocity: Callable[[np.ndarray], np.ndarray], x: Tensor, times: list[float]) -> np.ndarray:
    """Reference: SciPy's DOP853 at 1e-9."""
    solution = solve_ivp(
        lambda t, y: velocity(y.reshape(x.shape)).ravel(),
        (times[0], times[-1]),
        x.numpy().ravel(),
        method="DOP853",
        t_eval=times,
        rtol=1e-9,
        atol=1e-10,
    )
    return solution.y.T.reshape(len(times), *x.shape)


def plain_attention(t: Tensor, x: Tensor) -> Tensor:
    """Attention in one line, for what concerns integrators: maps of the library are slow under test."""
    return torch.softmax(x @ x.mT + 0.3 * x[:, :1], dim=-1) @ x.flip(-1)


def on_sphere(x: Tensor, radius: float = 1.0) -> Tensor:
    return radius * x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
def test_flow_of_tokens_is_that_of_scipy(causal: bool) -> None:
    f = random_attention(0, causal=causal)
    x, times = tokens(0, 5, D), [0.5, 0.7, 1.5]
    wanted = scipy_flow(lambda y: naive_attention(f, y), x, times)
    got = flow(f, x, times)
    assert got.status == "finished"
    assert got.times.tolist() == times
    assert np.abs(got.states.numpy() - wanted).max() < 1e-6


def test_flow_on_the_sphere_is_that_of_scipy_and_keeps_the_norms() -> None:
    f, radius = random_attention(1, temperature=2.0), 2.0
    x, times = on_sphere(tokens(1, 4, D), radius), [0.0, 0.5, 1.0]

    def velocity(y: np.ndarray) -> np.ndarray:
        v = naive_attention(f, y)
        return v - (v * y).sum(1, keepdims=True) * y / radius**2

    got = flow(Sphere(f, radius), x, times)
    assert np.abs(got.states.numpy() - scipy_flow(velocity, x, times)).max() < 1e-5
    assert float((got.states.norm(dim=-1) - radius).abs().max()) < 1e-14
    assert 0 < got.drift < 1e-6
    rough = flow(Sphere(f, radius), x, times, rtol=1e-3, atol=1e-3)
    assert rough.drift > 10 * got.drift
    assert float((rough.states.norm(dim=-1) - radius).abs().max()) < 1e-14
    assert flow(f, x, times).drift is None


def test_members_of_a_batch_flow_by_themselves() -> None:
    f, x = random_attention(2), tokens(2, 2, 4, D)
    together = flow(f, x, [0, 1], rtol=1e-5, atol=1e-5)
    fixed = flow(f, x, [0, 1], method="rk4", step=0.25)
    assert together.states.shape == fixed.states.shape == (2, 2, 4, D)
    for b in range(2):
        alone = flow(f, x[b], [0, 1], rtol=1e-5, atol=1e-5)
        assert float((together.final[b] - alone.final).abs().max()) < 1e-4
        alone = flow(f, x[b], [0, 1], method="rk4", step=0.25)
        assert float((fixed.final[b] - alone.final).abs().max()) < 1e-13


def test_equal_tokens_follow_the_matrix_exponential() -> None:
    f = random_attention(3, heads=1, biases=False)
    v = (f.output @ f.value[0]).numpy()
    x = tokens(3, 1, D)
    wanted = expm(1.3 * v) @ x[0].numpy()
    got = flow(f, x.expand(7, D).contiguous(), [0, 1.3], rtol=1e-6, atol=1e-6).final
    assert np.abs(got.numpy() - wanted).max() < 1e-4


# ---- layers


def test_residual_method_is_the_layers_themselves() -> None:
    f, x, h = random_attention(4), tokens(4, 5, D), 0.25
    wanted = [x]
    for _ in range(8):
        wanted.append(wanted[-1] + h * f(wanted[-1]))
    got = flow(f, x, [1.0, 1.5, 3.0], method="residual", step=h)
    assert torch.equal(got.states, torch.stack([wanted[0], wanted[2], wanted[8]]))
    assert got.evaluations == 9


def test_residual_method_on_the_sphere_is_layers_followed_by_the_norm() -> None:
    f, x, h = random_attention(5), on_sphere(tokens(5, 5, D)), 0.5
    wanted = x
    for _ in range(4):
        wanted = on_sphere(wanted + h * f(wanted))
    got = flow(Sphere(f), x, [0, 2], method="residual", step=h).final
    assert float((got - wanted).abs().max()) < 1e-14


def test_layers_in_sequence_are_a_residual_network() -> None:
    maps = [random_attention(seed) for seed in (6, 7, 8)]
    x = tokens(6, 5, D)
    wanted = x
    for f in maps:
        wanted = wanted + f(wanted)
    got = flow(Layers(maps), x, [0, 1, 3], method="residual")
    assert torch.equal(got.states[1], x + maps[0](x))
    assert torch.equal(got.final, wanted)
    shorter = flow(Layers(maps, total_time=1.5), x, [0, 1.5], method="residual").final
    wanted = x
    for f in maps:
        wanted = wanted + 0.5 * f(wanted)
    assert float((shorter - wanted).abs().max()) < 1e-14


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_integrators_stop_where_layers_change(method: str) -> None:
    maps = [random_attention(seed) for seed in (9, 10)]
    x = tokens(9, 5, D)
    accuracy: dict[str, object] = {"step": 0.15} if method == "rk4" else {"rtol": 1e-5, "atol": 1e-5}
    keywords = {"method": method, **accuracy}
    middle = flow(maps[0], x, [0, 0.45], **keywords).final
    wanted = flow(maps[1], middle, [0.45, 0.9], **keywords).final
    got = flow(Layers(maps, total_time=0.9), x, [0, 0.15, 0.9], **keywords).final
    assert float((got - wanted).abs().max()) < 1e-4
    first = flow(maps[0], x, [0, 0.9], **keywords).final
    assert float((got - first).abs().max()) > 1e-2


# ---- convergence


def slope(steps: list[float], errors: list[float]) -> float:
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


@pytest.mark.parametrize("sphere", [False, True])
def test_order_of_convergence_in_the_step(sphere: bool) -> None:
    f, x = plain_attention, tokens(11, 4, 3)
    field, x = (Sphere(f), on_sphere(x)) if sphere else (f, x)
    exact = flow(field, x, [0, 0.5], method="dopri8", rtol=1e-11, atol=1e-11).final
    for method, order in FIXED.items():
        steps = [0.5 / count for count in ((8, 16, 32) if order < 4 else (4, 8, 16))]
        errors = [
            float((flow(field, x, [0, 0.5], method=method, step=h).final - exact).norm()) for h in steps
        ]
        assert abs(slope(steps, errors) - order) < 0.1, (method, errors)


@pytest.mark.parametrize("method", [*FIXED, *ADAPTIVE])
def test_estimated_error_is_near_the_true_one(method: str) -> None:
    f, x = plain_attention, tokens(12, 4, 3)
    exact = flow(f, x, [0, 0.48], method="dopri8", rtol=1e-11, atol=1e-11).final
    keywords = {"step": 0.04} if method in FIXED else {"rtol": 1e-3, "atol": 1e-3}
    got = flow(f, x, [0, 0.2, 0.48], method=method, estimate_error=True, **keywords)
    true = float((got.final - exact).square().sum(-1).mean().sqrt())
    assert true > 0
    assert (0.8 if method in FIXED else 0.5) < got.error / true < (1.25 if method in FIXED else 3)
    assert flow(f, x, [0, 0.48], method=method, **keywords).error is None


def test_an_adaptive_method_holds_its_tolerance_for_each_token_alone() -> None:
    # One token of a thousand moves: averaged over tokens its error would be √1000 times smaller than it is.
    def velocity(t: Tensor, x: Tensor) -> Tensor:
        v = torch.zeros_like(x)
        v[0, 0], v[0, 1] = -5 * x[0, 1], 5 * x[0, 0]
        return v

    x = torch.ones(1000, 2, dtype=torch.float64)
    got = flow(velocity, x, [0, 1], rtol=1e-5, atol=1e-12).final[0]
    alone = flow(velocity, x[:1], [0, 1], rtol=1e-5, atol=1e-12).final[0]
    assert torch.equal(got, alone)


# ---- resuming, progress, gradients, precision


@pytest.mark.parametrize("method", ["dopri5", "midpoint", "residual"])
@pytest.mark.parametrize("kind", ["tokens", "measure", "sphere"])
def test_a_flow_can_be_continued_from_any_state_to_the_last_bit(method: str, kind: str) -> None:
    f, x = random_attention(13), on_sphere(tokens(13, 5, D))
    f = f if kind == "measure" else plain_attention
    field = Sphere(f) if kind == "sphere" else f
    start = DiscreteMeasure(x, torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25])) if kind == "measure" else x
    keywords = {"method": method, "step": None if method == "dopri5" else 0.125}
    whole = flow(field, start, [0, 0.25, 0.5, 1], **keywords)
    later = flow(field, whole.states[2], [0.5, 1], **keywords)
    assert torch.equal(whole.points[3], later.points[1])


@pytest.mark.parametrize("method", ["dopri5", "rk4", "residual"])
def test_gradients_are_kept_where_the_start_asks_for_them(method: str) -> None:
    f, x, e = plain_attention, tokens(15, 3, D), tokens(16, 3, D)
    keywords = {"method": method, "step": None if method == "dopri5" else 0.25}
    assert not flow(f, x, [0, 0.5], **keywords).states.requires_grad
    y = x.clone().requires_grad_()
    flow(f, y, [0, 0.5], **keywords).final.square().sum().backward()
    plus, minus = (
        float(flow(f, x + s * e, [0, 0.5], **keywords).final.square().sum()) for s in (1e-4, -1e-4)
    )
    assert float((y.grad * e).sum()) == pytest.approx((plus - minus) / 2e-4, rel=1e-5)


def test_float32_flows_weights_in_memory() -> None:
    f, x = random_attention(17), tokens(17, 4, D)
    wanted = flow(f, x, [0, 1], rtol=1e-5, atol=1e-5).final
    got = flow(f.to(dtype=torch.float32), x.float(), [0, 1])
    assert got.states.dtype == torch.float32
    assert got.rtol == 1e-4
    assert float((got.final - wanted).abs().max()) < 1e-3


def test_weights_are_repeated_tokens() -> None:
    f, x = random_attention(18), tokens(18, 3, D)
    repeated = torch.cat([x[:1].expand(3, D), x[1:2], x[2:].expand(2, D)])
    measure = DiscreteMeasure(x, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64) / 6)
    got = flow(f, measure, [0, 0.5, 1], method="rk4", step=0.1)
    wanted = flow(f, repeated, [0, 0.5, 1], method="rk4", step=0.1).states
    assert float((got.points - wanted[:, [0, 3, 4]]).abs().max()) < 1e-9
    assert isinstance(got.final, DiscreteMeasure)
    assert torch.allclose(got.final.weights, measure.weights, atol=1e-15)


# ---- measures


def test_a_masked_measure_flows_as_masked_tokens_in_any_order() -> None:
    f, x = random_attention(19, causal=True), tokens(19, 4, D)
    wanted = flow(f, x, [0, 1], method="rk4", step=0.1).final
    order = torch.tensor([2, 0, 3, 1])
    measure = DiscreteMeasure(x[order], positions=torch.tensor([0.2, 0.4, 0.6, 0.9])[order])
    got = flow(f, measure, [0, 1], method="rk4", step=0.1).final
    assert float((got.points - wanted[order]).abs().max()) < 1e-9
    assert torch.equal(got.positions, measure.positions)


def test_measures_flow_through_layers_and_on_spheres() -> None:
    maps, x = [random_attention(20), random_attention(21)], on_sphere(tokens(20, 3, D))
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    field = Sphere(Layers(maps, total_time=1.0))

    def velocity(f: hs.SelfAttention) -> Callable[[np.ndarray], np.ndarray]:
        def tangent(y: np.ndarray) -> np.ndarray:
            v = naive_attention(f, y, weights.numpy())
            return v - (v * y).sum(1, keepdims=True) * y

        return tangent

    middle = scipy_flow(velocity(maps[0]), x, [0, 0.5])[-1]
    wanted = scipy_flow(velocity(maps[1]), torch.as_tensor(middle), [0.5, 1])[-1]
    got = flow(field, DiscreteMeasure(x, weights), [0, 1], rtol=1e-5, atol=1e-5)
    assert np.abs(got.final.points.numpy() - wanted).max() < 1e-4


def test_the_error_of_a_measure_is_weighted_as_the_measure_is() -> None:
    f, x = random_attention(24), tokens(24, 3, D) * torch.tensor([[0.5], [3.0], [3.0]])
    weights = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)
    measure = DiscreteMeasure(x, weights)
    exact = flow(f, measure, [0, 0.5], rtol=1e-6, atol=1e-6).final.points
    got = flow(f, measure, [0, 0.5], method="euler", step=0.05, estimate_error=True)
    squares = (got.final.points - exact).square().sum(-1)
    assert got.error == pytest.approx(float((weights @ squares).sqrt()), rel=0.12)
    assert abs(float((squares.mean() / (weights @ squares)).sqrt()) - 1) > 0.18


@pytest.mark.slow
@pytest.mark.parametrize("what", ["unmasked", "causal", "metrics"])
def test_20000_tokens_need_no_matrix_of_their_size(what: str, tmp_path: Path) -> None:
    n, f = 20_000, random_attention(0, heads=2, key_dim=2, value_dim=2, d=4, d_out=4, causal=what == "causal")

    def done(x: Tensor) -> None:
        if what == "metrics":
            assert 1 < number_of_clusters(x, 0.1) <= len(x)
            assert number_of_clusters(0 * x, 0.1) == 1
            assert 0 < log_interaction_energy(x) < 100
        else:
            assert flow(f, x, [0.0, 0.1], method="euler", step=0.1).points.shape == (2, *x.shape)

    done(tokens(1, 100, 4))
    assert memory_added(lambda: done(tokens(1, n, 4)), tmp_path) < n * n * 8 / 10


# ---- blow-up, and integrators that give up


@pytest.mark.parametrize(
    ("method", "step"),
    [
        ("dopri5", None),
        pytest.param("dopri8", None, marks=pytest.mark.slow),
        ("rk4", 0.02),
        ("euler", 0.02),
    ],
)
def test_blow_up_is_reported_at_its_time_with_the_states_before_it(method: str, step: float | None) -> None:
    x = torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    keywords = {"step": step} if step else {"rtol": 1e-6, "atol": 1e-6}
    got = flow(lambda t, x: x * x, x, [0, 0.25, 0.5, 2, 3], method=method, **keywords)
    assert got.status == "blew up"
    lower, upper = got.blow_up
    assert lower <= 1.0 <= upper
    assert upper - lower < (1e-4 if step is None else 40 * step)
    assert got.times.tolist() == [0, 0.25, 0.5]
    assert bool(torch.isfinite(got.states).all())
    if step is None or method == "rk4":
        assert torch.allclose(got.final, x / (1 - 0.5 * x), rtol=1e-5)
    assert "between t = " in repr(got)


def test_states_within_the_interval_of_the_blow_up_are_not_kept() -> None:
    # Euler's method passes the singularity at t = 1 with finite numbers.
    x = torch.tensor([[1.0]], dtype=torch.float64)
    got = flow(lambda t, x: x * x, x, [0.05 * i for i in range(60)], method="euler", step=0.05)
    lower, upper = got.blow_up
    assert lower <= 1.0 <= upper
    assert lower - 0.051 < float(got.times[-1]) < lower


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_numbers_that_leave_their_range_are_no_nan(dtype: torch.dtype) -> None:
    x = torch.full((1, 1), torch.finfo(dtype).max ** 0.8, dtype=dtype)
    big = 0.2 * math.log(torch.finfo(dtype).max)
    times = [0.0, big / 4, big / 2, 2 * big]
    for keywords in ({"rtol": 1e-3}, {"method": "midpoint", "step": big / 300}):
        got = flow(lambda t, x: x, x, times, **keywords)
        assert got.status == "blew up"
        assert len(got) == 3
        assert 0.9 * big < got.blow_up[0] <= big <= got.blow_up[1] < 1.1 * big
        assert bool(torch.isfinite(got.states).all())


def test_residual_layers_that_overflow_are_named_by_their_layer() -> None:
    x = torch.tensor([[2.0]], dtype=torch.float64)
    got = flow(lambda t, x: 9 * x, x, [0, 100, 500], method="residual", step=1.0)
    # 2 · 10^k overflows first at k = 308, and so do the 9 · 10^k · 2 of the layer before.
    assert got.status == "blew up"
    assert got.blow_up == (307.0, 308.0)
    assert got.times.tolist() == [0, 100]


def test_an_integrator_that_gives_up_says_so() -> None:
    def jumps(t: Tensor, x: Tensor) -> Tensor:
        return -x.sign() * (1 + 0 * x)

    x = torch.tensor([[0.5]], dtype=torch.float64)
    got = flow(jumps, x, [0, 0.25, 1], max_steps=200)
    assert got.status == "stopped"
    assert "200 steps" in got.reason
    assert got.blow_up is None
    assert got.times.tolist() == [0, 0.25]
    undefined = flow(lambda t, x: -1 / x.sqrt(), x, [0, 0.1, 1])
    assert undefined.status == "stopped"
    assert "bounded" in undefined.reason
    assert len(undefined) == 2


def test_a_step_that_makes_a_stable_flow_explode_is_not_called_blow_up() -> None:
    x = torch.tensor([[1.0]], dtype=torch.float64)
    got = flow(lambda t, x: -30 * x, x, [0, 150.0], method="euler", step=0.1)
    assert got.status == "stopped"
    assert "not in a second, finer run" in got.reason
    worse = flow(lambda t, x: -300 * x, x, [0, 50.0], method="euler", step=0.1)
    assert worse.status == "stopped"
    assert "too large" in worse.reason


# ---- bad input


def _attention() -> hs.SelfAttention:
    return random_attention(22)


@pytest.mark.parametrize(
    ("change", "argument", "words"),
    [
        ({"times": [0.0]}, "times", "at least two"),
        ({"times": [0.0, 1.0, 1.0]}, "times", "1 after 1"),
        ({"times": [1.0, 0.0]}, "times", "increasing"),
        ({"times": [0.0, math.inf]}, "times", "finite"),
        ({"times": 3.0}, "times", "float"),
        ({"times": [0.0, "late"]}, "times", "late"),
        ({"method": "rk5"}, "method", "rk5"),
        ({"method": None}, "method", "None"),
        ({"method": "rk4"}, "step", "None"),
        ({"method": "rk4", "step": 0.0}, "step", "> 0"),
        ({"method": "rk4", "step": -0.1}, "step", "> 0"),
        ({"method": "rk4", "step": math.nan}, "step", "> 0"),
        ({"method": "rk4", "step": True}, "step", "> 0"),
        ({"method": "rk4", "step": 0.7}, "step", "at most 0.5"),
        ({"method": "rk4", "step": 1e-9}, "step", "max_steps"),
        ({"method": "rk4", "step": 0.1, "rtol": 1e-5}, "rtol", "has a fixed step"),
        ({"step": 0.1}, "step", "chooses"),
        ({"rtol": 0.0}, "rtol", "> 0"),
        ({"rtol": 1e-16}, "rtol", "rounding"),
        ({"rtol": 1.0}, "rtol", "to 1"),
        ({"atol": -1.0}, "atol", "> 0"),
        ({"max_steps": 0}, "max_steps", ">= 1"),
        ({"method": "residual", "step": 0.3}, "times", "multiples of 0.3"),
        ({"field": None}, "field", "NoneType"),
        ({"field": random_attention(0, d_out=4)}, "field", "d_out = 4"),
        ({"field": lambda t, x: x[..., :1]}, "field", "a velocity"),
        ({"field": lambda t, x: x.float()}, "field", "float32"),
        ({"field": Layers([_attention()], total_time=0.8)}, "times", "from 0 to 0.8"),
        ({"field": Layers([_attention()]), "method": "residual"}, "step", "0.5"),
        ({"field": Layers([_attention()]), "method": "residual", "step": 0.5}, "step", "one step per layer"),
        ({"field": Sphere(_attention())}, "start", "norms from"),
        ({"start": np.zeros((3, D))}, "start", "ndarray"),
        ({"start": tokens(0, 3, D + 1)}, "X", "shape"),
        ({"start": tokens(0, 3, D).float()}, "X", "float32"),
        ({"start": torch.zeros(3, D, dtype=torch.int64)}, "start", "int64"),
        ({"start": tokens(0, 3, D) * math.nan}, "start", "NaN"),
        ({"start": tokens(0, 3, D) * 1e200}, "start", "velocity"),
        ({"field": lambda t, x: x, "start": DiscreteMeasure(tokens(0, 3, D))}, "start", "weights"),
        (
            {"field": random_attention(0, causal=True), "start": DiscreteMeasure(tokens(0, 3, D))},
            "measure",
            "positions",
        ),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], argument: str, words: str) -> None:
    call: dict[str, object] = {"field": _attention(), "start": tokens(0, 3, D), "times": [0.0, 0.5, 1.0]}
    call |= change
    with pytest.raises(ArgumentError) as caught:
        flow(call.pop("field"), call.pop("start"), call.pop("times"), **call)
    assert caught.value.argument == argument
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layers([]), "at least one"),
        (lambda: Layers([_attention()], total_time=0), "> 0"),
        (lambda: Layers([_attention(), _attention().to(dtype=torch.float32)]), "float32"),
        (lambda: Layers([random_attention(0, d_out=3)]), "d_out"),
        (lambda: Layers([lambda t, x: x]), "a map"),
        (lambda: Sphere(_attention(), radius=-1.0), "> 0"),
        (lambda: Sphere(Sphere(_attention())), "Sphere"),
    ],
)
def test_bad_fields_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_a_start_without_finite_numbers_is_an_error_of_its_own() -> None:
    with pytest.raises(NonFiniteError):
        flow(_attention(), tokens(0, 3, D) * math.inf, [0, 1])


@pytest.mark.parametrize("kind", [L2Attention, SinkhornAttention])
def test_other_attentions_flow(kind: type[L2Attention | SinkhornAttention]) -> None:
    draws = [tokens(25 + i, 2, 3, 4) / 2 for i in range(3)]
    f, x = kind(*draws, tokens(28, 4, 6) / 3), tokens(29, 4, 4)
    wanted = scipy_flow(lambda y: f(torch.as_tensor(y)).numpy(), x, [0, 0.5])[-1]
    got = flow(f, x, [0, 0.5], rtol=1e-6, atol=1e-6)
    assert np.abs(got.final.numpy() - wanted).max() < 1e-5
    measure = flow(f, DiscreteMeasure(x), [0, 0.5], rtol=1e-6, atol=1e-6)
    assert np.abs(measure.final.points.numpy() - wanted).max() < 1e-5
