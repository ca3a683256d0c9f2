"""Measures of weighted atoms, and maps called on them."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure
from tests._cases import ACTING, CASES, D, random_attention, rotary, tokens

MULTIPLICITIES = torch.tensor([1, 3, 2, 1])
SHARES = MULTIPLICITIES.double() / 7
N = len(MULTIPLICITIES)


def _counted(x: Tensor, **keywords: object) -> DiscreteMeasure:
    """Atoms with the weights of their multiplicities."""
    return DiscreteMeasure(x, SHARES, **keywords)


def naive_push_forward(
    f: hs.SelfAttention, x: np.ndarray, weights: np.ndarray, positions: np.ndarray | None
) -> np.ndarray:
    """Γ_μ(s_i, x_i) from Definitions 2.4, 2.6 and 2.2, one atom and one head at a time."""
    q, k, v, o = (t.numpy() for t in (f.query, f.key, f.value, f.output))
    bq, bk, bv = (t.numpy() for t in (f.query_bias, f.key_bias, f.value_bias))
    images = []
    for i in range(len(x)):
        seen = [j for j in range(len(x)) if positions is None or positions[j] <= positions[i]]
        heads = []
        for h in range(f.heads):
            g = h * f.kv_heads // f.heads
            over, under = 0.0, 0.0
            for j in seen:
                kernel = weights[j] * np.exp(f.scale * (q[h] @ x[i] + bq[h]) @ (k[g] @ x[j] + bk[g]))
                over, under = over + kernel * (v[g] @ x[j] + bv[g]), under + kernel
            heads.append(over / under)
        images.append(o @ np.concatenate(heads) + f.output_bias.numpy())
    return np.stack(images)


# ---- push-forward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_push_forward_is_the_definition(causal: bool, kv_heads: int) -> None:
    f = random_attention(1, heads=4, kv_heads=kv_heads, causal=causal)
    x = tokens(0, 5, D)
    weights = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)
    positions = torch.tensor([0.5, 0.0, 0.5, 1.0, 0.7], dtype=torch.float64)
    measure = DiscreteMeasure(x, weights, positions=positions)
    image = f(measure)
    seen = positions.numpy() if causal else None
    expected = naive_push_forward(f, x.numpy(), weights.numpy(), seen)
    np.testing.assert_allclose(image.points.numpy(), expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(image.log_weights, measure.log_weights)
    torch.testing.assert_close(image.weights, weights)
    assert torch.equal(image.positions, positions)


@pytest.mark.parametrize("name", ACTING)
def test_weights_are_multiplicities(name: str) -> None:
    """A measure of weighted atoms moves as the tokens with repetitions do, ties at one position."""
    x = tokens(1, N, D)
    f = CASES[name](int(MULTIPLICITIES.sum()))
    positions = torch.arange(1, N + 1) / N
    image = f(_counted(x, positions=positions))
    repeated = f(
        DiscreteMeasure(
            x.repeat_interleave(MULTIPLICITIES, 0), positions=positions.repeat_interleave(MULTIPLICITIES)
        )
    )
    torch.testing.assert_close(
        image.points.repeat_interleave(MULTIPLICITIES, 0), repeated.points, rtol=1e-12, atol=1e-12
    )
    if "causal" not in f.describe():
        torch.testing.assert_close(repeated.points, f(x.repeat_interleave(MULTIPLICITIES, 0)))


@pytest.mark.parametrize("name", ACTING)
def test_a_sequence_moves_as_its_tokens(name: str) -> None:
    x = tokens(2, 6, D)
    f = CASES[name](6)
    measure = DiscreteMeasure.sequence(x)
    image = f(measure)
    torch.testing.assert_close(image.points, f(x), rtol=1e-13, atol=1e-13)
    assert torch.equal(image.positions, torch.arange(1, 7, dtype=torch.float64) / 6)
    assert torch.equal(image.log_weights, measure.log_weights)


def test_unmasked_maps_do_not_look_at_positions_and_keep_them() -> None:
    f, x = random_attention(3), tokens(3, 4, D)
    positions = torch.tensor([0.9, 0.1, 0.1, 0.3])
    image = f(DiscreteMeasure(x, positions=positions))
    torch.testing.assert_close(image.points, f(x), rtol=1e-13, atol=1e-13)
    assert torch.equal(image.positions, positions.double())


def test_order_of_atoms_does_not_matter() -> None:
    f, x = random_attention(4, causal=True), tokens(4, 4, D)
    order = torch.tensor([2, 0, 3, 1])
    positions = torch.tensor([0.2, 0.2, 0.9, 0.4])
    image = f(DiscreteMeasure(x, SHARES, positions=positions))
    other = f(DiscreteMeasure(x[order], SHARES[order], positions=positions[order]))
    torch.testing.assert_close(image.points[order], other.points, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("exponent", [700.0, 2000.0, 1e5])
def test_weights_far_below_the_smallest_float(exponent: float) -> None:
    """Two atoms whose scores make up for the weight e^-exponent of one: mpmath has the digits."""
    attn = hs.SelfAttention(*(torch.ones(1, 1, 1, dtype=torch.float64) for _ in range(3)))
    r = exponent**0.5
    points = torch.tensor([[r], [0.3 / r]], dtype=torch.float64)
    logs = torch.tensor([-exponent, 0.0], dtype=torch.float64)
    image = attn(DiscreteMeasure(points, log_weights=logs))
    mpmath.mp.dps = 60
    x = [mpmath.mpf(float(t)) for t in points.flatten()]
    weights = [mpmath.exp(-mpmath.mpf(exponent)), 1 - mpmath.exp(-mpmath.mpf(exponent))]
    for i in range(2):
        kernels = [w * mpmath.exp(x[i] * z) for w, z in zip(weights, x, strict=True)]
        expected = sum(k * z for k, z in zip(kernels, x, strict=True)) / sum(kernels)
        assert float(image.points[i]) == pytest.approx(float(expected), rel=exponent * 1e-15)
    # The weight matters: without it the first atom would see itself alone.
    assert 0.3 * r < float(image.points[0]) < 0.7 * r


def test_gradients_pass_through_a_measure() -> None:
    f = random_attention(5)
    x = tokens(5, 4, D).requires_grad_()
    (f(_counted(x)).points[0] ** 2).sum().backward()
    weighting = Weighting(SHARES.log())
    assert torch.autograd.gradcheck(lambda t: f._forward(t, weighting), (tokens(6, 4, D).requires_grad_(),))
    assert x.grad is not None
    assert bool((x.grad.norm(dim=1) > 0).all())


def test_float32_points_stay_float32() -> None:
    f = random_attention(6)
    x = tokens(7, 4, D)
    image = f.to(dtype=torch.float32)(_counted(x.float()))
    assert image.dtype == torch.float32
    assert image.weights.dtype == torch.float64
    torch.testing.assert_close(image.points.double(), f(_counted(x)).points, rtol=1e-5, atol=1e-5)
    back = image.to(dtype=torch.float64)
    assert back.dtype == torch.float64
    torch.testing.assert_close(back.weights, image.weights)


# ---- the measure itself


def test_mean_and_covariance_are_those_of_the_repeated_tokens() -> None:
    x = tokens(8, N, D)
    measure, repeated = _counted(x), x.repeat_interleave(MULTIPLICITIES, 0)
    torch.testing.assert_close(measure.mean, repeated.mean(dim=0))
    torch.testing.assert_close(measure.covariance, torch.cov(repeated.T, correction=0))


def test_weights_are_normalised_exactly() -> None:
    x = tokens(9, 3, D)
    measure = DiscreteMeasure(x, torch.tensor([0.2, 0.3, 0.5000004]))
    assert float(measure.weights.sum()) == pytest.approx(1.0, abs=1e-15)
    logs = DiscreteMeasure(x, log_weights=torch.tensor([-2000.0, 0.0, -800.0]).double()).log_weights
    assert logs.tolist() == [-2000.0, 0.0, -800.0]


def test_merged_puts_coinciding_atoms_together() -> None:
    x = tokens(10, N, D)
    merged = DiscreteMeasure(x.repeat_interleave(MULTIPLICITIES, 0)).merged()
    assert torch.equal(merged.points, x)
    torch.testing.assert_close(merged.weights, SHARES)
    apart = DiscreteMeasure(x[[0, 1, 0]], positions=torch.tensor([0.1, 0.1, 0.2]))
    assert apart.merged() is apart
    assert apart.merged(0.5).n == 3
    assert DiscreteMeasure(torch.tensor([[0.0], [-0.0]])).merged().n == 1


def test_merged_adds_weights_that_are_no_floats() -> None:
    logs = torch.tensor([-2000.0, 0.0, -2000.0], dtype=torch.float64)
    merged = DiscreteMeasure(torch.tensor([[1.0], [2.0], [1.0]]), log_weights=logs).merged()
    assert merged.points.flatten().tolist() == [1.0, 2.0]
    assert merged.log_weights.tolist() == pytest.approx([-2000.0 + np.log(2), 0.0], abs=1e-12)


def test_merged_with_a_tolerance_joins_chains_at_their_mean() -> None:
    points = torch.tensor([[0.0], [5.0], [0.2], [0.4], [5.1]], dtype=torch.float64)
    weights = torch.tensor([0.4, 0.1, 0.1, 0.1, 0.3], dtype=torch.float64)
    merged = DiscreteMeasure(points, weights).merged(0.25)
    torch.testing.assert_close(merged.weights, torch.tensor([0.6, 0.4]).double())
    torch.testing.assert_close(merged.points.flatten(), torch.tensor([0.1, 5.075]).double())
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="tolerance"):
            merged.merged(tolerance)


def test_merging_commutes_with_the_map() -> None:
    f = random_attention(11)
    x = tokens(11, N, D).repeat_interleave(MULTIPLICITIES, 0)
    one, two = f(DiscreteMeasure(x).merged()), f(DiscreteMeasure(x)).merged(1e-12)
    torch.testing.assert_close(one.points, two.points)
    torch.testing.assert_close(one.log_weights, two.log_weights)


def test_repr_says_what_it_is() -> None:
    x = tokens(12, 3, 2)
    assert repr(DiscreteMeasure.sequence(x)) == "DiscreteMeasure(n=3, d=2, equal weights, with positions)"
    weighted = DiscreteMeasure(x, log_weights=torch.tensor([-2000.0, 0.0, -1.0e3]))
    assert repr(weighted) == "DiscreteMeasure(n=3, d=2, log-weights over a range of 2e+03)"


# ---- refusals

X = torch.ones(3, 2, dtype=torch.float64)
THIRDS = torch.full((3,), 1 / 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("build", "argument", "words"),
    [
        (lambda: DiscreteMeasure([[1.0]]), "points", "list"),
        (lambda: DiscreteMeasure(torch.ones(3)), "points", "shape (3,)"),
        (lambda: DiscreteMeasure(torch.ones(0, 2)), "points", "n >= 1"),
        (lambda: DiscreteMeasure(torch.ones(2, 0)), "points", "d >= 1"),
        (lambda: DiscreteMeasure(torch.ones(2, 2, dtype=torch.int64)), "points", "int64"),
        (lambda: DiscreteMeasure(torch.ones(2, 2).half()), "points", "float16"),
        (lambda: DiscreteMeasure(X * float("nan")), "points", "NaN"),
        (lambda: DiscreteMeasure(X, [1.0, 0.0, 0.0]), "weights", "list"),
        (lambda: DiscreteMeasure(X, torch.tensor([1.5, -0.5, 0.1])), "weights", "-0.5"),
        (lambda: DiscreteMeasure(X, torch.tensor([0.5, 0.5, 0.0])), "weights", "Leave out"),
        (lambda: DiscreteMeasure(X, torch.tensor([0.5, 0.5, 1e-40])), "weights", "log_weights"),
        (lambda: DiscreteMeasure(X, THIRDS * (1 + 2e-6)), "weights", "a sum of 1.000002"),
        (lambda: DiscreteMeasure(X, torch.tensor([0.5, 0.5, float("nan")])), "weights", "NaN"),
        (lambda: DiscreteMeasure(X, torch.ones(4) / 4), "weights", "shape (4,)"),
        (lambda: DiscreteMeasure(X, torch.tensor([1, 1, 1])), "weights", "int64"),
        (lambda: DiscreteMeasure(X, THIRDS, log_weights=THIRDS.log()), "log_weights", "both"),
        (lambda: DiscreteMeasure(X, log_weights=THIRDS), "log_weights", "a sum of 4.18"),
        (lambda: DiscreteMeasure(X, log_weights=-1e4 * THIRDS), "log_weights", "a sum of exp(-33"),
        (
            lambda: DiscreteMeasure(X, log_weights=torch.tensor([0.0, -torch.inf, -9.0])),
            "log_weights",
            "Leave out",
        ),
        (lambda: DiscreteMeasure(X, positions=torch.tensor([0.0, 0.5, 1.5])), "positions", "1.5"),
        (lambda: DiscreteMeasure(X, positions=torch.tensor([0.0, 0.5, -0.1])), "positions", "-0.1"),
        (lambda: DiscreteMeasure(X, positions=torch.tensor([0.0, 0.5, float("nan")])), "positions", "NaN"),
        (lambda: DiscreteMeasure(X, positions=torch.tensor([0.5])), "positions", "shape (1,)"),
        (lambda: DiscreteMeasure.sequence(torch.ones(3)), "X", "shape (3,)"),
    ],
)
def test_refusals_name_the_argument(build: object, argument: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        build()
    assert caught.value.argument == argument
    assert words in str(caught.value)
    assert isinstance(caught.value, NonFiniteError) == ("NaN or infinity" in str(caught.value))


@pytest.mark.parametrize(
    ("f", "measure", "words"),
    [
        (random_attention(0, causal=True), DiscreteMeasure(tokens(0, 3, D)), "sequence(X)"),
        (random_attention(0), DiscreteMeasure(tokens(0, 3, D + 1)), "dimension 6"),
        (random_attention(0), DiscreteMeasure(tokens(0, 3, D).float()), "float64"),
        (CASES["masked"](3), DiscreteMeasure(tokens(0, 3, D)), "a boolean mask"),
        (CASES["masked"](3), DiscreteMeasure(tokens(0, 4, D)), "a boolean mask"),
        (random_attention(0, rotary=rotary(3, 2)), DiscreteMeasure(tokens(0, 3, D)), "rotary positions"),
        (CASES["sinks"](3), DiscreteMeasure(tokens(0, 3, D)), "sinks"),
        (CASES["score bias"](3), DiscreteMeasure(tokens(0, 3, D)), "a score bias"),
        (
            hs.Residual(hs.Compose(random_attention(0, causal=True), hs.RMSNorm(torch.ones(D).double()))),
            DiscreteMeasure(tokens(0, 3, D)),
            "without positions",
        ),
    ],
)
def test_maps_refuse_measures_on_which_they_do_not_act(f, measure, words) -> None:
    with pytest.raises(ArgumentError) as caught:
        f(measure)
    assert caught.value.argument == "measure"
    assert words in str(caught.value)


def test_maps_refuse_what_is_neither_tokens_nor_a_measure() -> None:
    with pytest.raises(ArgumentError, match="X: expected a tensor of tokens"):
        random_attention(0)([[1.0]])


def test_all_cases_either_act_on_measures_or_are_refused() -> None:
    refused = set()
    for name, build in CASES.items():
        try:
            build(3)(DiscreteMeasure.sequence(tokens(0, 3, D)))
        except ArgumentError:
            refused.add(name)
    assert refused == set(CASES) - set(ACTING)
    assert len(list(itertools.chain(refused, ACTING))) == len(CASES)
