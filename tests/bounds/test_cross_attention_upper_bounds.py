"""Bounds for cross-attention against dense Jacobians at many tokens, and against ascent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import cross_attention_ball_upper_bound, cross_attention_upper_bound
from howsmooth.errors import ArgumentError
from howsmooth.scopes import SIDES

EPS = 2.0**-53


def case(seed: int) -> tuple[hs.CrossAttention, Tensor, Tensor]:
    """A small layer of random sizes, features and temperature, with tokens and a memory."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def pick(high: int) -> int:
        return int(torch.randint(1, high + 1, (), generator=generator))

    m, n, d, d_memory, heads = pick(3), pick(4), pick(3), pick(3), pick(3)
    kv_heads = heads if pick(2) == 1 else 1
    temperature = 10.0 ** (2 * float(torch.rand((), generator=generator)) - 1)
    mask = torch.rand(m, n, generator=generator) < 0.7
    mask[:, 0] = True
    f = hs.CrossAttention(
        draw(heads, 2, d) * temperature,
        draw(kv_heads, 2, d_memory),
        draw(kv_heads, 2, d_memory),
        draw(3, heads * 2) if pick(2) == 1 else None,
        query_bias=draw(heads, 2) if pick(2) == 1 else None,
        key_bias=draw(kv_heads, 2) if pick(2) == 1 else None,
        value_bias=draw(kv_heads, 2),
        mask=mask if pick(2) == 1 else None,
        score_bias=draw(heads, m, n) if pick(3) == 1 else None,
    )
    return f, draw(m, d), draw(n, d_memory)


def constants(f: hs.CrossAttention, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The three constants by dense Jacobians; they can be differentiated."""
    of_x, of_y = torch.func.jacrev(f.__call__, argnums=(0, 1))(x, y)
    parts = {"queries": of_x.flatten(2).flatten(0, 1), "memory": of_y.flatten(2).flatten(0, 1)}
    parts["joint"] = torch.cat(list(parts.values()), dim=1)
    return {side: torch.linalg.matrix_norm(parts[side], 2) for side in SIDES}


def rounded(f: hs.CrossAttention, x: Tensor, y: Tensor) -> float:
    """The size of the numbers whose rounding the constant in the queries has, with saturated weights too."""
    q, k, v = f.projections(x, y)
    score = 1 + float(abs(f.scale) * q.norm(dim=-1).max() * k.norm(dim=-1).max())
    W = torch.eye(1).double() if f.output is None else f.output
    values = abs(f.scale) * W.norm() * f.query.norm() * v.norm(dim=-1).max() * k.norm(dim=-1).max()
    return score * float(values)


def in_ball(t: Tensor, radius: float) -> Tensor:
    return t * (radius / t.norm(dim=-1, keepdim=True).clamp_min(radius))


def climb(
    f: hs.CrossAttention, x: Tensor, y: Tensor, side: str, radii: tuple[float, float], steps: int
) -> float:
    """The largest constant that gradient ascent over tokens and memory in their balls finds."""
    at = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    optimiser, best = torch.optim.Adam(at, lr=0.1), 0.0
    for _ in range(steps):
        value = constants(f, *(in_ball(t, r) for t, r in zip(at, radii, strict=True)))[side]
        best = max(best, float(value))
        optimiser.zero_grad()
        (-value).backward()
        optimiser.step()
    return best


def check(seed: int, steps: int) -> dict[str, float]:
    """Check all bounds of one case, and return how much of the bounds on a ball was reached."""
    f, x, y = case(seed)
    radii = 0.3 + 2.0 * (seed % 7) / 7, 0.3 + 2.0 * (seed % 5) / 5
    measured = constants(f, x, y)
    reached = {}
    for side in SIDES:
        at = cross_attention_upper_bound(f, x, y, side=side).value
        assert float(measured[side]) <= at, (seed, side)
        if side == "queries":
            # The bound is sharp, up to the rounding of weights: saturated ones may have smaller derivatives.
            assert at == pytest.approx(float(measured[side]), rel=1e-6, abs=1e3 * EPS * rounded(f, x, y))
        ball = cross_attention_ball_upper_bound(f, len(x), *radii, side=side).value
        found = climb(f, x, y, side, radii, steps)
        assert found <= ball, (seed, side)
        reached[side] = found / ball
    return reached


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_is_exceeded(seed: int) -> None:
    check(seed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_no_bound_is_exceeded_in_many_cases(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check(seed, 25)


def test_the_ball_bounds_are_nearly_reached() -> None:
    """One head: the constant in the queries is reached, and that in the memory within a tenth."""
    f = hs.CrossAttention(*(torch.eye(2, dtype=torch.float64)[None] for _ in range(3)), scale=1.0)
    y = torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    x = torch.zeros(1, 2, dtype=torch.float64)
    ball = cross_attention_ball_upper_bound(f, 1, 1.0, 2.0, side="queries").value
    assert float(constants(f, x, y)["queries"]) == pytest.approx(ball, rel=1e-9)
    # For many queries at one place, a key of weight 1/2 moves with the root of their number.
    R = 30.0
    x = torch.tensor([[0.0, R]], dtype=torch.float64).repeat(9, 1)
    y = y * R / 2
    ball = cross_attention_ball_upper_bound(f, 9, R, R, side="memory").value
    assert 0.9 * ball <= float(constants(f, x, y)["memory"]) <= ball


def test_large_scores_keep_their_rounding() -> None:
    f, x, y = case(3)
    at = cross_attention_upper_bound(f, 1e6 * x, 1e6 * y, side="joint")
    assert math.isfinite(at.log_value)
    assert float(constants(f, 1e6 * x, 1e6 * y)["joint"]) <= at.value


def test_bad_arguments() -> None:
    f, x, y = case(0)
    capped = hs.CrossAttention(f.query, f.key, f.value, softcap=3.0)
    for arguments, words in (
        ((capped, x, y), "soft-capped scores"),
        ((hs.SelfAttention(f.query, f.query, f.query), x, y), "a CrossAttention"),
        ((f, x, None), "memory"),
        ((f, x[:, :0], y), "x: expected tokens"),
    ):
        with pytest.raises(ArgumentError, match=words):
            cross_attention_upper_bound(*arguments)
    with pytest.raises(ArgumentError, match="queries, memory, joint"):
        cross_attention_upper_bound(f, x, y, side="both")


def test_scores_whose_slopes_have_squares_beyond_float64() -> None:
    """A single key has all the weight: then the constant in the memory is that of the values."""
    value = torch.tensor([[[2.0, 1.0], [0.0, -1.0]]], dtype=torch.float64)
    one = torch.ones(1, 1, 2, dtype=torch.float64)
    f = hs.CrossAttention(1e200 * one, one, value)
    x, memory = one.expand(1, 2, 2)[0], one[0]
    found = cross_attention_upper_bound(f, x, memory, side="memory")
    size = 2**0.5 * float(torch.linalg.matrix_norm(value[0], 2))
    assert size <= found.value <= math.inf  # rounding of such scores leaves no digit of the weights
