"""Constructed inputs: the paper's tokens exactly, heavy first, and clear refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth import adversarial
from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.ball_lower_bounds import two_cluster_lower_bound
from howsmooth.errors import ArgumentError
from tests._cases import D, random_attention, rotary, true_norm


def diagonal(*gammas: float) -> Head:
    d = len(gammas)
    return Head(torch.diag(torch.tensor(gammas, dtype=torch.float64)), torch.eye(d, dtype=torch.float64))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_of_both(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(found, expected)) or bool(torch.allclose(found, -expected))


@pytest.mark.parametrize(
    ("gammas", "choice", "axis", "ratio"),
    [
        ((-1.0, 7.0), "paper", 0, -1.0),  # 1 > 7/8
        ((-1.0, 9.0), "paper", 1, 0.5),  # 1 < 9/8
        ((-1.0, 8.0), "paper", 1, 0.5),  # a draw goes to γ_max
        ((-1.0, 7.0), "max", 1, 0.5),
        ((-1.0, 9.0), "min", 0, -1.0),
        ((2.0, 3.0), "paper", 1, 0.5),
    ],
)
def test_two_cluster_is_the_papers(gammas, choice, axis, ratio):
    radius = 1.5
    built = adversarial.two_cluster(diagonal(*gammas), 5, radius, choice=choice)
    u = torch.eye(2, dtype=torch.float64)[axis]
    assert built.x.shape == (5, 2)
    assert one_of_both(built.x[0], radius * u)
    for light in built.x[1:]:
        assert torch.allclose(light, ratio * built.x[0])
    assert "5.2" in built.source


def test_two_cluster_reaches_its_bound():
    head = diagonal(-1.0, 2.0)
    f = hs.SelfAttention(head.A[None], torch.eye(2, dtype=torch.float64)[None], head.V[None], scale=1.0)
    x = adversarial.two_cluster(head, 10, 1.5).x
    true = float(true_norm(f, x[None])[0])
    assert (
        two_cluster_lower_bound(head, 10, 1.5).value
        <= true
        <= 1.1 * two_cluster_lower_bound(head, 10, 1.5).value
    )


def test_without_a_real_eigenvalue_the_remedy_is_named():
    rotation = Head(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64), torch.eye(2))
    with pytest.raises(ArgumentError, match="heavy_token"):
        adversarial.two_cluster(rotation, 5, 1.0)
    built = adversarial.heavy_token(rotation, 5, 1.0)
    assert float(built.x[0] @ built.x[1]) == pytest.approx(0.0, abs=1e-6)
    names = [c.name for c in adversarial.constructions(rotation, 5, 1.0)]
    assert names == ["heavy_token", "balanced", "two_heavy_tokens"]


def test_a_singular_matrix_has_the_eigenvalue_zero():
    # rank two in four dimensions, complex but for the zeros
    left = torch.eye(4, dtype=torch.float64)[:, :2]
    right = torch.tensor([[0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    head = Head((left, right), torch.eye(4, dtype=torch.float64))
    heavy = adversarial.two_cluster(head, 3, 1.0).x[0]
    assert float((head.A @ heavy).norm()) == pytest.approx(0.0, abs=1e-12)
    assert float(heavy.norm()) == pytest.approx(1.0)


def test_heavy_first_matters_to_causal_attention():
    f = random_attention(1, heads=1, causal=True, temperature=4.0, biases=False)
    n = 20
    for built in adversarial.constructions(f, n, 2.0):
        if built.name != "two_heavy_tokens":
            continue
        first = float(hs.local_lipschitz(f, built.x).value)
        last = float(hs.local_lipschitz(f, built.x.flip(0)).value)
        assert first > 2 * last


def test_of_u_and_minus_u_the_steeper_is_taken():
    identity = torch.eye(2, dtype=torch.float64)
    for sign in (1.0, -1.0):
        head = Head(identity, identity, b=vector(3 * sign, 0.0) + vector(0.0, 1e-3))
        x = adversarial.two_cluster(head, 6, 1.0).x
        y = head.A @ x[1] + head.b
        assert float(y @ (x[0] - x[1])) >= float((head.A @ -x[1] + head.b) @ (x[1] - x[0]))


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, True), (torch.float64, False)])
def test_constructions_of_several_heads(dtype, causal):
    f = random_attention(2, heads=2, causal=causal, dtype=dtype)
    radius, n = 1.3, 7
    built = adversarial.constructions(f, n, radius)
    assert {c.head for c in built} == {0, 1}
    assert {"heavy_token", "two_heavy_tokens"} <= {c.name for c in built if c.head == 1}
    for construction in built:
        assert construction.x.shape == (n, D)
        assert construction.x.dtype == dtype
        assert float(construction.x.norm(dim=1).max()) <= radius * (1 + 1e-6)
        assert math.isfinite(float(hs.local_lipschitz(f, construction.x).value))
    assert [c.head for c in adversarial.constructions(f, n, radius, heads=[1])] == [1] * sum(
        c.head == 1 for c in built
    )


def test_the_papers_choice_comes_first():
    built = adversarial.constructions(diagonal(-1.0, 9.0), 5, 1.0)
    clusters = [c for c in built if c.name == "two_cluster"]
    assert len(clusters) == 2  # the paper's is that for γ_max: it is not listed twice
    assert torch.allclose(clusters[0].x[1], clusters[0].x[0] / 2)
    assert torch.allclose(clusters[1].x[1], -clusters[1].x[0])


@pytest.mark.parametrize("n", [3, 4, 9])
@pytest.mark.parametrize("d", [1, 2])
def test_balanced_tokens_are_built_where_no_tie_grows(d, n):
    # A = V = e_1 e_1': a tie moves e_1 alone, by the attention weights of tokens that are orthogonal to it.
    e = torch.zeros(d, d, dtype=torch.float64)
    e[0, 0] = 1
    built = {c.name: c for c in adversarial.constructions(Head(e, e), n, 100.0)}
    f = hs.SelfAttention(e[None], e[None], e[None], scale=1.0)
    assert float(true_norm(f, built["balanced"].x[None])[0]) >= hs.bounds.quadratic_growth(f, n, 100.0).value
    others = [float(true_norm(f, c.x[None])[0]) for name, c in built.items() if name != "balanced"]
    assert max(others) < 10


def test_balanced_tokens_stay_in_the_ball():
    x = adversarial.balanced(diagonal(-1.0, 1.0), 4, 0.3).x
    assert adversarial.Ball(0.3).contains(x)


def test_short_sequences():
    head = diagonal(-1.0, 1.0)
    assert adversarial.constructions(head, 1, 1.0) == []
    two = {c.name for c in adversarial.constructions(head, 2, 1.0)}
    assert two == {"two_cluster", "heavy_token", "balanced"}
    one = Head(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))
    assert "balanced" not in {c.name for c in adversarial.constructions(one, 2, 1.0)}
    with pytest.raises(ArgumentError, match="orthogonal to the query bias"):
        adversarial.balanced(one, 2, 1.0)
    with pytest.raises(ArgumentError, match="length"):
        adversarial.two_heavy_tokens(head, 2, 1.0)


def test_refusals():
    head = diagonal(-1.0, 1.0)
    with pytest.raises(ArgumentError, match="length"):
        adversarial.two_cluster(head, 1, 1.0)
    with pytest.raises(ArgumentError, match="radius"):
        adversarial.two_cluster(head, 5, -1.0)
    with pytest.raises(ArgumentError, match="head"):
        adversarial.two_cluster(head, 5, 1.0, head=1)
    with pytest.raises(ArgumentError, match="choice"):
        adversarial.two_cluster(head, 5, 1.0, choice="both")
    with pytest.raises(ArgumentError, match="rotary"):
        adversarial.constructions(random_attention(3, rotary=rotary(9, 4)), 5, 1.0)
    with pytest.raises(ArgumentError, match="not zero"):
        adversarial.two_heavy_tokens(Head(torch.zeros(2, 2), torch.eye(2)), 5, 1.0)
