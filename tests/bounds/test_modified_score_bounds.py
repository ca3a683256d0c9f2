"""The bound for any scores against the largest local constants that an ascent finds on the ball."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import Rotary
from howsmooth.bounds import any_scores_ball_upper_bound, best, masked_ball_upper_bound
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.modified_score_bounds import _projected, _turn
from howsmooth.errors import ArgumentError
from tests._cases import CASES, random_attention

N = 5


def largest_constant(f: hs.SelfAttention, n: int, radius: float, starts: int, steps: int = 20) -> float:
    """Climb ‖D_X f‖ over tokens of norm at most ``radius``, by gradients of dense Jacobians."""

    def constant(x: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(torch.func.jacrev(f)(x).reshape(n * f.d_out, n * f.d), ord=2)

    largest, generator = 0.0, torch.Generator().manual_seed(1)
    for start in range(starts):
        x = torch.randn(n, f.d, generator=generator, dtype=torch.float64)
        # Tokens of the ball's surface, of all lengths, and near zero, where norms are steep
        length = (torch.ones(n), torch.rand(n, generator=generator), torch.full((n,), 1e-3))[start % 3]
        x = x / x.norm(dim=-1, keepdim=True) * (radius * length[:, None])
        for _ in range(steps):
            x.requires_grad_()
            value = constant(x)
            (slope,) = torch.autograd.grad(value, x)
            largest = max(largest, float(value.detach()))
            x = (x + 0.3 * radius * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-30)).detach()
            x = x * torch.clamp(radius / x.norm(dim=-1, keepdim=True), max=1.0)
    return largest


def test_the_bound_is_near_to_theorem_a_where_scores_are_plain() -> None:
    for name in ("one head", "causal", "causal window, grouped"):
        f = CASES[name](N)
        assert isinstance(f, hs.SelfAttention)
        f = f.head(0)
        for radius in (0.1, 1.0, 10.0):
            ours = any_scores_ball_upper_bound(f, N, radius).value
            assert 0.999 < ours / masked_ball_upper_bound(f, N, radius).value < 2.0


def test_the_bound_is_nearly_attained() -> None:
    f = CASES["rank one"](N)
    assert isinstance(f, hs.SelfAttention)
    found = largest_constant(f, N, 0.1, starts=4)
    assert 0.75 * any_scores_ball_upper_bound(f, N, 0.1).value < found


@pytest.mark.parametrize("centred", [True, False])
def test_sizes_of_normed_queries_are_attained(*, centred: bool) -> None:
    """A norm is steepest at zero, and longest far away."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    gain = torch.ones(4, dtype=torch.float64)
    norm = hs.LayerNorm(gain, eps=1e-3) if centred else hs.RMSNorm(gain, eps=1e-3)
    size, slope = (float(one.value) for one in _projected(weight, None, norm, 1, Log.of(50.0)))
    at_zero = torch.func.jacrev(lambda x: norm((x @ weight[1].mT)[None])[0])(torch.zeros(6).double())
    assert slope == pytest.approx(float(torch.linalg.matrix_norm(at_zero, ord=2)), rel=1e-9)
    far = torch.randn(1000, 6, generator=generator, dtype=torch.float64)
    far = 50.0 * far / far.norm(dim=-1, keepdim=True)
    longest = float(norm(far @ weight[1].mT).norm(dim=-1).max())
    assert 0.99 * size < longest <= size


def test_the_shortest_query_allows_for_the_rounding_of_its_mean() -> None:
    """The bias less its mean, (−2, −2, 4)/3, is computed as (0, 0, 2), which is longer."""
    norm = hs.LayerNorm(torch.ones(3, dtype=torch.float64), eps=1e-30)
    bias = torch.tensor([[2.0**53, 2.0**53, 2.0**53 + 2]], dtype=torch.float64)
    weight = torch.tensor([[[1.0], [0.0], [-1.0]]], dtype=torch.float64)
    _, slope = _projected(weight, bias, norm, 0, Log.of(1e-9))
    assert float(slope.value) >= math.sqrt(3 * 2) / math.sqrt(24 / 9)


def test_rotary_tables_that_stretch_are_counted() -> None:
    f = CASES["rotary"](N)
    assert isinstance(f, hs.SelfAttention)
    assert f.rotary is not None
    longer = Rotary(1.5 * f.rotary.cos, 1.5 * f.rotary.sin)
    assert _turn(f._rebuilt(rotary=longer), N) == pytest.approx(1.5)
    assert _turn(f, N) == pytest.approx(1.0)


def test_both_norms_bound_the_scores_whatever_the_radius() -> None:
    """From some radius on, the weights' bound stays and the constant grows no faster than the values."""
    f = CASES["norms of queries and keys, rotary, causal"](N)
    assert isinstance(f, hs.SelfAttention)
    small, large = (any_scores_ball_upper_bound(f, N, radius).value for radius in (1e3, 1e4))
    assert large < 10.01 * small


def test_best_and_table_take_every_attention() -> None:
    for name in ("rotary", "sinks, softcap, score bias", "norms of all queries, of all keys"):
        f = CASES[name](N)
        assert isinstance(f, hs.SelfAttention)
        x = torch.randn(N, f.d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert best(f, length=N, radius=2.0) == any_scores_ball_upper_bound(f, N, 2.0)
        assert best(f, x).value >= float(hs.local_lipschitz(f, x).lower)
        assert "any_scores_ball_upper_bound" in set(hs.bounds.table(f, x)["name"])
        with pytest.raises(ArgumentError, match="attention"):
            best(f, length=N, radius=2.0, side="lower")


def test_a_norm_without_epsilon_has_no_bound_and_says_so() -> None:
    norm = hs.RMSNorm(torch.ones(3, dtype=torch.float64), eps=0.0)
    plain = random_attention(0, d=6, key_dim=3, biases=False)
    f = plain._rebuilt(query_norm=norm)
    bound = any_scores_ball_upper_bound(f, N, 1.0)
    assert math.isinf(bound.value)
    assert not bound.holds
    assert "ε > 0" in bound.hypotheses[0].statement


def test_other_maps_and_wrong_lengths_are_refused() -> None:
    with pytest.raises(ArgumentError, match="SelfAttention"):
        any_scores_ball_upper_bound(hs.RMSNorm(torch.ones(3)), N, 1.0)
    with pytest.raises(ArgumentError, match="length"):
        any_scores_ball_upper_bound(CASES["score bias"](N), N + 1, 1.0)


def test_values_of_zero_with_a_bias_and_a_sink_have_the_constant_of_the_sink_s_weight() -> None:
    """The output is the bias times 1 − weight of the sink, s, so the constant is 2s(1 − s) at x = 1."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    f = hs.SelfAttention(one, one, 0 * one, value_bias=one[0], sinks=torch.zeros(1, dtype=torch.float64))
    s = 1 / (1 + math.exp(-1))
    x = torch.ones(1, 1, dtype=torch.float64)
    assert best(f, x).value == pytest.approx(2 * s * (1 - s), rel=1e-9)
    # On the ball, scores of both signs are reckoned with, and s(1 − s) is largest at s = 1/2.
    assert any_scores_ball_upper_bound(f, 1, 1.0).value == pytest.approx(0.5, rel=1e-9)
    # One head without values among several does not hide the others, nor they it.
    pair = f._rebuilt(
        query=torch.cat((one, one)), key=torch.cat((one, one)), value=torch.cat((0 * one, one)),
        value_bias=torch.tensor([[1.0], [0.0]]).double(), sinks=torch.zeros(2, dtype=torch.float64),
    )  # fmt: skip
    found = largest_constant(pair, N, 1.0, starts=2, steps=6)
    assert found <= any_scores_ball_upper_bound(pair, N, 1.0).value < 12 * found


@pytest.mark.parametrize("masking", [{}, {"causal": True}, {"window": 2}])
@pytest.mark.parametrize(("values", "shift"), [(1.0, 0.0), (1.0, 10.0), (1e-8, 1.0)])
@pytest.mark.parametrize("sink", [0.0, pytest.param(10.0, marks=pytest.mark.slow), 20.0])
def test_the_bound_falls_with_the_constant_as_the_sink_grows(
    masking: dict[str, object], values: float, shift: float, sink: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 1, 2, 3, generator=generator, dtype=torch.float64)
    bias = shift * torch.randn(1, 2, generator=generator, dtype=torch.float64)
    sinks = torch.tensor([sink], dtype=torch.float64)
    f = hs.SelfAttention(query, key, values * value, value_bias=bias, sinks=sinks, **masking)  # type: ignore[arg-type]
    found = largest_constant(f, 3, 1.0, starts=2, steps=12)
    assert found <= best(f, length=3, radius=1.0).value < 20 * found


def test_a_norm_without_epsilon_is_named_as_the_reason_of_a_refusal() -> None:
    norm = hs.RMSNorm(torch.ones(3, dtype=torch.float64), eps=0.0)
    f = random_attention(0, d=6, key_dim=3, biases=False)._rebuilt(query_norm=norm)
    with pytest.raises(ArgumentError, match=r"attention: expected .* ε > 0"):
        best(f, length=4, radius=1.0)


@pytest.mark.parametrize("name", ["one head", "multi-head", "sinks, softcap, score bias", "rotary"])
@pytest.mark.parametrize(("size", "values"), [(1e-300, 1e-150), (1e-150, 1e-150), (1e80, 1e150)])
def test_extreme_weights_have_the_bounds_of_their_rescaling(name: str, size: float, values: float) -> None:
    """Longer queries, keys and values of shorter tokens are the same attention."""
    f = CASES[name](N)
    assert isinstance(f, hs.SelfAttention)
    shift = None if f.value_bias is None else f.value_bias * (values / size)
    far = f._rebuilt(query=f.query * size, key=f.key * size, value=f.value * values, value_bias=shift)
    expected = best(f, length=N, radius=2.0).log_value + math.log(values)
    assert best(far, length=N, radius=2.0 / size).log_value == pytest.approx(expected, abs=1e-9)
