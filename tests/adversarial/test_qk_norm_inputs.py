"""Tokens with a query or key of zero, against dense Jacobians and the bound on the ball."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.adversarial.qk_norm_inputs import zero_query_or_key_inputs
from howsmooth.attention import LayerNorm, RMSNorm, Rotary
from howsmooth.bounds import any_scores_ball_upper_bound
from tests._steepest import dense_norm

N, D, KEY, RADIUS = 6, 20, 4, 3.0


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotary() -> Rotary:
    angles = torch.arange(N, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1]).double()
    return Rotary(angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))


def normed(
    *, heads: int = 1, causal: bool = False, turned: bool = True, kind: str = "rms"
) -> hs.SelfAttention:
    """Attention whose queries and keys are normalised, head by head or (``whole``) together."""
    width = heads * KEY if kind == "whole" else KEY
    gains = [1 + 0.3 * draw(seed, width) for seed in (5, 6)]
    made = LayerNorm if kind == "layer" else RMSNorm
    shift = {"bias": None} if kind == "layer" else {}
    query_norm, key_norm = (made(gain, eps=1e-6, **shift) for gain in gains)
    return hs.SelfAttention(
        *(draw(seed, heads, KEY, D) / D**0.5 for seed in (1, 2, 3)),
        query_bias=0.1 * draw(4, heads, KEY),
        causal=causal,
        rotary=rotary() if turned else None,
        query_norm=query_norm,
        key_norm=key_norm,
    )


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 0.1),
        ({"causal": True, "turned": False}, 0.1),
        ({"kind": "layer", "causal": True}, 0.1),
        # The other head takes a part of the length that one norm gives to both.
        ({"kind": "whole", "heads": 2}, 0.03),
    ],
)
def test_they_come_near_the_bound_on_the_ball(options: dict[str, bool | int | str], least: float) -> None:
    f = normed(**options)
    bound = any_scores_ball_upper_bound(f, N, RADIUS).value
    found = {}
    for name, x in zero_query_or_key_inputs(f, N, RADIUS):
        assert float(x.norm(dim=-1).max()) <= RADIUS * (1 + 1e-12)
        found[name] = dense_norm(f, x) / bound
    assert max(found.values()) <= 1
    assert max(found.values()) > least
    assert max(ratio for name, ratio in found.items() if "key" in name) > least / 2
    # The random tokens of an ascent are far from them.
    x = draw(9, N, D)
    assert dense_norm(f, RADIUS * x / x.norm(dim=-1, keepdim=True)) / bound < 0.01


def test_a_zero_query_has_the_constant_of_the_page() -> None:
    """One query of zero in a row that sees all keys alike, without bias, gain or rotation."""
    plain = normed(turned=False)
    gain = torch.ones(KEY, dtype=torch.float64)
    f = plain._rebuilt(query_bias=None, query_norm=RMSNorm(gain, 1e-6), key_norm=RMSNorm(gain, 1e-6))
    x = dict(zero_query_or_key_inputs(f, 5, RADIUS))["zero query, head 0"]
    values = (x @ f.value[0].mT).norm(dim=-1)[:-1].min()
    steep = torch.linalg.matrix_norm(f.query[0], 2) / 1e-3
    page = abs(f.scale) * (1 - 1 / 5) * KEY**0.5 * values * steep
    assert dense_norm(f, x) > 0.99 * float(page)


def test_an_ascent_starts_from_them() -> None:
    f = normed(causal=True)
    found = hs.adversarial.ascend(f, N, RADIUS, steps=2, random_starts=1)
    assert "zero" in found.start
    assert found.value == pytest.approx(dense_norm(f, found.x), rel=1e-3)
    assert zero_query_or_key_inputs(f._rebuilt(query_norm=None, key_norm=None), N, RADIUS) == []


@pytest.mark.parametrize("eps", [0.1, 1e-6])
def test_queries_and_keys_of_one_dimension(eps: float) -> None:
    """They have no second direction, into which a key would be turned."""
    norm = RMSNorm(torch.ones(1, dtype=torch.float64), eps=eps)
    f = hs.SelfAttention(*(draw(seed, 1, 1, 3) for seed in (1, 2, 3)), query_norm=norm, key_norm=norm)
    found = zero_query_or_key_inputs(f, N, RADIUS)
    assert {name.split(",")[0] for name, _ in found} >= {"zero query", "zero key 0"}
    bound = any_scores_ball_upper_bound(f, N, RADIUS).value
    for _, x in found:
        assert bool((x.norm(dim=-1) <= RADIUS * (1 + 1e-12)).all())
        assert dense_norm(f, x) <= bound
