"""Tokens R·X for large R: the limit of the norm of the Jacobian, and the rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import attention_parameters
from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.large_radius_bounds import large_radius, theorem_3_7, theorem_4_5
from howsmooth.errors import ArgumentError
from tests._cases import dense_jacobian, random_attention, tokens
from tests._search import Point, largest_ratio
from tests._selection import others_slow


def _norm(f: hs.SelfAttention, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", others_slow(range(5), [0, 1]))
def test_the_interval_holds_the_truth_and_closes_on_the_limit(
    seed: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention_parameters, "_PAIRS", (1, 12, 100)[seed % 3]
    )  # one row, two or all at a time
    f = random_attention(seed, heads=1, biases=False, causal=causal)
    theorem = theorem_4_5 if causal else theorem_3_7
    X = tokens(seed, 5, 6)
    widths = []
    for R in (0.5, 2.0, 5.0, 20.0, 100.0):
        upper, lower = theorem(f, X, R), theorem(f, X, R, side="lower")
        assert upper.holds
        assert lower.holds
        truth = _norm(f, R * X)
        assert lower.value <= truth <= upper.value
        widths.append(upper.value - lower.value)
    # At R = 100 the Jacobian is its limit, counted here token by token.
    A = f.scale * f.key[0].T @ f.query[0]
    scores = X @ A.T @ X.T
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
    counts = torch.bincount(scores.argmax(dim=1))
    V = f.output @ f.value[0]
    limit = float(torch.linalg.matrix_norm(V, 2)) * math.sqrt(int(counts.max()))
    assert upper.value == pytest.approx(limit, rel=1e-11)
    assert lower.value == pytest.approx(limit, rel=1e-11)
    assert widths[-1] < 1e-9 * widths[0]


def test_the_limit_reaches_root_n() -> None:
    """One long token that all the others prefer: the norm tends to ‖V‖√n, the most there can be."""
    X = torch.tensor([[3.0, 0.0], [1.0, 0.2], [1.0, -0.3], [0.8, 0.1]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)[None]
    f = hs.SelfAttention(eye, eye, 2 * eye, scale=1.0)
    bound = theorem_3_7(f, X, 20.0)
    assert bound.value == pytest.approx(4.0, rel=1e-11)
    assert _norm(f, 20.0 * X) == pytest.approx(4.0, rel=1e-11)


def _distance_ratio(masked: bool, *, trials: int, steps: int) -> float:
    """Largest ratio found of ‖D_{RX}f − Π⊗V‖ to its bound."""

    def draw(generator: torch.Generator) -> Point:
        return {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64)
            for name, shape in {"A": (2, 2), "X": (4, 2), "R": (1,)}.items()
        }

    def ratio(point: Point) -> Tensor:
        A, X, R = point["A"], point["X"], 0.3 + point["R"].abs()

        def scores(x: Tensor) -> Tensor:
            raw = x @ A.T @ x.T
            return raw.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -math.inf) if masked else raw

        jacobian = torch.func.jacrev(lambda x: torch.softmax(scores(x), dim=-1) @ x)(R * X)
        limit = torch.nn.functional.one_hot(scores(X).argmax(dim=1), 4).double()
        difference = jacobian - torch.einsum("ij,ab->iajb", limit, torch.eye(2, dtype=torch.float64))
        head = Head(A.detach(), torch.eye(2))
        found = large_radius(Problem(head, X.detach(), factor=float(R.detach())), masked)
        return torch.linalg.matrix_norm(difference.reshape(8, 8), 2) / found.distance.value

    return largest_ratio(ratio, draw, trials=trials, steps=steps)


@pytest.mark.parametrize("masked", [False, True])
def test_search_for_a_larger_distance(masked: bool) -> None:
    assert 0.05 < _distance_ratio(masked, trials=4, steps=15) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_search_long(masked: bool) -> None:
    ratio = _distance_ratio(masked, trials=20, steps=150)
    print(ratio)
    assert 0.2 < ratio <= 1


def test_ties_are_refused() -> None:
    X = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    head = Head(torch.eye(2), torch.eye(2))
    for bound in (theorem_3_7(head, X, 3.0), theorem_4_5(head, X, 3.0)):
        assert not bound.holds
        assert bound.value == math.inf
    assert theorem_3_7(head, X, 3.0, side="lower").value == 0.0
    # two scores that differ by less than their rounding
    almost = torch.tensor([[1.0, 0.0], [1.0 + 2e-16, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert not theorem_3_7(head, almost, 1e8).holds
    # with a causal mask the first row sees itself only; here no later row has a tie
    ordered = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    shear = Head(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.eye(2))
    assert not theorem_3_7(shear, ordered, 3.0).holds  # scores (0, 0) and (1, 1)
    assert theorem_4_5(Head(torch.eye(2), torch.eye(2)), ordered, 3.0).holds


def test_hypotheses() -> None:
    X = tokens(0, 4, 6)
    assert not theorem_3_7(random_attention(0, heads=1), X, 2.0).holds  # a query bias
    assert not theorem_3_7(random_attention(0, heads=1, biases=False, causal=True), X, 2.0).holds
    assert not theorem_4_5(random_attention(0, heads=1, biases=False), X, 2.0).holds


def test_one_token() -> None:
    X = tokens(0, 1, 6)
    f = random_attention(0, heads=1, biases=False)
    truth = _norm(f, X)
    assert theorem_3_7(f, X, 1.0).value == pytest.approx(truth, rel=1e-11)
    assert theorem_3_7(f, X, 1.0, side="lower").value == pytest.approx(truth, rel=1e-11)


@pytest.mark.parametrize("radius", [1e-200, 1e-3, 1.0, 1e3, 1e200])
def test_extremes_give_numbers(radius: float) -> None:
    X = tokens(3, 6, 6)
    f = random_attention(0, heads=1, biases=False)
    upper, lower = theorem_3_7(f, X, radius), theorem_3_7(f, X, radius, side="lower")
    assert 0 <= lower.value <= upper.value
    zero = hs.SelfAttention(f.query, f.key, 0 * f.value)
    assert theorem_3_7(zero, X, radius).value == 0.0
    assert theorem_3_7(zero, X, radius, side="lower").value == 0.0
    flat = hs.SelfAttention(0 * f.query, f.key, f.value)
    assert theorem_3_7(flat, X, radius).value == math.inf  # all scores are equal


def test_the_side_is_one_of_two() -> None:
    f = random_attention(0, heads=1, biases=False)
    with pytest.raises(ArgumentError, match="side"):
        theorem_3_7(f, tokens(0, 4, 6), 1.0, side="both")
