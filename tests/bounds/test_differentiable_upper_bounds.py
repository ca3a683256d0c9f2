"""Bounds where products of matrices cancel: what rounding may lose is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.bound_problem import at_tokens
from howsmooth.bounds.differentiable_upper_bounds import (
    HeadMatrices,
    l2_layer,
    sigmoid_layer,
    sinkhorn_layer,
    softmax_layer,
)
from howsmooth.bounds.multi_head_bounds import gram_norms
from howsmooth.bounds.visible_key_counts import visible_rows
from howsmooth.nn.attention.head_weights import hull_radius

# ⟨LEFT, RIGHT⟩ is 8, and computed it is 0 or 4, in any order of summation, with or without fused products.
LEFT = [1 + 2.0**-30, 1 + 2.0**-30, -2.0]
RIGHT = [(1 + 2.0**-30) * 2.0**62, (1 + 2.0**-30) * 2.0**62, 2.0**62 + 2.0**33]


def column(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


ONE, PLAIN = torch.ones(1, 1, dtype=torch.float64), ([1.0, 0.0, 0.0], [8.0, 0.0, 0.0])
ROWS = visible_rows(2, "none")
ZERO = column([0.0, 0.0, 0.0])


def test_the_numbers_cancel() -> None:
    assert sum(Fraction(a) * Fraction(b) for a, b in zip(LEFT, RIGHT, strict=True)) == 8
    assert abs(float(torch.tensor(LEFT).double() @ torch.tensor(RIGHT).double())) <= 4


def of_bias(left: list[float], right: list[float]) -> Tensor:
    layer = HeadMatrices(ZERO[None], column(left)[None], ONE[None], ONE, column(right).mT)
    return softmax_layer(layer, ROWS, 1.0, scale=1.0)


def of_scores(bound: Callable[..., Tensor], *arguments: object, **more: float) -> Callable[..., Tensor]:
    def of(left: list[float], right: list[float]) -> Tensor:
        layer = HeadMatrices(column(right)[None], column(left)[None], ONE[None], ONE)
        return bound(layer, *arguments, scale=1.0, **more)

    return of


def of_scores_of_biases(left: list[float], right: list[float]) -> Tensor:
    layer = HeadMatrices(ZERO[None], ZERO[None], ONE[None], ONE, column(right).mT, column(left).mT)
    return sigmoid_layer(layer, ROWS, 1.0, scale=1.0, shift=-4.0)


def of_query_bias(left: list[float], right: list[float]) -> Tensor:
    layer = HeadMatrices(ZERO[None], column(left)[None], ONE[None], ONE, column(right).mT)
    return sigmoid_layer(layer, ROWS, 1.0, scale=1.0, shift=0.0)


def of_values(left: list[float], right: list[float]) -> Tensor:
    """The bound is |V Qᵀ| |Q| for one token; |Q| is that of RIGHT."""
    layer = HeadMatrices(column(right).mT[None], ZERO.mT[None], column(left).mT[None], ONE)
    return l2_layer(layer, visible_rows(1, "none"), math.inf) / column(right).norm()


def of_output(left: list[float], right: list[float]) -> Tensor:
    return torch.tensor(
        hull_radius(HeadMatrices(ZERO[None], ZERO[None], column(right)[None], column(left).mT), 1.0)
    )


@pytest.mark.parametrize(
    "bound",
    {
        "the query bias of softmax attention": of_bias,
        "scores of softmax attention": of_scores(softmax_layer, ROWS, 1.0),
        "scores of Sinkhorn attention": of_scores(sinkhorn_layer, 1.0),
        "scores of sigmoid attention": of_scores(sigmoid_layer, ROWS, 1.0, shift=0.0),
        "the query bias of sigmoid attention": of_query_bias,
        "the score of both biases of sigmoid attention": of_scores_of_biases,
        "values of L2 attention": of_values,
        "the output's radius": of_output,
    }.items(),
    ids=lambda item: item[0],
)
def test_bounds_of_layers_count_what_cancels(bound: tuple[str, Callable[..., Tensor]]) -> None:
    exact = float(bound[1](*PLAIN))
    assert float(bound[1](LEFT, RIGHT)) >= exact * (1 - 1e-12) > 1.0


def test_heads_count_what_cancels() -> None:
    f = hs.SelfAttention(
        column(RIGHT)[None], column(LEFT)[None], ONE[None], query_bias=column(RIGHT).mT, scale=1.0
    )
    head = parameters_of(f).heads[0]
    assert head.b_norm >= 8 * (1 - 1e-15)
    assert head.A_norm >= 8 * (1 - 1e-15)
    assert bool((at_tokens(f, torch.zeros(2, 1)).y.lengths >= 8 * (1 - 1e-15)).all())
    values = hs.SelfAttention(ZERO[None], ZERO[None], column(RIGHT)[None], column(LEFT).mT)
    assert parameters_of(values).folded(0).V_norm >= 8 * (1 - 1e-15)
    maps = torch.stack([column(LEFT), column(RIGHT)])
    assert gram_norms(maps, ONE.expand(2, 1, 1))[0, 1] >= 8
