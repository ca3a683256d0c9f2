"""Rounding errors: every bound against arithmetic of many digits, and the expansion with visible errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product as all_pairs
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor

from howsmooth.bounds.radius import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    GatedFeedForward,
    Network,
    Norm,
    Stage,
    error_propagation,
    margin_expansion,
)
from howsmooth.bounds.radius.ellipsoid_arithmetic import (
    ellipsoid_image,
    ellipsoid_sum,
    enclosing,
    gram,
    half_widths,
    mixture,
    product,
)
from howsmooth.bounds.radius.error_propagation import rounding_loss
from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.spectral_norm_bounds import (
    each_form_norm,
    form_norm,
    spectral_norm,
)
from howsmooth.rounding import U, largest_eigenvalues_by_squaring
from howsmooth.rounding.rounded_tensor import MissingRuleError, Rounded, exact, plain, settled
from tests._selection import others_slow
from tests.bounds.radius._networks import (
    ALL,
    attention,
    decoder,
    expanded,
    feed_forwards,
    moved,
    normal,
    post_norm,
    pre_norm,
)

_STEP = mpmath.mpf(10) ** -20
# Differences of second order in arithmetic of 80 digits are wrong by about 1e-40.
_OF_DIFFERENCES = 1e-35


@pytest.fixture(autouse=True)
def eighty_digits() -> Iterator[None]:
    """Compute in 80 digits, whatever other modules set."""
    with mp.workdps(80):
        yield


def many_digits(value: Tensor) -> np.ndarray:
    """Return the same numbers as an array of mpmath."""
    return np.array([mpmath.mpf(v) for v in value.flatten().tolist()], dtype=object).reshape(value.shape)


def frobenius(value: np.ndarray) -> mpmath.mpf:
    return mpmath.sqrt(sum((v * v for v in value.flatten()), mpmath.mpf(0)))


def _gelu_tanh(t: Any) -> Any:
    inner = mpmath.sqrt(2 / mpmath.pi) * (t + mpmath.mpf(0.044715) * t**3)
    return t * (1 + mpmath.tanh(inner)) / 2


EXACT: dict[str, Callable[[Any], Any]] = {
    "identity": lambda z: z,
    "gelu": lambda t: t * mpmath.erfc(-t / mpmath.sqrt(2)) / 2,
    "tanh": mpmath.tanh,
    "silu": lambda t: t / (1 + mpmath.exp(-t)),
    "quick_gelu": lambda t: t / (1 + mpmath.exp(-mpmath.mpf(1.702) * t)),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda t: max(t, mpmath.mpf(0)),
}


def exact_value(layer: Any, u: np.ndarray) -> np.ndarray:
    """Compute the value of a map in many digits."""
    each = np.vectorize
    if isinstance(layer, Norm):
        h = u - u.sum(1, keepdims=True) / u.shape[1] if layer.centred else u
        r = each(mpmath.sqrt)((h * h).sum(1, keepdims=True) + u.shape[1] * mpmath.mpf(layer.eps))
        gain = mpmath.sqrt(u.shape[1]) * many_digits(layer.gain)
        return h / r * gain + many_digits(layer.bias)
    if isinstance(layer, FeedForward | GatedFeedForward):
        name = next(name for name, known in ACTIVATIONS.items() if known is layer.activation)
        y = u @ many_digits(layer.up).T + many_digits(layer.up_bias)
        if isinstance(layer, FeedForward):
            y = each(EXACT[name])(y)
        else:
            y = y * each(EXACT[name])(u @ many_digits(layer.gate).T + many_digits(layer.gate_bias))
        return y @ many_digits(layer.down).T + many_digits(layer.down_bias)
    assert isinstance(layer, Attention)
    rows = layer.rows.tolist()
    found = many_digits(layer.output_bias)
    for h in range(len(layer.query)):
        q = u[rows] @ many_digits(layer.query[h]).T + many_digits(layer.query_bias[h])
        k = u @ many_digits(layer.key[h]).T + many_digits(layer.key_bias[h])
        if layer.turns is not None:
            turns = many_digits(layer.turns)
            q = np.stack([turns[i] @ own for i, own in zip(rows, q, strict=True)])
            k = np.stack([turn @ own for turn, own in zip(turns, k, strict=True)])
        v = u @ many_digits(layer.value_weight[h]).T + many_digits(layer.value_bias[h])
        weights = each(mpmath.exp)(q @ k.T)
        if layer.visible is not None:
            weights = weights * layer.visible[rows].numpy().astype(int)
        weights = weights / weights.sum(1, keepdims=True)
        found = found + weights @ v @ many_digits(layer.output[h]).T
    return found


def differences(function: Callable[[np.ndarray], Any], u: np.ndarray, *directions: np.ndarray) -> Any:
    """Return a derivative of order one or two along directions, by differences of step 1e-20."""
    found: Any = 0
    for signs in all_pairs((1, -1), repeat=len(directions)):
        point = u
        for sign, direction in zip(signs, directions, strict=True):
            point = point + sign * _STEP * direction
        found = found + math.prod(signs) * function(point)
    return found / (2 * _STEP) ** len(directions)


def small(seed: int = 0) -> list[Any]:
    post, x = post_norm(seed, n=3, d=4, layers=1)
    causal, y = pre_norm(seed, n=3, d=4)
    found = [(s, u) for s, u in zip(post.stages, post.states(x), strict=False)]
    found += [(s, u) for s, u in zip(causal.stages[:2], causal.states(y), strict=False)]
    for kind in ("silu", "relu"):
        gated, z = decoder(seed, kind, d=4)
        found += [(s, u) for s, u in zip(gated.stages, gated.states(z), strict=False)][1:4:2]
    others, w = feed_forwards(seed, "silu", "quick_gelu", "gelu_tanh", "relu", d=3)
    found += [(s, u) for s, u in zip(others.stages, others.states(w), strict=False)]
    return [pytest.param(stage.map, u[:, stage.branch], id=stage.name) for stage, u in found]


@pytest.mark.parametrize(("layer", "u"), small())
def test_values_and_derivatives_are_as_close_as_stated(layer: Any, u: Tensor) -> None:
    g = torch.Generator().manual_seed(1)
    network = Network((Stage("one", layer, ALL),), torch.zeros(1, 1, 1), torch.zeros(1))
    own = network.rounded().stages[0].map
    tangents, pairs = normal(g, *u.shape, 2), Pairs(2)
    adjoint = normal(g, *layer.value(u).shape)
    at, G, a = many_digits(u), many_digits(tangents), many_digits(adjoint)

    def value(v: np.ndarray) -> np.ndarray:
        return exact_value(layer, v)

    def paired(v: np.ndarray) -> Any:
        return (a * exact_value(layer, v)).sum()

    units = np.eye(u.numel(), dtype=int).reshape(-1, *u.shape)
    root = mpmath.sqrt(2)
    expected = {
        "value": value(at),
        "push": np.stack([differences(value, at, G[..., i]) for i in range(2)], -1),
        "pull": np.array([differences(paired, at, unit) for unit in units]).reshape(*u.shape, 1),
        "curvature": np.stack(
            [
                np.array([differences(paired, at, unit, G[..., i]) for unit in units]).reshape(u.shape)
                for i in range(2)
            ],
            -1,
        ),
        "second": np.stack(
            [
                differences(value, at, G[..., i], G[..., j]) * (1 if i == j else root)
                for i, j in ((0, 0), (0, 1), (1, 1))
            ],
            -1,
        ),
    }
    x, T, A = exact(u), exact(tangents), exact(adjoint)
    found = {
        "value": own.value(x),
        "push": own.push(x, T),
        "pull": own.pull(x, A[..., None]),
        "curvature": own.curvature(x, A, T),
        "second": own.second(x, T, pairs),
    }
    for name, number in found.items():
        value_found, error = settled(number)
        distance = frobenius(many_digits(value_found) - expected[name])
        assert distance <= error + _OF_DIFFERENCES, name
        assert distance > _OF_DIFFERENCES or frobenius(expected[name]) < _OF_DIFFERENCES, name
        assert error <= 1e-8 * (1 + float(frobenius(expected[name]))), name


def test_elementary_functions_are_correct_to_four_units() -> None:
    g = torch.Generator().manual_seed(0)
    wide = torch.cat([normal(g, 500, scale=s) for s in (1e-3, 1.0, 5.0)])
    cases = [
        (torch.exp, mpmath.exp, -20 * wide.abs()),
        (torch.exp, mpmath.exp, wide),
        (torch.erfc, mpmath.erfc, wide),
        (torch.tanh, mpmath.tanh, wide),
        (torch.expm1, mpmath.expm1, wide.abs()),
        (torch.log1p, mpmath.log1p, -torch.rand(1500, generator=g, dtype=torch.float64)),
        (torch.sqrt, mpmath.sqrt, wide.abs()),
    ]
    for function, many, x in cases:
        for found, point in zip(function(x).tolist(), x.tolist(), strict=True):
            true = many(mpmath.mpf(point))
            assert abs(found - true) <= 8 * U * abs(true), (function, point)


@pytest.mark.parametrize("name", [name for name, known in ACTIVATIONS.items() if not known.kink])
def test_suprema_allow_for_the_rounding_of_the_point(name: str) -> None:
    activation = ACTIVATIONS[name]
    z = torch.linspace(-5, 5, 41, dtype=torch.float64)
    width = torch.full_like(z, 0.1)
    for largest, function in zip(activation.largest[:2], activation.derivatives[3:], strict=True):
        wide = largest(exact(z, 0.3), width)
        assert type(wide) is Tensor
        reached = torch.stack([function(z + s * 0.4) for s in torch.linspace(-1, 1, 81)]).abs().amax(0)
        assert bool((wide >= reached * (1 - 1e-12)).all())


@pytest.mark.parametrize("name", ["tanh", "gelu", "silu"])
def test_rests_of_taylor_polynomials_allow_for_the_rounding_of_the_point(name: str) -> None:
    activation, z = ACTIVATIONS[name], torch.tensor([0.3], dtype=torch.float64)
    width = torch.tensor([0.7], dtype=torch.float64)
    wide = activation.rests(exact(z, 0.2), width)
    for near in (z - 0.2, z + 0.2):
        own = activation.rests(near, width)
        assert all(bool((a >= b).all()) for a, b in zip(wide, own, strict=True))


def test_the_kink_of_relu_allows_for_the_rounding_of_the_point() -> None:
    relu, z = ACTIVATIONS["relu"], torch.tensor([-0.35, 0.0, 0.35], dtype=torch.float64)
    rest = relu.rests(exact(z, 0.3), torch.full_like(z, 0.1)).size[0]
    assert type(rest) is Tensor
    torch.testing.assert_close(rest, torch.tensor([0.05, 0.4, 0.05], dtype=torch.float64))
    slope, error = settled(relu.derivative(1, exact(torch.cat([z, z[:1] / 2]), 0.3)))
    assert slope.tolist() == [0, 0, 1, 0]
    assert error >= math.sqrt(2)  # the slopes at 0 and at -0.175


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_bound_the_derivatives(name: str) -> None:
    activation = ACTIVATIONS[name]
    for order in range(1, 6 if max(activation.slopes[1:]) else 2):
        with mp.workdps(30):
            top = max(abs(mpmath.diff(EXACT[name], mpmath.mpf(z) / 10, order)) for z in range(-40, 41, 2))
        assert 0.9 * activation.slopes[order - 1] <= top <= activation.slopes[order - 1], order


def integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-1000, 1000, shape, generator=generator).double()


def smallest_eigenvalue(matrix: np.ndarray) -> mpmath.mpf:
    return min(mp.eigsy(mp.matrix(((matrix + matrix.T) / 2).tolist()), eigvals_only=True))


def test_norms_are_rounded_upwards() -> None:
    """Flat matrices of whole numbers, at which the bounds are attained up to rounding."""
    g = torch.Generator().manual_seed(0)
    pairs = Pairs(3)
    for _ in range(100):
        u, v = integers(g, 5), integers(g, 3)
        squares = [int(u @ u), int(v @ v)]
        product_of_both = mpmath.sqrt(squares[0] * squares[1])
        assert float(largest_eigenvalues_by_squaring(u[:, None] * u)) >= squares[0]
        assert float(spectral_norm(u[:, None] * v)) >= product_of_both
        form = pairs.packed(v[:, None] * v)
        assert float(each_form_norm(form[None], pairs)) >= squares[1]
        assert float(form_norm(u[:2, None] * form, pairs)) >= 0
        moved_by = exact(u[:, None] * v, 0.5)
        assert float(spectral_norm(moved_by)) >= product_of_both + 0.5


def test_ellipsoids_are_rounded_outwards() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(25):
        B, u, w = normal(g, 3, 4), normal(g, 4), normal(g, 3)
        flat = u[:, None] * u
        Bd, Ud, wd = many_digits(B), many_digits(flat), many_digits(w)
        assert smallest_eigenvalue(many_digits(ellipsoid_image(B, flat)) - Bd @ Ud @ Bd.T) >= 0
        turned = normal(g, 3, 4)
        turned = B + 1e-3 * turned / turned.norm()
        Td = many_digits(turned)
        assert (
            smallest_eigenvalue(many_digits(ellipsoid_image(exact(B, 1.001e-3), flat)) - Td @ Ud @ Td.T) >= 0
        )
        assert smallest_eigenvalue(many_digits(gram(B)) - Bd @ Bd.T) >= 0
        assert smallest_eigenvalue(many_digits(gram(exact(B, 1.001e-3))) - Td @ Td.T) >= 0
        assert smallest_eigenvalue(many_digits(product(flat, flat, flat)) - Ud * Ud * Ud) >= 0
        weights = torch.rand(1, 1, 2, generator=g, dtype=torch.float64)
        mixed = mixture(weights, torch.stack([flat, 2 * flat])[None])[0, 0]
        share = many_digits(weights[0, 0])
        assert smallest_eigenvalue(many_digits(mixed) - (share[0] + 2 * share[1]) * Ud) >= 0
        whole = integers(g, 3)
        square = whole[:, None] * whole
        together = many_digits(ellipsoid_sum(square, 9 * square)) - 16 * many_digits(square)
        assert smallest_eigenvalue(together) >= 0
        measured = exact(square, 0.25)
        assert smallest_eigenvalue(many_digits(enclosing(measured) - square) - 0.25 * np.eye(3)) >= -1e-9
        width = half_widths(square, torch.stack([w, w + 1]))[0]
        assert float(width) >= abs((wd * many_digits(whole)).sum())
        assert float(half_widths(square, exact(w[None], 0.1))[0]) >= float(width) + 0.099 * whole.norm()


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda a, b: a @ b,
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: 0.1 - a,
    "entrywise product": lambda a, b: a * b,
    "of a column": lambda a, b: a[:, :1] * b,
    "quotient": lambda a, b: a / b[:, :1],
    "square": lambda a, b: a**2,
    "row sums": lambda a, b: a.sum(1),
    "means": lambda a, b: a.mean(1),
    "repeated rows": lambda a, b: a[[0, 0, 1]] * 1.1,
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_bounds_its_own_rounding_and_given_errors(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    rule = RULES[name]
    for _ in range(5):
        a, b = normal(g, 3, 3), 3 + normal(g, 3, 3).clamp(-2, 2)
        value, error = settled(rule(exact(a), exact(b)))
        true = rule(many_digits(a), many_digits(b))
        distance = frobenius(many_digits(value) - true)
        assert 0 < distance <= error <= 1e-12
        for noises in ((1e-3, 0.0), (0.0, 1e-3)):
            moved_a, moved_b = a + noises[0] * normal(g, 3, 3), b + noises[1] * normal(g, 3, 3)
            told = [exact(m, float((m - o).norm()) * (1 + 1e-9)) for m, o in ((moved_a, a), (moved_b, b))]
            value, error = settled(rule(*told))
            assert frobenius(many_digits(value) - true) <= error


def test_repeated_entries_repeat_their_errors() -> None:
    x = exact(torch.zeros(3, dtype=torch.float64), 1.0)
    assert x[torch.tensor([0, 0, 1, 0])].error >= math.sqrt(3)
    assert x.expand(4, 3).error >= 2
    assert (x[:, None] + torch.zeros(3, 5, dtype=torch.float64)).error >= math.sqrt(5)
    parts = x.new_zeros(2, 3)
    parts[0], parts[1] = x, x
    assert math.sqrt(2) <= parts.error <= 1.5


@pytest.mark.parametrize(
    ("function", "many"),
    [
        (torch.exp, mpmath.exp),
        (torch.erfc, mpmath.erfc),
        (torch.tanh, mpmath.tanh),
        (torch.sqrt, mpmath.sqrt),
    ],
)
def test_functions_of_one_variable_bound_given_errors(function: Any, many: Any) -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = 0.2 + normal(g, 6).abs()
        true = np.vectorize(many)(many_digits(x))
        value, error = settled(function(exact(x)))
        assert 0 < frobenius(many_digits(value) - true) <= error <= 1e-13
        wrong = x + 1e-3 * normal(g, 6)
        value, error = settled(function(exact(wrong, float((wrong - x).norm()))))
        assert 0 < frobenius(many_digits(value) - true) <= error


@pytest.mark.parametrize(("of_scores", "noise"), [(0.0, 0.0), (1e-4, 1e-4), (0.0, 1e-4)])
def test_weights_bound_the_errors_of_sums_with_them(of_scores: float, noise: float) -> None:
    """Softmax of wrong scores, and sums of wrong values with such weights; one row has one heavy weight."""
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        scores, x = normal(g, 1, 3, 4), normal(g, 1, 4, 2)
        scores[0, 0, 0] += 20
        each = normal(g, 1, 3, 4, 2)
        errors_of = [s * normal(g, *t.shape) for s, t in ((of_scores, scores), (noise, x), (noise, each))]
        told = [
            exact(t + e, float(e.norm()) * (1 + 1e-9))
            for t, e in zip((scores, x, each), errors_of, strict=True)
        ]
        P = told[0].softmax(-1)
        many = np.vectorize(mpmath.exp)(many_digits(scores[0]))
        many = many / many.sum(1, keepdims=True)
        X, Y = many_digits(x[0]), many_digits(each[0])
        batch = np.stack([many[i] @ Y[i] for i in range(3)])
        cases = {
            "weights": (P[0], many),
            "values": ((P @ told[1])[0], many @ X),
            "rows": (torch.einsum("hij,hije->hie", P, told[2])[0], batch),
            "columns": (torch.einsum("hij,hije->hje", P, told[2])[0], (many[..., None] * Y).sum(0)),
            "all": (torch.einsum("hij,hije->he", P, told[2])[0], (many[..., None] * Y).sum((0, 1))),
            "entries": ((P[..., None] * told[2])[0], many[..., None] * Y),
        }
        for name, (found, true) in cases.items():
            value, error = settled(found)
            assert 0 < frobenius(many_digits(value) - true) <= error, name
            assert error <= 100 * (noise + of_scores) + 1e-11, name
        entry = frobenius(many_digits(plain(P)[0]) / many - 1)
        assert entry <= math.sqrt(12) * P.relative
    # Errors of values may all count where a sum goes over rows and columns.
    P = exact(40 * torch.eye(3, dtype=torch.float64)[None]).softmax(-1)
    wrong = exact(torch.zeros(1, 3, 3, 1, dtype=torch.float64), 1.0)
    assert torch.einsum("hij,hije->he", P, wrong).error >= math.sqrt(3)


def test_what_has_no_rule_is_not_rounded_silently() -> None:
    x = exact(torch.ones(3, 3, dtype=torch.float64))
    assert isinstance(x + 1, Rounded)
    for forbidden in (torch.cos, torch.linalg.inv, torch.cumsum):
        with pytest.raises((MissingRuleError, TypeError)):
            forbidden(x)
    with pytest.raises(MissingRuleError, match="new_zeros"):
        torch.zeros(3, 3, dtype=torch.float64)[0] = x[0]
    with pytest.raises(MissingRuleError, match="sum one operand"):
        torch.einsum("ij,ik->k", x, x)


class Noise:
    """Adds visible errors to all that the expansion keeps, and says so, or does not."""

    def __init__(self, size: float, told: bool = True, seed: int = 0, calls: Any = None) -> None:
        self.size, self.told, self.generator = size, told, torch.Generator().manual_seed(seed)
        self.calls, self.count = calls, -1

    def __call__(self, value: Tensor) -> tuple[Tensor, float]:
        number, error = settled(value)
        self.count += 1
        if number.ndim < 2 or (self.calls is not None and self.count not in self.calls):
            return number, error
        noise = normal(self.generator, *number.shape)
        noise *= self.size * (number.norm() + 1e-3) / noise.norm()
        return number + noise, error + float(noise.norm()) * (1 + 1e-9) * self.told


def noisy(monkeypatch: pytest.MonkeyPatch, noise: Noise) -> None:
    for module in (error_propagation, margin_expansion):
        monkeypatch.setattr(module, "settled", noise)


@pytest.mark.parametrize(
    ("make", "order"),
    others_slow(
        all_pairs((post_norm, pre_norm, decoder), (2, 3)), [(post_norm, 2), (pre_norm, 3), (decoder, 2)]
    ),
)
def test_the_margin_stays_above_its_bound_with_visible_errors(
    order: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, x = make(0, n=3, d=4)
    injection = moved(x, [1])
    functional, offset = network.readout[0] - network.readout[1], network.offset[0] - network.offset[1]
    broken = 0
    for size, told, seed in ((1e-6, True, 0), (1e-3, True, 1), *((1e-6, False, seed) for seed in range(4))):
        with monkeypatch.context() as patch:
            noisy(patch, Noise(size, told, seed))
            found = expanded(order, network, x, injection, functional, float(offset))
        for epsilon in (size, 0.05):
            lower = found(epsilon).lower
            g = torch.Generator().manual_seed(1)
            for step in range(10):
                delta = normal(g, injection.shape[2]) if step else -found.first.gradient
                logits = network.logits(x + injection @ (epsilon * delta / delta.norm()))
                below = float(logits[0] - logits[1]) < lower - 1e-13
                assert not (told and below)
                broken += below
    assert broken  # errors that are not told are seen


# Which calls of ``settled`` keep what, in a network of nine stages: each state is kept before the stage's own
# Jacobian, unless it is attention, and that by the input of the second attention, after it; tangents, the
# functional, then adjoints and their derivatives in turns.
STATES = [0, 1, 3, 5, 7, 9, 12, 15, 18]
CALLS: dict[str, tuple[Any, Any]] = {
    "states": (error_propagation, STATES),
    "jacobians": (error_propagation, [call for call in range(21) if call not in STATES]),
    "tangents": (margin_expansion, range(9)),
    "functional": (margin_expansion, [9]),
    "adjoints": (margin_expansion, range(10, 28, 2)),
    "derivatives of adjoints": (margin_expansion, range(11, 28, 2)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_the_expansion_is_exact_up_to_the_stated_residuals(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, x = post_norm(3, n=3, d=4)
    injection = moved(x, [1])
    functional, offset = network.readout[0] - network.readout[1], network.offset[0] - network.offset[1]
    with monkeypatch.context() as patch:
        module, calls = CALLS[kind]
        noise = Noise(1e-3, calls=calls)
        patch.setattr(module, "settled", noise)
        found = expanded(2, network, x, injection, functional, float(offset))
    first, epsilon = found.first, 0.02
    g = torch.Generator().manual_seed(0)
    delta = normal(g, injection.shape[2])
    delta = epsilon * delta / delta.norm()
    states = list(network.states(x + injection @ delta))
    changes = [s - t for s, t in zip(states, first.states, strict=True)]
    e = [c - t @ delta for c, t in zip(changes, first.tangents, strict=True)]
    model = first.margin + first.gradient @ delta + delta @ first.hessian @ delta / 2
    for place, stage in enumerate(network.stages):
        at, a = first.states[place], first.adjoints[place + 1]

        def second(tangent: Tensor, at: Tensor = at, stage: Any = stage) -> Tensor:
            return stage.second(at, tangent[..., None], Pairs(1))[..., 0]

        change = changes[place]
        R = states[place + 1] - stage.value(at) - stage.push(at, change[..., None])[..., 0]
        rho = e[place + 1] - stage.push(at, e[place][..., None])[..., 0]
        model = model + ((first.bent[place] @ delta) * rho).sum()
        model = model + (a * (R - second(change) / 2 + second(e[place]) / 2)).sum()
    margin = (functional * states[-1]).sum() + offset
    stated = found.bounds(epsilon)
    loss = rounding_loss(found.residuals, stated.errors, epsilon) + first.rounding_loss(epsilon)
    assert float((margin - model).abs()) <= loss
    # Wrong Jacobians change the bound alone, and not the expansion.
    assert kind == "jacobians" or float((margin - model).abs()) > loss / 1000
    # What the residuals add to the errors of the tokens is within the ellipsoids, too.
    for shape, own in zip(stated.errors, e, strict=True):
        reach = half_widths(plain(shape), torch.nn.functional.normalize(own, dim=1)[:, None])[:, 0]
        assert bool((own.norm(dim=1) <= reach + 1e-15).all())


def test_residuals_of_jacobians_cover_visible_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = post_norm(3, n=3, d=4)
    right = error_propagation.partial_jacobians(network, x)
    for call in range(21):
        with monkeypatch.context() as patch:
            patch.setattr(error_propagation, "settled", Noise(1e-3, calls=[call]))
            at = error_propagation.partial_jacobians(network, x)
        own = [step.own.error for step in at.steps if step.own is not None]
        every = [*at.state_errors, *own, *(error for stage in at.residuals for error in stage)]
        assert len(every) == 21
        assert (error := max(every)) > 1e-5
        if call in (8, 2):  # the Jacobian of the second attention; that of the first norm
            found, true = (
                plain(each.steps[1].own) if call == 2 else each.steps[4].sources[0] for each in (at, right)
            )
            assert 0.9 * error <= float(torch.dist(found, true)) <= error


def test_a_jacobian_that_is_not_known_counts_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose weights stand still adds no remainder of its own to what comes along its Jacobian."""
    g = torch.Generator().manual_seed(0)
    first = feed_forwards(0, "silu")[0].stages[0]
    mean = attention(g, 5, 1, torch.arange(2))
    mean = replace(mean, query=0 * mean.query, query_bias=0 * mean.query_bias)
    network = Network((first, Stage("mean", mean, ALL)), normal(g, 2, 2, 5), normal(g, 2))
    x, count = normal(g, 2, 5), 0

    def unknown(value: Tensor) -> tuple[Tensor, float]:
        nonlocal count
        number, error = settled(value)
        count += 1  # the fourth is the Jacobian of the attention, after two states and the first Jacobian
        return (0 * number, error + float(number.norm())) if count == 4 else (number, error)

    with monkeypatch.context() as patch:
        patch.setattr(error_propagation, "settled", unknown)
        found = expanded(2, network, x, moved(x, [0]), network.readout[0])
    assert count == 4
    for epsilon in (0.1, 0.3):
        delta = epsilon * torch.nn.functional.normalize(normal(g, 5), dim=0)
        after = list(network.states(x + moved(x, [0]) @ delta))[-1]
        e = after - found.first.states[-1] - found.first.tangents[-1] @ delta
        reach = half_widths(
            plain(found.bounds(epsilon).errors[-1]), torch.nn.functional.normalize(e)[:, None]
        )
        assert bool((e.norm(dim=1) > 1e-5).all())
        assert bool((e.norm(dim=1) <= reach[:, 0]).all())


@pytest.mark.parametrize("make", [post_norm, decoder])
@pytest.mark.parametrize("seed", range(2))
def test_the_margin_of_many_digits_is_as_close_as_stated(make: Any, seed: int) -> None:
    network, x = make(seed, n=3, d=4)
    injection = moved(x, [1])
    functional, offset = network.readout[0] - network.readout[1], network.offset[0] - network.offset[1]
    found = expanded(2, network, x, injection, functional, float(offset))
    for epsilon in (1e-12, 0.01):
        delta = normal(torch.Generator().manual_seed(seed), injection.shape[2])
        delta = -found.first.gradient if seed % 2 else delta
        state = many_digits(x) + many_digits(injection) @ many_digits(0.999 * epsilon * delta / delta.norm())
        for stage in network.stages:
            own = exact_value(stage.map, state[:, stage.branch])
            kept = state[plain(stage.rows).numpy()] if isinstance(stage.rows, Tensor) else state
            own = own if stage.residual is None else own + kept[:, stage.residual]
            state = np.concatenate([kept, own], 1) if stage.keep else own
        logits = (many_digits(network.readout) * state).sum((1, 2)) + many_digits(network.offset)
        margin, losses = logits[0] - logits[1], found(epsilon)
        assert margin >= losses.lower
        if epsilon < 1e-9:
            moved_by = abs(margin - found.first.margin)
            assert 0 < moved_by <= losses.rounding + 2 * losses.polynomial
