"""Token-wise bounds against dense Jacobians, and the case in which the bound on a ball is attained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import token_wise_ball_upper_bound, token_wise_upper_bound
from tests._cases import random_attention, tokens


def in_ball(x: Tensor, radius: float) -> Tensor:
    return radius * x / x.norm(dim=-1).max()


def test_the_bound_on_a_ball_is_attained_by_many_tokens() -> None:
    """Half of the tokens at R u₁, half at −R u₁, and one at R u₂, with A = aI: the row of the last."""
    a, radius, n = 1.3, 0.9, 40_000
    identity = torch.eye(2, dtype=torch.float64)
    f = hs.SelfAttention(identity[None], a * identity[None], identity[None], scale=1.0)
    bound = token_wise_ball_upper_bound(f, radius).value
    assert bound == pytest.approx((1 + (a * radius**2) ** 2) ** 0.5 + a * radius**2, rel=1e-9)
    x = torch.zeros(n + 1, 2, dtype=torch.float64)
    x[: n // 2, 0], x[n // 2 : n, 0], x[n, 1] = radius, -radius, radius

    def last(x: Tensor) -> Tensor:
        return torch.softmax(a * x[-1] @ x.mT, dim=-1) @ x

    e = torch.func.vjp(last, x)[1](identity[0])[0]
    moved = torch.func.jvp(last, (x,), (torch.nn.functional.normalize(e, dim=-1),))[1]
    assert bound * (1 - 5e-4) <= float(moved.norm()) <= bound


def test_it_bounds_what_influence_attains_with_many_tokens() -> None:
    f, radius = random_attention(0, heads=1, d=2, d_out=2, biases=False, causal=True), 1.5
    x = in_ball(tokens(1, 24, 2), radius)
    attained = hs.influence(f, x).token_wise.lower
    assert attained <= token_wise_upper_bound(f, x).value <= token_wise_ball_upper_bound(f, radius).value


def test_huge_radius_and_zero_matrix_stay_finite() -> None:
    f = random_attention(0, heads=2)
    assert token_wise_ball_upper_bound(f, 1e200).log_value == pytest.approx(2 * 200 * 2.302585, rel=0.02)
    zero = hs.SelfAttention(*(torch.zeros(1, 2, 3, dtype=torch.float64) for _ in range(3)))
    assert token_wise_ball_upper_bound(zero, 1.0).value == 0.0
    assert token_wise_upper_bound(zero, tokens(0, 4, 3)).value == 0.0
