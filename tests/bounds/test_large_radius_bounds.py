"""Tokens R·X for large R: the limit of the norm of the Jacobian, and the rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import attention_parameters
from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.large_radius_bounds import theorem_3_7, theorem_4_5
from tests._cases import dense_jacobian, random_attention, tokens
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
