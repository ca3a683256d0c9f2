"""Bounds for several heads from bounds for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.ball_upper_bounds import (
    ball_upper_bound,
    causal_ball_upper_bound,
    causal_mean_field_upper_bound,
    masked_ball_upper_bound,
)
from howsmooth.bounds.bound import Bound, Quantity
from howsmooth.bounds.bound_problem import on_ball
from howsmooth.bounds.multi_head_bounds import (
    folded_gram_upper_bound,
    gram_upper_bound,
    head_bound,
    lemma_3_8,
    output_norm_upper_bound,
)
from howsmooth.bounds.tokenwise_bounds import token_wise_ball_upper_bound
from tests._cases import dense_jacobian, random_attention, tokens

F64 = torch.float64
ALL = (lemma_3_8, output_norm_upper_bound, gram_upper_bound, folded_gram_upper_bound)


def best_of_head(f: hs.SelfAttention, n: int, radius: float) -> float:
    return float(head_bound(on_ball(f, n, radius)).value)


def _norm(f: hs.SelfAttention, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))


# ---- equality


def test_without_scores_folded_is_exact_for_orthogonal_and_for_equal_heads() -> None:
    """A = 0: the map is the mean of Σ_h W_h V_h x_j, of norm ‖Σ_h W_h V_h‖."""
    zero = torch.zeros(2, 2, 2, dtype=torch.float64)
    V = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    W = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 2.0]], dtype=torch.float64)
    f = hs.SelfAttention(zero, zero, V, W)
    truth = _norm(f, tokens(0, 4, 2))
    assert truth == pytest.approx(6.0)
    assert folded_gram_upper_bound(f, 4, 1.0).value == pytest.approx(truth, rel=1e-11)
    # Lemma 3.8 takes the norms apart: ‖W‖ = 2 and ‖V‖ = 3 are not of the same direction.
    assert lemma_3_8(f, 4, 1.0).value == pytest.approx(12.0, rel=1e-11)
    assert gram_upper_bound(f, 4, 1.0).value == pytest.approx(12.0, rel=1e-11)


def test_concatenated_heads_add_in_squares() -> None:
    f = random_attention(5, d_out=None)
    parts = [best_of_head(f.head(h), 7, 1.3) for h in range(f.heads)]
    squares = math.sqrt(sum(part**2 for part in parts))
    assert lemma_3_8(f, 7, 1.3).value == pytest.approx(sum(parts), rel=1e-10)
    for statement in (output_norm_upper_bound, gram_upper_bound, folded_gram_upper_bound):
        assert statement(f, 7, 1.3).value == pytest.approx(squares, rel=1e-10)


def test_one_head_of_norm_one_changes_nothing() -> None:
    f = random_attention(6, heads=1, d_out=None)
    for statement in ALL:
        assert statement(f, 7, 1.3).value == pytest.approx(ball_upper_bound(f, 7, 1.3).value, rel=1e-10)


# ---- order, and what a head's bound is


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_order(seed: int, causal: bool) -> None:
    f = random_attention(seed, heads=4, kv_heads=2, causal=causal, temperature=0.5 + seed)
    lemma, output, gram, folded = (statement(f, 20, 1.0).value for statement in ALL)
    assert folded <= gram * (1 + 1e-11)
    assert gram <= lemma * (1 + 1e-11)
    norms = [torch.linalg.matrix_norm(W, 2) for W in parameters_of(f).outputs]
    parts = [best_of_head(f.head(h), 20, 1.0) for h in range(4)]
    assert lemma == pytest.approx(
        float(sum(w * part for w, part in zip(norms, parts, strict=True))), rel=1e-10
    )
    assert output == pytest.approx(
        float(torch.linalg.matrix_norm(f.output, 2)) * math.hypot(*parts), rel=1e-10
    )
    assert lemma_3_8(f, 20, 1.0).quantity == (Quantity.MASKED if causal else Quantity.GLOBAL)


def test_gram_written_out() -> None:
    f = random_attention(8)
    W = parameters_of(f).outputs
    L = [best_of_head(f.head(h), 5, 0.7) for h in range(3)]
    V = [f.value[h] for h in range(3)]
    c = [L[h] / float(torch.linalg.matrix_norm(V[h], 2)) for h in range(3)]
    folded = [W[h] @ V[h] for h in range(3)]

    def form(maps: list[Tensor], sizes: list[float]) -> float:
        return math.sqrt(
            sum(
                float(torch.linalg.matrix_norm(maps[h].T @ maps[g], 2)) * sizes[h] * sizes[g]
                for h in range(3)
                for g in range(3)
            )
        )

    assert gram_upper_bound(f, 5, 0.7).value == pytest.approx(form(list(W), L), rel=1e-10)
    assert folded_gram_upper_bound(f, 5, 0.7).value == pytest.approx(form(folded, c), rel=1e-10)


def test_the_best_bound_of_a_head_knows_its_mask() -> None:
    n = 5
    window = torch.ones(n, n, dtype=torch.bool).tril().triu(-1)
    causal = random_attention(0, heads=1, causal=True)
    for f, length, radius, free in (
        (random_attention(0, heads=1), n, 1.0, False),
        (causal, n, 1.0, False),
        (causal, 10**30, 0.1, True),
        (random_attention(0, heads=1, mask=window), n, 1.0, False),
    ):
        expected = (
            causal_mean_field_upper_bound(f, radius) if free else masked_ball_upper_bound(f, length, radius)
        )
        assert best_of_head(f, length, radius) == pytest.approx(expected.value, rel=1e-11)
    assert best_of_head(causal, n, 1.0) == pytest.approx(
        causal_ball_upper_bound(causal, n, 1.0).value, rel=1e-11
    )


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("bound", [partial(folded_gram_upper_bound, length=1), token_wise_ball_upper_bound])
def test_output_maps_and_values_that_cancel(bound: Callable[..., Bound], flipped: bool) -> None:
    x = 1 + 2.0**-30  # x² has 61 digits: its float64 number is 2^-60 less
    W, V = torch.tensor([[x, -1.0]], dtype=F64), torch.tensor([[x], [x * x]], dtype=F64)
    if flipped:  # in one order of the sum, fused products would be exact
        W, V = W.flip(1), V.flip(0)
    truth = sum(Fraction(w) * Fraction(v) for w, v in zip(W[0].tolist(), V[:, 0].tolist(), strict=True))
    assert truth == Fraction(1, 2**60)
    zero = torch.zeros(1, 1, 1, dtype=F64)
    found = bound(hs.SelfAttention(zero, zero, V[None], W), radius=1.0).value
    assert truth <= Fraction(found) < 1e-13
