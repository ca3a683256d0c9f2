"""Mean-field lower bounds from two Diracs, against dense weighted Jacobians and repeated tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.mean_field_bounds import (
    proposition_3_6,
    proposition_3_6_rate,
    two_dirac,
    weighted_two_atom_lower_bound,
)
from howsmooth.errors import ArgumentError
from tests._cases import random_attention, true_norm


def eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def weighted_norm(A: Tensor, V: Tensor, x: Tensor, a: Tensor) -> float:
    """Norm of the dense Jacobian at atoms x of weights a, between the weighted norms."""

    def f(x: Tensor) -> Tensor:
        return torch.softmax(x @ A.mT @ x.mT + a.log(), dim=-1) @ x @ V.mT

    n, d = x.shape
    j = torch.autograd.functional.jacobian(f, x, vectorize=True).reshape(n, len(V), n, d)
    j = j * a.sqrt()[:, None, None, None] / a.sqrt()[:, None]
    return float(torch.linalg.matrix_norm(j.reshape(n * len(V), n * d), 2))


@pytest.mark.parametrize("gamma", [-1.0, -0.2, 0.5, 3.0])
@pytest.mark.parametrize("radius", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("copies", [(2, 2), (2, 11), (7, 3)])
@pytest.mark.parametrize("cluster", ["half", "opposite"])
def test_two_dirac_is_the_norm_at_repeated_tokens(gamma, radius, copies, cluster):
    # on the line, where u is the whole space; multiplicities of at least two, so that atoms can split
    f = hs.SelfAttention(gamma * eye(1)[None], eye(1)[None], eye(1)[None], scale=1.0)
    ratio = 0.5 if cluster == "half" else -1.0
    x = torch.tensor([radius] * copies[0] + [ratio * radius] * copies[1], dtype=torch.float64)[:, None]
    bound = two_dirac(gamma, radius, weight=copies[0] / sum(copies), cluster=cluster)
    assert bound.value == pytest.approx(float(true_norm(f, x[None])[0]), rel=1e-9)


@pytest.mark.parametrize("gammas", [(-1.0, 2.0), (-0.1, 2.0)])
def test_two_dirac_of_a_head(gammas):
    radius = 1.7
    A = torch.diag(torch.tensor(gammas, dtype=torch.float64))
    V = torch.tensor([[0.6, 0.1], [0.3, 1.5], [0.0, 0.4]], dtype=torch.float64)
    head = Head(A, V)
    half = gammas[1] / 8 >= -gammas[0]
    axis, ratio = (1, 0.5) if half else (0, -1.0)
    u = radius * eye(2)[axis]
    # along u alone: A restricted to the line, times |Vu|
    line = torch.zeros(2, 2, dtype=torch.float64)
    line[axis, axis] = gammas[axis]
    along = torch.zeros(1, 2, dtype=torch.float64)
    along[0, axis] = float(V[:, axis].norm())
    atoms, weights = torch.stack([u, ratio * u]), torch.tensor([0.1, 0.9], dtype=torch.float64)
    expected = weighted_norm(line, along, atoms, weights)
    assert two_dirac(head, radius, weight=0.1).value == pytest.approx(expected, rel=1e-9)
    assert two_dirac(head, radius, weight=0.1).value <= weighted_norm(A, V, atoms, weights) * (1 + 1e-12)


def test_closed_forms():
    g = 1.3
    p = math.exp(-2 * g)
    paper = math.sqrt((1 - p) / p) / (2 - p) * (1 + 2 * g * (1 - p) / (2 - p))
    assert proposition_3_6(-g, 1.0).value == pytest.approx(paper, rel=1e-9)
    assert proposition_3_6(8 * g, 1.0).value == pytest.approx(paper, rel=1e-9)
    better = math.sqrt(3) / 4 * math.exp(g) * (1 + 1.5 * g)
    assert weighted_two_atom_lower_bound(-g, 1.0).value == pytest.approx(better, rel=1e-9)
    assert proposition_3_6_rate(-g, 1.0).value == pytest.approx(g / 2 * math.exp(g), rel=1e-9)


def test_asymptotic_for_every_g():
    for g in [10.0 ** (k / 8) for k in range(-64, 33)]:
        assert proposition_3_6_rate(-g, 1.0).log_value <= proposition_3_6(-g, 1.0).log_value


def test_as_the_radius_grows():
    paper, asymptotic = proposition_3_6(-1.0, 100.0), proposition_3_6_rate(-1.0, 100.0)
    assert paper.log_value - asymptotic.log_value == pytest.approx(0.0, abs=1e-3)
    better, exact = weighted_two_atom_lower_bound(-1.0, 100.0), two_dirac(-1.0, 100.0)
    assert exact.log_value - better.log_value == pytest.approx(0.0, abs=1e-8)
    # (√3/4)(3/2) against 1/2: 30 % more
    ratio = math.exp(better.log_value - paper.log_value)
    assert ratio == pytest.approx(3 * math.sqrt(3) / 4, rel=1e-3)


def test_hypotheses():
    rotation = Head(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64), eye(2))
    assert [h.statement for h in two_dirac(rotation, 1.0).hypotheses if not h.holds] == [
        "A has a real eigenvalue"
    ]
    assert two_dirac(rotation, 1.0).value == 0.0
    biased = random_attention(0, heads=1, d_out=None, causal=True)
    failed = {h.statement for h in proposition_3_6(biased, 1.0).hypotheses if not h.holds}
    assert {"no mask", "V = I", "no query bias"} <= failed


def test_refusals():
    with pytest.raises(ArgumentError, match="weight"):
        two_dirac(-1.0, 1.0, weight=1.0)
    with pytest.raises(ArgumentError, match="cluster"):
        two_dirac(-1.0, 1.0, cluster="other")
    with pytest.raises(ArgumentError, match="finite number"):
        proposition_3_6(math.nan, 1.0)
