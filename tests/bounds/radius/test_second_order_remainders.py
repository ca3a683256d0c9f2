"""Every remainder against what the stage really leaves out, at random and at ascended changes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from howsmooth.bounds.radius import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    GatedFeedForward,
    Network,
    Norm,
    Stage,
)
from howsmooth.bounds.radius.ellipsoid_arithmetic import balls, ellipsoid_sum, half_widths, radii
from howsmooth.bounds.radius.error_propagation import Errors, Step
from howsmooth.bounds.radius.margin_expansion import SecondOrder
from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.second_order_remainders import (
    AttentionErrors,
    AttentionRemainder,
    FeedForwardRemainder,
    GatedFeedForwardRemainder,
    PathMoments,
    cosine_beyond,
    inverse_length,
)
from howsmooth.bounds.radius.spectral_norm_bounds import (
    each_form_norm,
    form_norm,
    spectral_norm,
    weighted_norm,
)
from howsmooth.bounds.radius.third_order_remainders import (
    CubicAttention,
    CubicFeedForward,
    CubicGatedFeedForward,
    Expansion,
)
from howsmooth.rounding import largest_eigenvalues_by_squaring
from howsmooth.rounding.rounded_tensor import plain
from tests.bounds.radius._networks import (
    ALL,
    Left,
    attention,
    decoder,
    expanded,
    feed_forward,
    feed_forwards,
    gated_feed_forward,
    left_out,
    moved,
    norm,
    normal,
    post_norm,
    pre_norm,
    rotations,
)

CASES = [
    pytest.param(*post_norm(0), [1], 0.1, id="one token"),
    pytest.param(*post_norm(1), [0], 0.05, id="the first token", marks=pytest.mark.slow),
    pytest.param(*post_norm(2, n=3), [0, 1, 2], 0.05, id="all tokens"),
    pytest.param(*pre_norm(3), [2], 0.1, id="pre-norm", marks=pytest.mark.slow),
    pytest.param(*pre_norm(4), [0, 2], 0.05, id="pre-norm, two tokens", marks=pytest.mark.slow),
    pytest.param(*decoder(5), [1], 0.1, id="rotary, gated"),
    pytest.param(*decoder(6, "relu"), [2], 0.1, id="rotary, gated by ReLU", marks=pytest.mark.slow),
    pytest.param(*feed_forwards(7, "relu", "relu", "silu"), [1], 0.2, id="ReLU"),
    pytest.param(
        *feed_forwards(8, "silu", "gelu_tanh", "quick_gelu"), [0], 0.3, id="SiLU", marks=pytest.mark.slow
    ),
]


def others_than(chosen: str) -> list[object]:
    """Return the cases, with one that runs by default marked ``slow``: the other test has it."""
    return [
        pytest.param(*c.values, id=c.id, marks=pytest.mark.slow if c.id == chosen else c.marks) for c in CASES
    ]


def expansion(order: int, network: Network, x: Tensor, tokens: list[int]) -> SecondOrder:
    functional, offset = network.readout[0] - network.readout[1], network.offset[0] - network.offset[1]
    return expanded(order, network, x, moved(x, tokens), functional, float(offset))


def depth(vectors: Tensor, shapes: Tensor) -> Tensor:
    """Return vᵀ U⁻¹ v token by token: at most 1 in the ellipsoid with matrix U."""
    size = shapes.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    solved = torch.linalg.solve(
        shapes + (1e-9 * size + 1e-30) * torch.eye(shapes.shape[1]).double(), vectors[..., None]
    )
    return (vectors * solved[..., 0]).sum(1)


def longest(shapes: Tensor) -> Tensor:
    """Return the largest length of a point of the ellipsoids."""
    return torch.linalg.eigvalsh(shapes)[..., -1].max().sqrt()


def ascended(objective, delta: Tensor, epsilon: float, steps: int = 4) -> Tensor:
    """Climb on a sphere along normalised gradients."""
    delta = epsilon * delta / delta.norm()
    for step in range(steps):
        slope = torch.func.grad(objective)(delta)
        delta = delta + epsilon * 0.5 * (1 - step / steps) * slope / slope.norm().clamp_min(1e-300)
        delta = epsilon * delta / delta.norm()
    return delta


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(("network", "x", "tokens", "epsilon"), others_than("one token"))
def test_no_stage_leaves_out_more_than_its_bound(
    order: int, network: Network, x: Tensor, tokens: list[int], epsilon: float
) -> None:
    found = expansion(order, network, x, tokens)
    bounds = found.bounds(epsilon)
    stated = bounds.stages
    g = torch.Generator().manual_seed(7)
    k = found.first.gradient.shape[0]
    pairs = Pairs(k)
    closest = torch.zeros(len(network.stages))

    def in_margin(left: Left, delta: Tensor, stage: int) -> Tensor:
        if order == 2:
            return left.margin.abs()
        cubic = torch.einsum("k,kp,p->", delta, plain(found.remainders[stage].cubic), pairs.square(delta))
        return (left.margin - cubic).abs()

    def excess(delta: Tensor, stage: int, part: str) -> Tensor:
        left = left_out(network, found.first, order == 3, delta)[stage]
        if part == "margin":
            return in_margin(left, delta, stage)
        return depth(left.vector, stated[stage].shape).sum()

    changes = [normal(g, k) for _ in range(3)]
    for stage in range(len(network.stages)):
        part = ("vector", "margin")[(stage + order) % 2]
        changes.append(ascended(partial(excess, stage=stage, part=part), normal(g, k), epsilon))
    for change in changes:
        for scale in (1.0, 0.5):
            delta = scale * epsilon * change / change.norm()
            for stage, left in enumerate(left_out(network, found.first, order == 3, delta)):
                name, bound = network.stages[stage].name, stated[stage]
                inside = depth(left.vector, bound.shape)
                assert float(inside.max()) <= 1 + 1e-6, name
                assert float(in_margin(left, delta, stage)) <= float(bound.margin) * (1 + 1e-9) + 1e-13, name
                closest[stage] = torch.maximum(closest[stage], inside.max().sqrt())
            if order == 2:
                states = network.states(x + torch.einsum("ndk,k->nd", found.first.tangents[0], delta))
                every = zip(states, found.first.states, found.first.tangents, bounds.errors, strict=True)
                for state, base, tangent, shape in every:
                    assert float(depth(state - base - tangent @ delta, shape).max()) <= 1 + 1e-6
    assert float(closest.max()) > 0.05  # the bounds are not idle


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(("network", "x", "tokens", "epsilon"), others_than("all tokens"))
def test_the_margin_never_falls_below_its_bound(
    order: int, network: Network, x: Tensor, tokens: list[int], epsilon: float
) -> None:
    found = expansion(order, network, x, tokens)
    injection = moved(x, tokens)
    k = injection.shape[2]
    g = torch.Generator().manual_seed(1)

    def margin(delta: Tensor) -> Tensor:
        logits = network.logits(x + injection @ delta)
        return logits[0] - logits[1]

    assert found.first.margin == pytest.approx(float(margin(torch.zeros(k, dtype=x.dtype))), abs=1e-12)
    for size in (epsilon, epsilon / 3):
        lower = found(size).lower

        def descended(delta: Tensor, size: float = size) -> Tensor:
            return ascended(lambda d: -margin(d), delta, size, steps=20)

        deltas = torch.func.vmap(descended)(normal(g, 20, k))
        lowest = min(float(margin(delta)) for delta in deltas)
        assert lowest >= lower - 1e-12
        # The loss is at most some times the true one: nothing is bounded by infinity.
        assert found.first.margin - lower <= 20 * (found.first.margin - lowest)


def test_strongly_curved_states_are_counted_in_all_later_stages() -> None:
    """Neurons with weights of about 30 bend the states before attention, and before neurons after it."""
    g = torch.Generator().manual_seed(0)
    d, n, steep, epsilon = 2, 2, 30, 0.002
    first = feed_forward(g, d, 3, d)
    first = replace(first, up=steep * first.up, down=first.down / steep, up_bias=0 * first.up_bias)
    mixing = attention(g, d, 1, torch.arange(n))
    stages = (
        Stage("curved", first, ALL),
        Stage("attention", mixing, ALL),
        Stage("neurons", feed_forward(g, d, 4, d), ALL),
    )
    network = Network(stages, normal(g, 2, n, d), normal(g, 2))
    found = expansion(3, network, normal(g, n, d) / steep / 3, [0, 1])
    stated = found.bounds(epsilon).stages

    def inside(delta: Tensor) -> Tensor:
        every = zip(left_out(network, found.first, True, delta), stated, strict=True)
        return torch.stack([depth(left.vector, bound.shape).max() for left, bound in every])

    deltas = epsilon * torch.nn.functional.normalize(normal(g, 60, n * d), dim=1)
    furthest = torch.stack([inside(delta) for delta in deltas]).amax(0)
    assert float(furthest.max()) <= 1 + 1e-6
    assert float(furthest.min()) >= 0.1  # the bounds are not idle


def test_the_losses_fall_with_the_order_of_the_expansion() -> None:
    network, x = post_norm(0)
    for order in (2, 3):
        found = expansion(order, network, x, [1])
        losses = [float(found(epsilon).stages.sum()) for epsilon in (0.01, 0.005)]
        assert losses[0] / losses[1] == pytest.approx(2 ** (order + 1), rel=0.15)


@pytest.mark.parametrize("centred", [True, False])
def test_the_remainder_of_a_norm_is_attained_up_to_a_small_factor(centred: bool) -> None:
    g = torch.Generator().manual_seed(0)
    layer = norm(g, 4, centred)
    layer = Norm(torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), 1e-12, centred)
    network = Network((Stage("norm", layer, ALL),), normal(g, 2, 1, 4), torch.zeros(2, dtype=torch.float64))
    x = normal(g, 1, 4)
    found = expansion(2, network, x, [0])
    epsilon = 0.02
    (left,) = found.bounds(epsilon).stages
    vector = longest(left.shape)

    def size(delta: Tensor) -> Tensor:
        return left_out(network, found.first, False, delta)[0].vector[0].norm()

    best = max(float(size(ascended(size, normal(g, 4), epsilon, 60))) for _ in range(4))
    # The parts along the token and orthogonal to it are not largest at once.
    assert 0.4 * float(vector) <= best <= float(vector)


@pytest.mark.parametrize("size", [1e-3, 0.05, 0.6])
def test_what_a_norm_leaves_out_is_bounded_and_nearly_attained(size: float) -> None:
    for y_most, v_most in ((size, size), (size / 9, size), (size, size / 9)):
        y = torch.linspace(-y_most, y_most, 401, dtype=torch.float64)[:, None]
        v = torch.linspace(0, v_most, 401, dtype=torch.float64)
        # 1/√(1 + x) − 1 without cancellation, x = 2y + y² + v²
        inverse = torch.expm1(-torch.log1p(2 * y + y**2 + v**2) / 2)
        cosine = torch.expm1(-torch.log1p((v / (1 + y)) ** 2) / 2)
        left_out = (inverse + y, inverse + y - y**2 + v**2 / 2, cosine + v**2 / 2)
        most = torch.tensor(y_most, dtype=torch.float64), torch.tensor(v_most, dtype=torch.float64)
        for rest, bound in zip(left_out, (*inverse_length(*most), cosine_beyond(*most)), strict=True):
            share = float(rest.abs().max() / bound)
            assert (0.03 if size > 0.5 else 0.5) <= share <= 1 + 1e-9


ONE = torch.ones(1, 1, dtype=torch.float64)


def lone(kind: str, slope: float = 0.0, value: float = 0.0) -> tuple[Network, Tensor, float, float]:
    """One neuron, its input, the size of the change, and the share of the bound that ±ε must attain."""
    g = torch.Generator().manual_seed(5)
    gated = kind == "gated"
    layer = gated_feed_forward(g, 1, 1, 1) if gated else feed_forward(g, 1, 1, 1, kind)
    x, epsilon, share = ONE, 0.05, 1 - 3e-6  # rounding outwards enlarges an ellipsoid by 1e-6
    if gated:
        layer = replace(layer, gate=ONE, gate_bias=-ONE[0], up=slope * ONE, up_bias=value * ONE[0])
        x, epsilon, share = 0 * ONE, 0.02, 0.8
    elif kind == "relu":  # the preactivation is .01 at 1
        layer = replace(layer, up_bias=-layer.up[:, 0] + 0.01)
    else:
        x, share = normal(g, 1, 1), 0.9
    network = Network((Stage("neuron", layer, ALL),), normal(g, 2, 1, 1), torch.zeros(2, dtype=torch.float64))
    return network, x, epsilon, share


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(
    "neuron", [("gelu",), ("relu",), ("gated", 1.0, 0.0), ("gated", 0.0, 1.0), ("gated", 1.0, 1.0)]
)
def test_the_remainder_of_one_neuron_is_nearly_attained(neuron: tuple[Any, ...], order: int) -> None:
    """The up projection of a gate is linear, constant, or both: each part of the bound decides once."""
    network, x, epsilon, share = lone(*neuron)
    found = expansion(order, network, x, [0])
    ((shape, margin),) = found.bounds(epsilon).stages
    deltas = [torch.tensor([s * epsilon], dtype=torch.float64) for s in (-1, 1)]
    both = [left_out(network, found.first, order == 3, delta)[0] for delta in deltas]
    largest = max(float(left.vector.norm()) for left in both)
    assert 0 < share * float(longest(shape)) <= largest <= float(longest(shape)) * (1 + 1e-9)
    if order == 2 or neuron == ("relu",):
        largest = max(abs(float(left.margin)) for left in both)
        assert share * float(margin) <= largest <= float(margin) * (1 + 1e-9)


@pytest.mark.parametrize("order", [2, 3])
def test_every_term_of_the_margin_of_one_neuron_is_attained(order: int) -> None:
    """Downwards from 1 the first three derivatives of tanh lower it together, so that each one counts."""
    one = torch.ones(1, 1, dtype=torch.float64)
    neuron = FeedForward(one, one[0], ACTIVATIONS["tanh"], one, 0 * one[0])
    readout = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64)
    network = Network((Stage("neuron", neuron, ALL),), readout, torch.zeros(2, dtype=torch.float64))
    for epsilon in (0.05, 0.2):
        lost = math.tanh(1) - math.tanh(1 - epsilon)
        found = expansion(order, network, 0 * one, [0])(epsilon)
        stated = math.tanh(1) - found.lower
        assert lost <= stated <= lost * (1 + epsilon**order)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(("epsilon", "error"), [(0.0, 0.02), (0.02, 0.02), (0.3, 0.01)])
@pytest.mark.parametrize(
    ("kind", "slope", "value"), [("silu", 1, 1), ("silu", 1, 0), ("silu", 0, 1), ("relu", 1, 1)]
)
def test_one_gated_neuron_with_an_error_is_nearly_attained(
    kind: str, slope: float, value: float, epsilon: float, error: float, order: int
) -> None:
    """F(u) = φ(u + z) (slope · u + value) at 0: the input changes by ±ε, and by ±error from stages before."""
    one = torch.ones(1, 1, dtype=torch.float64)
    z = -1.0 if kind == "silu" else 0.01
    up, zero = (slope * one, value * one[0]), torch.zeros(1, dtype=torch.float64)
    layer = GatedFeedForward(one, z * one[0], *up, ACTIVATIONS[kind], one, zero)
    u, pairs, errors = 0 * one, Pairs(1), error**2 * one[None]
    if order == 2:
        found = GatedFeedForwardRemainder(layer, u, one[None], one)(epsilon, errors)
    else:
        at = Expansion(u, one[None], 0 * one[None], pairs, one)
        found = CubicGatedFeedForward(layer, at)(epsilon, errors)

    def function(change: Tensor) -> Tensor:
        return layer.value(change.reshape(1, 1))[0, 0]

    derivatives = [function]
    for _ in range(3):
        derivatives.append(torch.func.grad(derivatives[-1]))
    at_zero, first, second, third = (float(derivative(zero[0])) for derivative in derivatives)
    largest, in_margin = 0.0, 0.0
    for delta, e in ((epsilon * a, error * b) for a in (-1, 1) for b in (-1, 1)):
        change = delta + e
        left = float(function(zero[0] + change)) - at_zero - first * change
        margin = left - second * change**2 / 2 + second * e**2 / 2
        if order == 3:
            left, margin = left - second * delta**2 / 2, margin - third * delta**3 / 6
        largest, in_margin = max(largest, abs(left)), max(in_margin, abs(margin))
    share = 0.9 if epsilon < 0.1 else 0.5
    assert share * float(longest(found.shape)) <= largest <= float(longest(found.shape)) * (1 + 1e-9)
    assert share * float(found.margin) <= in_margin <= float(found.margin) * (1 + 1e-9)


@pytest.mark.parametrize("error", [0.0, 0.01])
@pytest.mark.parametrize(("slope", "form"), [(0, 30), (1, 30), (1, -30), (1, 3)])
@pytest.mark.parametrize("gated", [False, True])
def test_one_neuron_at_a_curved_input_is_nearly_attained(
    gated: bool, slope: float, form: float, error: float
) -> None:
    """The input of φ changes by slope · δ + form · δ²/2 ± error: each counts."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    epsilon, pairs, silu = 0.05, Pairs(1), ACTIVATIONS["silu"]
    at = Expansion(0 * one, slope * one[None], form * one[None], pairs, one)
    if gated:
        layer = GatedFeedForward(one, -one[0], 0 * one, one[0], silu, one, zero)
        found = CubicGatedFeedForward(layer, at)
    else:
        found = CubicFeedForward(FeedForward(one, -one[0], silu, one, zero), at)
    bound = found(epsilon, error**2 * one[None])

    def function(z: Tensor) -> Tensor:
        return torch.nn.functional.silu(z - 1)

    derivatives = [function, torch.func.grad(function), torch.func.grad(torch.func.grad(function))]
    at_zero, first, second = (float(derivative(zero[0])) for derivative in derivatives)
    largest, in_margin = 0.0, 0.0
    for delta, e in ((epsilon * a, error * b) for a in (-1, 1) for b in (-1, 1)):
        beyond = form * delta**2 / 2 + e
        change = slope * delta + beyond
        rest = float(function(zero[0] + change)) - at_zero - first * change
        margin = rest - second * change**2 / 2 + second * beyond**2 / 2 - float(found.cubic) * delta**3
        left = rest - second * (slope * delta) ** 2 / 2
        largest, in_margin = max(largest, abs(left)), max(in_margin, abs(margin))
    assert 0.9 * float(longest(bound.shape)) <= largest <= float(longest(bound.shape)) * (1 + 1e-9)
    assert 0.8 * float(bound.margin) <= in_margin <= float(bound.margin) * (1 + 1e-9)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(("epsilon", "error"), [(0.1, 4.0), (2.0, 2.0), (4.0, 0.5)])
@pytest.mark.parametrize("kind", ["tanh", "silu", "gelu"])
def test_a_neuron_that_moves_far_leaves_out_little_more_than_it_moves(
    kind: str, epsilon: float, error: float, order: int
) -> None:
    """A polynomial of a lower degree is nearer to an activation whose argument moves by 4."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    pairs, form = Pairs(1), 2 if epsilon < 1 else 0.1
    for bias in torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]:
        layer = FeedForward(one, bias, ACTIVATIONS[kind], one, zero)
        at = Expansion(0 * one, one[None], form * one[None], pairs, one)
        remainder = (
            FeedForwardRemainder(layer, at.u, at.tangents, one) if order == 2 else CubicFeedForward(layer, at)
        )
        bound = remainder(epsilon, error**2 * one[None])
        phi, first, second = (layer.activation.derivative(k, bias) for k in (0, 1, 2))
        delta = torch.tensor([-epsilon, 0.0, epsilon], dtype=torch.float64)
        e = torch.linspace(-error, error, 801, dtype=torch.float64)[:, None]
        beyond = e + form * delta**2 / 2 if order == 3 else e + 0 * delta
        rest = layer.activation.derivative(0, bias + delta + beyond) - phi - first * (delta + beyond)
        cube = plain(remainder.cubic) * delta**3 if order == 3 else 0.0
        in_margin = (rest - second * (delta + beyond) ** 2 / 2 + second * beyond**2 / 2 - cube).abs().max()
        left = (rest - (second * delta**2 / 2 if order == 3 else 0.0)).abs().max()
        share = 0.75 if epsilon < 1 else 0.08
        assert share * float(longest(bound.shape)) <= float(left) <= float(longest(bound.shape))
        assert share * float(bound.margin) <= float(in_margin) <= float(bound.margin)


@pytest.mark.parametrize("size", [0.03, 0.3, 1.0])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_what_an_output_leaves_out_along_a_line_is_bounded_and_nearly_attained(
    order: int, size: float
) -> None:
    g = torch.Generator().manual_seed(order)
    closest = torch.zeros(2, dtype=torch.float64)
    for _ in range(60):
        P, v, dv, t = torch.softmax(2 * normal(g, 5), 0), normal(g, 5), normal(g, 5), normal(g, 5)
        t = t - P @ t
        t = size * t / t.abs().max()

        def sd(x: Tensor, P: Tensor = P) -> Tensor:
            return (P @ (x - P @ x).square()).sqrt()

        bounds = PathMoments(sd(t)[None, None], t.abs().max()[None, None]).rest(order)
        for which, (start, change) in enumerate(((v, 0 * v), (0 * v, dv))):
            derivative = lambda s, P=P, t=t, start=start, change=change: (  # noqa: E731
                torch.softmax(P.log() + s * t, 0) @ (start + s * change)
            )
            zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
            rest = derivative(one)
            for power in range(order):
                rest = rest - derivative(zero) / math.factorial(power)
                derivative = torch.func.grad(derivative)
            share = rest.abs() / (sd(start + change) * bounds[which])
            closest[which] = torch.maximum(closest[which], share[0, 0])
    assert 0.05 <= float(closest.min()) <= float(closest.max()) <= 1


def test_values_that_move_are_centred() -> None:
    """Cov(V δ, x) of one token that moves has its weight times the weight of the others."""
    g = torch.Generator().manual_seed(6)
    layer, u, tangents = attention(g, 4, 1, torch.arange(3)), normal(g, 3, 4), torch.zeros(3, 4, 4)
    tangents = tangents.double()
    tangents[1] = torch.eye(4)
    found = AttentionRemainder(layer, u, tangents, normal(g, 3, 4))
    P, out = layer.softmax(u).weights[:, :, 1], layer.output @ layer.value_weight
    exact = (P * (1 - P))[..., None, None] * (out @ out.mT)[:, None]
    torch.testing.assert_close(found.value, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", [0, 2])
def test_one_error_changes_scores_as_the_derivative_says(row: int) -> None:
    """The ellipsoid of one token is a segment, so that each functional has one value up to its sign."""
    g = torch.Generator().manual_seed(3)
    d, n = 8, 3
    layer = replace(attention(g, d, 2, torch.tensor([row])), turns=rotations(g, n, d // 2))
    u, v = normal(g, n, d), normal(g, d)
    own = layer.softmax(u)
    reached = AttentionErrors(layer, own, normal(g, 1, d))
    for token in range(n):
        errors = torch.zeros(n, d, d, dtype=u.dtype)
        errors[token] = torch.outer(v, v)
        tangent = torch.zeros(n, d, 1, dtype=u.dtype)
        tangent[token, :, 0] = v
        dq, dk, _ = layer.tangents(tangent)
        by_query = torch.einsum("hie,hje->hij", dq[..., 0], own.k)
        by_key = torch.einsum("hie,hje->hij", own.q, dk[..., 0]).abs()
        spread = by_key + torch.einsum("hij,hij->hi", own.weights, by_key)[..., None]
        found = reached(errors)
        torch.testing.assert_close(found.score, own.centred(by_query).abs() + spread)
        parts = (own.centred(by_query).square(), own.weights * 0 + by_key[:, None].squeeze(1).square())
        deviation = sum(torch.einsum("hij,hij->hi", own.weights, part).sqrt() for part in parts)
        torch.testing.assert_close(found.score_deviation, deviation)
        lengths = (torch.linalg.vector_norm(part[..., 0], dim=-1) for part in (dq, dk))
        torch.testing.assert_close((found.query, found.each_key), tuple(lengths))


def test_the_part_linear_in_an_error_is_the_second_derivative() -> None:
    g = torch.Generator().manual_seed(4)
    d, n, k = 6, 3, 2
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    layer = attention(g, d, 1, torch.tensor([1, 2]), visible)
    layer = replace(layer, turns=rotations(g, n, d))
    u, tangents, pairs = normal(g, n, d), normal(g, n, d, k), Pairs(k)
    late: list[Exception] = []

    def check() -> None:
        if late:
            raise late[0]

    flat = torch.zeros(n, d, len(pairs.i)).double()
    at = Expansion(u, tangents, flat, pairs, normal(g, 2, d), check=check)
    roots, epsilon = normal(g, n, d, d), 0.3
    errors = roots @ roots.mT + torch.eye(d, dtype=u.dtype)
    crossed = CubicAttention(layer, at).crossed
    assert crossed is not None
    hessian = torch.func.jacfwd(torch.func.jacrev(layer.value))(u)
    tensor = torch.einsum("iojdlf,lfk->iojdk", hessian, tangents)
    exact = torch.einsum("iojdk,jde,ipjek->jiop", tensor, errors, tensor)
    # Rounding outwards and eigenvalues near 0 enlarge an ellipsoid by a few 1e-6.
    for size in (1, 4):  # the form of the first ellipsoids serves for larger ones, too
        found = torch.stack(crossed(epsilon, size * errors)[:-1])
        torch.testing.assert_close(found, size * epsilon**2 * exact, rtol=1e-4, atol=3e-6)
    # Another form is taken anew, also if that was interrupted before.
    errors[0] += 20 * errors[0, :1] * errors[0, :, :1]
    late.append(TimeoutError())
    with pytest.raises(TimeoutError):
        crossed(epsilon, errors)
    late.clear()
    exact = torch.einsum("iojdk,jde,ipjek->jiop", tensor, errors, tensor)
    beyond = torch.stack(crossed(epsilon, errors)[:-1]) - epsilon**2 * exact
    assert float(torch.linalg.eigvalsh(beyond).min()) >= -1e-9


def test_the_cubic_part_of_attention_is_the_third_derivative() -> None:
    """With one variable, the ellipsoid of the cubic part is a segment."""
    g = torch.Generator().manual_seed(4)
    d, n = 6, 3
    layer = attention(g, d, 2, torch.tensor([1, 2]), torch.ones(n, n, dtype=torch.bool).tril())
    layer = replace(layer, turns=rotations(g, n, d // 2))
    u, tangents, forms = normal(g, n, d), normal(g, n, d, 1), 3 * normal(g, n, d, 1)
    found = CubicAttention(layer, Expansion(u, tangents, forms, Pairs(1), normal(g, 2, d)))

    def outputs(t: Tensor) -> Tensor:
        return layer.value(u + (tangents * t + forms * t**2 / 2)[..., 0])

    third = torch.func.jacfwd(torch.func.jacfwd(torch.func.jacfwd(outputs)))(torch.zeros((), dtype=u.dtype))
    # Rounding outwards enlarges an ellipsoid by 1e-6.
    exact = torch.einsum("io,ip->iop", third, third) / 36
    torch.testing.assert_close(found.third, exact, rtol=3e-6, atol=3e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("values", "slopes", "forms", "given"),
    [
        ((1, 0, 1), (0, 0, 0), (0, 0, 0), False),
        ((1, 0, 1), (0, 0, 0), (0, 0, 0), True),
        ((0, 0, 0), (1, 0, -1), (0, 0, 0), False),
        ((0, 0, 0), (1, 0, -1), (0, 0, 0), True),
        ((0, 0, 0), (0, 0, 0), (1, 0, 1), False),
    ],
)
def test_each_term_of_the_remainder_of_attention_counts(
    values: tuple[int, ...], slopes: tuple[int, ...], forms: tuple[int, ...], given: bool
) -> None:
    """Scores δ, 0, −δ: even outputs, so that the cubic part is zero, and one term bounds all that is left."""
    zero, reading = torch.zeros(1, 1, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[:, None, None]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    maps = (0 * reading[0], zero + 1, reading[0], zero, reading[1], zero)
    layer = Attention(*maps, one, zero[0], torch.tensor([0]))
    u, tangents, curved = torch.zeros(3, 3, 2, dtype=torch.float64)
    tangents[:, 0] = torch.tensor([1, 0, -1])
    u[:, 1], tangents[:, 1], curved[:, 1] = map(torch.tensor, (values, slopes, forms))
    epsilon, errors = 0.3, torch.zeros(3, 2, 2, dtype=torch.float64)
    at = Expansion(u, tangents[..., None], curved[..., None], Pairs(1), one[0], given)

    def outputs(t: Tensor) -> Tensor:
        return layer.value(u + tangents * t + curved * t**2 / 2)[0, 0]

    start = torch.zeros((), dtype=torch.float64)
    curvature = torch.func.jacfwd(torch.func.jacfwd(outputs))
    assert float(torch.func.jacfwd(curvature)(start)) == pytest.approx(0, abs=1e-12)
    left = outputs(start + epsilon) - outputs(start) - epsilon**2 / 2 * curvature(start)
    bound = CubicAttention(layer, at)(epsilon, errors).shape[0, 0, 0].sqrt()
    assert 1e-2 * float(bound) < abs(float(left)) <= float(bound)


def test_the_remainder_of_attention_is_attained_up_to_a_small_factor() -> None:
    """One row, two tokens of one dimension: scores move by δ, values stand still."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    still = Attention(0 * one, zero + 1, one, zero, one * 1e-3, zero, one * 1e3, zero[0], torch.tensor([0]))
    x = torch.tensor([[0.4], [-0.3]], dtype=torch.float64)
    readout = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64)
    network = Network((Stage("attention", still, ALL),), readout, torch.zeros(2, dtype=torch.float64))
    for order in (2, 3):
        found = expansion(order, network, x, [0, 1])
        vector = longest(found.bounds(0.02).stages[0].shape)
        g = torch.Generator().manual_seed(0)

        def size(delta: Tensor, order: int = order, found: SecondOrder = found) -> Tensor:
            return left_out(network, found.first, order == 3, delta)[0].vector[0].norm()

        best = max(float(size(ascended(size, normal(g, 2), 0.02, 20))) for _ in range(2))
        assert best <= float(vector)
        assert best >= float(vector) / 3


def test_the_third_cumulant_in_attention_is_nearly_attained() -> None:
    """One row, two tokens of weights .98 and .02: first entries move the scores, and values stand still."""

    def reading(*entries: float) -> Tensor:
        return torch.tensor([[entries]], dtype=torch.float64)

    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    output = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    maps = (reading(0, 0), one, reading(1, 0), zero, reading(0, 1), zero)
    layer = Attention(*maps, output, torch.zeros(2, dtype=torch.float64), torch.tensor([0]))
    readout = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]], dtype=torch.float64)
    network = Network((Stage("attention", layer, ALL),), readout, torch.zeros(2, dtype=torch.float64))
    x = torch.tensor([[3.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    keys_move = torch.zeros(2, 2, 2, dtype=torch.float64)
    keys_move[0, 0, 0] = keys_move[1, 0, 1] = 1
    found = expanded(2, network, x, keys_move, readout[0] - readout[1], 0.0)
    bound = longest(found.bounds(0.02).stages[0].shape)
    toward = torch.tensor([1.0, -1.0], dtype=torch.float64) * 0.02 / math.sqrt(2)
    sizes = [left_out(network, found.first, False, sign * toward)[0].vector[0].norm() for sign in (1, -1)]
    assert 0.8 * float(bound) < float(max(sizes)) <= float(bound)


def test_norms_are_upper_bounds_and_close() -> None:
    g = torch.Generator().manual_seed(0)
    matrices = normal(g, 5, 7, 12)
    true = torch.linalg.matrix_norm(matrices, 2)
    found = spectral_norm(matrices)
    assert bool((found >= true).all())
    assert bool((found <= 1.05 * true).all())
    gram = matrices @ matrices.mT
    assert bool((largest_eigenvalues_by_squaring(gram) >= true**2 * (1 - 1e-12)).all())
    assert float(spectral_norm(torch.zeros(2, 3, dtype=torch.float64))) == 0
    pairs = Pairs(4)
    forms = pairs.packed(normal(g, 6, 4, 4))
    each = torch.linalg.matrix_norm(pairs.matrices(forms), 2)
    assert bool((each_form_norm(forms, pairs) >= each * (1 - 1e-12)).all())
    assert bool((each_form_norm(forms, pairs) <= 1.2 * each).all())
    deltas = torch.nn.functional.normalize(normal(g, 2000, 4), dim=1)
    seen = (forms @ pairs.square(deltas).T).norm(dim=0).max()
    assert float(seen) <= float(form_norm(forms, pairs)) <= 3 * float(seen)


@pytest.mark.parametrize("k", [5, 20, 700])
def test_weighted_norms_are_upper_bounds(k: int) -> None:
    g = torch.Generator().manual_seed(0)
    weights, changes = torch.rand(2, 3, 4, generator=g, dtype=torch.float64), normal(g, 2, 4, 3, k)
    found = weighted_norm(weights, changes)
    for h in range(2):
        for i in range(3):
            whole = (weights[h, i].sqrt()[:, None, None] * changes[h]).flatten(0, 1)
            true = float(torch.linalg.matrix_norm(whole, 2))
            assert true * (1 - 1e-12) <= float(found[h, i]) <= 2 * true


def test_ellipsoids_contain_sums() -> None:
    g = torch.Generator().manual_seed(0)
    mixed, roots = normal(g, 5, 2, 4, 3), [normal(g, 5, 3, 3), normal(g, 2, 2, 2)]
    cause, own = (root @ root.mT for root in roots)
    errors = Errors(normal(g, 5, 3))
    errors.leave(Step(torch.eye(3, dtype=torch.float64).expand(5, -1, -1)), cause, 3)
    errors.reach(Step(None, (mixed,)))
    assert errors.lengths[0] >= cause.diagonal(dim1=1, dim2=2).sum().sqrt() * (1 - 1e-12)
    errors.leave(Step(None, (mixed,)), own, 4)
    shape = errors.state
    functional = normal(g, 2, 1, 4)
    largest = widest = 0.0
    for _ in range(500):
        reached, added = (
            (root @ torch.nn.functional.normalize(normal(g, *root.shape[:2]), dim=1)[..., None])[..., 0]
            for root in roots
        )
        e = torch.einsum("mnds,ms->nd", mixed, reached)
        e[:, 2:] += added
        largest = max(largest, float(depth(e, shape).max()))
        along = (functional[:, 0] * e).sum(1) / half_widths(shape, functional)[:, 0]
        widest = max(widest, float(along.max()))
    assert 0.2 < largest <= 1
    assert 0.5 < widest <= 1
    assert bool((radii(shape) >= torch.linalg.eigvalsh(shape)[..., -1].sqrt()).all())
    point = torch.zeros(2, 3, 3, dtype=torch.float64)
    assert bool((ellipsoid_sum(point, point) == 0).all())
    ball = balls(torch.tensor([2.0], dtype=torch.float64), 3)
    assert float(radii(ellipsoid_sum(ball, ball))) == pytest.approx(4, rel=0.05)
