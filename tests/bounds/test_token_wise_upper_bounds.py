"""Token-wise bounds against dense Jacobians, and the case in which the bound on a ball is attained."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import token_wise_ball_upper_bound, token_wise_upper_bound
from tests._cases import random_attention, tokens
from tests._selection import others_slow

MASKS = {
    "unmasked": {},
    "causal": {"causal": True},
    "window": {"window": 2},
}


def token_move(f: hs.SelfAttention, x: Tensor, restarts: int = 12, steps: int = 40) -> float:
    """A lower limit of max_i sup |Σ_j J_ij e_j|, by ascent on the dense Jacobian."""
    blocks = torch.func.jacrev(f)(x).transpose(1, 2)
    u = tokens(50, blocks.shape[0], restarts, blocks.shape[2])
    for _ in range(steps):
        e = torch.nn.functional.normalize(torch.einsum("ijab,ira->irjb", blocks, u), dim=-1)
        image = torch.einsum("ijab,irjb->ira", blocks, e)
        u = torch.nn.functional.normalize(image, dim=-1)
    return float(image.norm(dim=-1).max())


def in_ball(x: Tensor, radius: float) -> Tensor:
    return radius * x / x.norm(dim=-1).max()


@pytest.mark.parametrize(
    ("heads", "mask"),
    others_slow(itertools.product([1, 3], MASKS), [(3, "unmasked"), (1, "causal"), (3, "window")]),
)
def test_no_tokens_move_an_output_further(heads: int, mask: str) -> None:
    closest = 0.0
    for seed in range(12):
        f = random_attention(seed, heads=heads, temperature=2.0, d=3, d_out=3, **MASKS[mask])
        for radius in (0.2, 1.0, 3.0):
            x = in_ball(tokens(seed, 6, 3), radius)
            truth = token_move(f, x)
            ball = token_wise_ball_upper_bound(f, radius)
            assert ball.holds
            assert truth <= ball.value
            closest = max(closest, truth / ball.value)
            if heads == 1:
                local = token_wise_upper_bound(f, x)
                assert truth <= local.value <= ball.value
                assert truth >= 0.3 * local.value
    assert closest > 0.2  # a bound far from every truth would pass by its size alone


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
    x = in_ball(tokens(1, 64, 2), radius)
    attained = hs.influence(f, x).token_wise.lower
    assert attained <= token_wise_upper_bound(f, x).value <= token_wise_ball_upper_bound(f, radius).value


def test_huge_radius_and_zero_matrix_stay_finite() -> None:
    f = random_attention(0, heads=2)
    assert token_wise_ball_upper_bound(f, 1e200).log_value == pytest.approx(2 * 200 * 2.302585, rel=0.02)
    zero = hs.SelfAttention(*(torch.zeros(1, 2, 3, dtype=torch.float64) for _ in range(3)))
    assert token_wise_ball_upper_bound(zero, 1.0).value == 0.0
    assert token_wise_upper_bound(zero, tokens(0, 4, 3)).value == 0.0
