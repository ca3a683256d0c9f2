"""The ellipsoid and radius of a norm layer, and the absorption of its gain and shift."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.norm_layer_outputs import ellipsoid, norm_radius
from howsmooth.bounds.pre_norm_bounds import absorb_norm, pre_norm_upper_bound
from howsmooth.errors import ArgumentError
from tests._cases import D, random_attention, rotary, tokens


def _norm(kind: str, seed: int, d: int = D, eps: float = 1e-5) -> hs.LayerNorm | hs.RMSNorm:
    generator = torch.Generator().manual_seed(seed)
    gain = torch.randn(d, generator=generator, dtype=torch.float64)
    shift = torch.randn(d, generator=generator, dtype=torch.float64)
    return hs.LayerNorm(gain, shift, eps) if kind == "LayerNorm" else hs.RMSNorm(gain, eps)


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["LayerNorm", "RMSNorm"]),
    d=st.integers(2, 12),
    size=st.floats(1e-3, 1e3),
)
def test_every_output_lies_in_the_ball_and_in_the_ellipsoid(
    seed: int, kind: str, d: int, size: float
) -> None:
    norm = _norm(kind, seed, d)
    x = norm(size * tokens(seed, 20, d))
    assert float(x.norm(dim=-1).max()) <= norm_radius(norm)
    centre, axes = ellipsoid(norm)
    u = torch.linalg.lstsq(axes, (x - centre).mT, driver="gelsd").solution
    torch.testing.assert_close(axes @ u, (x - centre).mT, rtol=0, atol=1e-9 * float(axes.abs().max()))
    assert float(u.norm(dim=0).max()) <= 1 + 1e-9


def test_radius_in_closed_form() -> None:
    # gain 1, no shift: √d, a mean-zero direction being there; one large gain: √d · γ for RMSNorm
    assert norm_radius(hs.RMSNorm(torch.ones(9), 1e-6)) == pytest.approx(3.0, rel=1e-9)
    assert norm_radius(hs.LayerNorm(torch.ones(9), None, 1e-5)) == pytest.approx(3.0, rel=1e-9)
    gain = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert norm_radius(hs.RMSNorm(gain)) == pytest.approx(4.0, rel=1e-9)
    # a shift along the longest axis adds up
    assert norm_radius(hs.LayerNorm(torch.tensor([1.0, 1.0]), torch.tensor([3.0, -3.0]))) == pytest.approx(
        math.sqrt(2) + 3 * math.sqrt(2), rel=1e-9
    )
    # and at right angles to every axis that is left: the hard case of the trust region
    assert norm_radius(hs.LayerNorm(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0]))) == pytest.approx(
        math.sqrt(2 + 18), rel=1e-9
    )
    assert norm_radius(hs.RMSNorm(torch.zeros(3))) == 0.0


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("positions", [False, True])
def test_absorbed_attention_is_attention_after_the_norm(kind: str, positions: bool) -> None:
    norm = _norm(kind, 4, eps=0.3)
    attention = random_attention(5, causal=True, rotary=rotary(7, 4) if positions else None)
    h, s = norm.direction_and_length(tokens(1, 2, 7, D))
    u: Tensor = h / s
    absorbed = absorb_norm(attention, norm)
    torch.testing.assert_close(absorbed(u), attention(norm(tokens(1, 2, 7, D))), rtol=1e-11, atol=1e-11)
    assert float(u.norm(dim=-1).max()) < 1


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"norm: expected a LayerNorm or RMSNorm .*, got Linear"):
        norm_radius(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="dimension 6"):
        absorb_norm(random_attention(0), _norm("RMSNorm", 0, d=5))
    with pytest.raises(ArgumentError, match="attention: expected a SelfAttention"):
        absorb_norm(torch.nn.Linear(2, 2), _norm("RMSNorm", 0))


@pytest.mark.parametrize("seed", range(5))
def test_absorbed_parameters_that_cancel(seed: int) -> None:
    # The products of gain and matrix are one but for rounding, and vanish where the mean is subtracted.
    gain = 1 + torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    row, zero = (1 / gain)[None, None], torch.zeros(1, 1, 4, dtype=torch.float64)
    shift = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) * gain
    norm = hs.LayerNorm(gain, shift, 0.25)
    f = hs.SelfAttention(row, row, row, query_bias=torch.full((1, 1), 2.0**-60, dtype=torch.float64))
    exact = [Fraction(a) * Fraction(b) for a, b in zip(gain.tolist(), row.flatten().tolist(), strict=True)]
    mean = sum(exact) / 4
    square = 4 * sum((value - mean) ** 2 for value in exact)
    # One token that sees itself alone: X ↦ V' u.
    bound = pre_norm_upper_bound(hs.SelfAttention(zero, zero, row), norm, 1)
    assert 0 < square <= Fraction(bound.value) ** 2 < 1e-28
    bias = sum(Fraction(a) * Fraction(b) for a, b in zip(shift.tolist(), row.flatten().tolist(), strict=True))
    assert absorb_norm(f, norm).query_bias.item() == float(bias + Fraction(1, 2**60))


def test_the_length_of_a_token_that_is_lost_in_its_mean() -> None:
    x, eps = 2.0**26 + torch.tensor([[0.0, 2.0**-26, 0.0, 0.0]], dtype=torch.float64), 2.0**-64
    zero, eye = torch.zeros(1, 1, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    bound = pre_norm_upper_bound(
        hs.SelfAttention(zero, zero, eye[None]), hs.LayerNorm(eye.sum(0), None, eps), 1, x
    )
    square = Fraction(3, 4) * Fraction(2) ** -52 + 4 * Fraction(eps)
    assert 4 / square <= Fraction(bound.value) ** 2
