"""Cluster metrics against naive NumPy, and rescaled tokens against the flow that they rescale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import howsmooth as hs
from howsmooth.dynamics import (
    Rescaled,
    Sphere,
    cluster_labels,
    cluster_metrics,
    effective_rank,
    flow,
    log_interaction_energy,
    number_of_clusters,
    rescaled,
)
from howsmooth.dynamics import clustering_quantities as clusters_module
from howsmooth.dynamics.clustering_quantities import numerical_rank
from howsmooth.dynamics.rescaled_tokens import value_matrix
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure
from tests._cases import D, random_attention, tokens

WEIGHTS = torch.tensor([0.2, 0.5, 0.2, 0.1], dtype=torch.float64)


def naive_labels(x: np.ndarray, tolerance: float) -> list[int]:
    """Spread each label over its neighbours until nothing changes, then number by first appearance."""
    labels = list(range(len(x)))
    changed = True
    while changed:
        changed = False
        for i in range(len(x)):
            for j in range(len(x)):
                if labels[j] > labels[i] and math.dist(x[i], x[j]) <= tolerance:
                    labels[j] = labels[i]
                    changed = True
    return [sorted(set(labels)).index(label) for label in labels]


# ---- clusters


@given(n=st.integers(1, 12), seed=st.integers(0, 999), tolerance=st.floats(0, 2), pairs=st.integers(1, 40))
def test_clusters_are_the_connected_components(n: int, seed: int, tolerance: float, pairs: int) -> None:
    x = tokens(seed, n, 2)
    kept, clusters_module._PAIRS = clusters_module._PAIRS, pairs
    try:
        found = cluster_labels(x, tolerance)
    finally:
        clusters_module._PAIRS = kept
    assert found.tolist() == naive_labels(x.numpy(), tolerance)


def test_a_chain_of_short_steps_is_one_cluster_and_the_tolerance_is_inclusive() -> None:
    x = torch.arange(5, dtype=torch.float64)[[3, 1, 4, 0, 2], None]
    assert number_of_clusters(x, 1.0) == 1
    assert number_of_clusters(x, 1.0 - 1e-12) == 5
    assert number_of_clusters(torch.zeros(4, 2), 0.0) == 1
    apart = torch.tensor([[5.0, 0.0], [0.0, 0.0], [5.0, 0.1], [0.1, 0.0], [9.0, 9.0]])
    assert cluster_labels(DiscreteMeasure(apart), 0.2).tolist() == [0, 1, 0, 1, 2]


# ---- energy and ranks


@pytest.mark.parametrize("weighted", [False, True])
def test_energy_is_the_double_integral(weighted: bool) -> None:
    x, a, beta = tokens(0, 4, 3), tokens(1, 3, 3), 0.7
    w = WEIGHTS.numpy() if weighted else np.full(4, 0.25)
    y = x.numpy()
    total = sum(w[i] * w[j] * math.exp(beta * (a.numpy() @ y[i]) @ y[j]) for i in range(4) for j in range(4))
    state = DiscreteMeasure(x, WEIGHTS) if weighted else x
    assert log_interaction_energy(state, a, beta=beta) == pytest.approx(
        math.log(total / (2 * beta)), abs=1e-12
    )
    plain = sum(w[i] * w[j] * math.exp(y[i] @ y[j]) for i in range(4) for j in range(4))
    assert log_interaction_energy(state) == pytest.approx(math.log(plain / 2), abs=1e-12)


def test_energy_of_long_tokens_does_not_overflow() -> None:
    x = torch.full((2, 1), 100.0, dtype=torch.float64)
    assert log_interaction_energy(x) == pytest.approx(1e4 - math.log(2))


def test_energy_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(2, 9, 3)
    whole = log_interaction_energy(x)
    monkeypatch.setattr(clusters_module, "_PAIRS", 20)
    assert log_interaction_energy(x) == pytest.approx(whole, abs=1e-13)


def symmetric_attention(seed: int, sign: float) -> tuple[hs.SelfAttention, Tensor]:
    """One head with V = sign · A and A symmetric, of scale 1."""
    a = tokens(seed, 3, 3)
    a = a + a.mT
    return hs.SelfAttention(a[None], torch.eye(3, dtype=a.dtype)[None], sign * a[None], scale=1.0), a


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_energy_is_monotone_along_the_sphere_where_theory_says_so(sign: float) -> None:
    f, a = symmetric_attention(3, sign)
    x = tokens(4, 8, 3)
    x = x / x.norm(dim=1, keepdim=True)
    run = flow(Sphere(f), x, [0.0, 0.25, 0.5, 0.75, 1.0], method="rk4", step=0.125)
    energies = torch.tensor([log_interaction_energy(y, a) for y in run.points])
    changes = sign * energies.diff()
    assert (changes > -1e-7).all()
    assert float(changes.sum()) > 0.1


def test_ranks_against_numpy() -> None:
    x = tokens(5, 6, 2) @ tokens(6, 2, 4)
    sigma = np.linalg.svd(x.numpy(), compute_uv=False)
    p = sigma[:2] / sigma[:2].sum()
    assert effective_rank(x) == pytest.approx(math.exp(-(p * np.log(p)).sum()), abs=1e-6)
    assert numerical_rank(x) == 2
    assert numerical_rank(x, float(sigma[1] / sigma[0]) * 1.001) == 1
    assert effective_rank(torch.zeros(3, 2)) == numerical_rank(torch.zeros(3, 2)) == 0
    assert effective_rank(torch.eye(3)) == pytest.approx(3.0)
    # The atoms of a measure count by their weight: two of a half each are one.
    twice = DiscreteMeasure(torch.eye(2)[[0, 0, 1]], torch.tensor([0.25, 0.25, 0.5]))
    assert effective_rank(twice) == pytest.approx(2.0)


# ---- rescaled tokens


def commuting_attention(seed: int) -> hs.SelfAttention:
    """Two heads whose W_h are polynomials of one matrix, with biases."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=g, dtype=torch.float64)

    m = draw(3, 3)
    value = torch.stack((m, m @ m - 0.3 * torch.eye(3)))
    return hs.SelfAttention(
        draw(2, 2, 3),
        draw(2, 2, 3),
        value,
        torch.eye(3, dtype=torch.float64).repeat(1, 2),
        query_bias=draw(2, 2),
        key_bias=draw(2, 2),
        value_bias=draw(2, 3),
        output_bias=draw(3),
    )


def one_head(causal: bool) -> hs.SelfAttention:
    return random_attention(20, heads=1, causal=causal)


@pytest.mark.parametrize(
    ("f", "weighted"),
    [(one_head(False), False), (one_head(True), True), (commuting_attention(0), False)],
    ids=["one head", "causal, of a measure", "heads that commute"],
)
def test_the_field_of_rescaled_tokens_gives_the_rescaled_flow(f: hs.SelfAttention, weighted: bool) -> None:
    x = tokens(7, 4, f.d)
    start = DiscreteMeasure(x, WEIGHTS, positions=torch.tensor([0.1, 0.3, 0.3, 0.9])) if weighted else x
    times = [0.0, 0.1, 0.3]
    there = rescaled(flow(f, start, times, method="rk4", step=0.05), f)
    here = flow(Rescaled(f), start, times, method="rk4", step=0.05)
    torch.testing.assert_close(here.points, there.points, rtol=1e-4, atol=1e-4)
    if weighted:
        assert isinstance(there.states[1], DiscreteMeasure)
        torch.testing.assert_close(there.states[1].weights, WEIGHTS)
    assert "rescaled" in there.field
    assert "rescaled" in here.field


def test_rescaled_tokens_are_the_exponential_times_the_tokens() -> None:
    f, x = one_head(False), tokens(8, 3, D)
    run = flow(f, x, [0.0, 1.0], method="euler", step=0.5, estimate_error=True)
    assert run.error is not None
    v = value_matrix(f)
    torch.testing.assert_close(v, f.output @ f.value[0])
    moved = rescaled(run, v)
    torch.testing.assert_close(moved.points[1], run.points[1] @ torch.linalg.matrix_exp(-v).mT)
    assert moved.error is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [None, torch.tensor([[5.0]])])
def test_rescaled_tokens_go_on_where_the_tokens_have_overflowed(dtype, bias) -> None:
    """At t = 700 the scores of x = e^t z are e^1400: each token goes straight to its side's extreme one."""
    eye = torch.eye(1, dtype=dtype)[None]
    f = hs.SelfAttention(eye, eye, eye, query_bias=bias if bias is None else bias.to(dtype), scale=1.0)
    z = torch.tensor([[-1.0], [-0.4], [0.3], [1.2]], dtype=dtype)
    run = flow(Rescaled(f), z, [700.0, 700.5, 701.0], method="euler", step=0.5)
    assert run.status == "finished"
    extremes = z[[0, 0, 3, 3]]
    torch.testing.assert_close(run.final, extremes + 0.25 * (z - extremes))


# ---- the table


def test_the_table_holds_each_metric_at_each_time() -> None:
    f, x = one_head(False), tokens(9, 5, D)
    run = flow(f, x, [0.0, 0.2, 0.4], method="rk4", step=0.2)
    a = tokens(10, D, D)
    table = cluster_metrics(run, tolerance=3.0, matrix=a, beta=0.1, rank_tolerance=0.1)
    assert table["time"].tolist() == [0.0, 0.2, 0.4]
    for i, y in enumerate(run.points):
        row = table.iloc[i]
        assert row["clusters"] == number_of_clusters(y, 3.0)
        assert row["numerical_rank"] == numerical_rank(y, 0.1)
        assert row["effective_rank"] == pytest.approx(effective_rank(y))
        assert row["log_energy"] == pytest.approx(log_interaction_energy(y, a, beta=0.1))
        centred = y - y.mean(dim=0)
        assert row["spread"] == pytest.approx(float(centred.square().sum(dim=1).mean().sqrt()))
        costs = torch.cdist(y, run.points[-1]).square().numpy()
        best = math.sqrt(costs[linear_sum_assignment(costs)].sum() / 5)
        assert row["to_limit"] == pytest.approx(best, abs=1e-6)
        assert row["to_limit_lower"] <= best + 1e-9
        assert best <= row["to_limit_upper"] + 1e-9
    assert "to_limit" not in cluster_metrics(run, tolerance=1.0, transport=None)


def test_the_limit_may_be_named_and_a_measure_counts_its_weights() -> None:
    x = tokens(11, 4, D)
    start = DiscreteMeasure(x, WEIGHTS)
    run = flow(one_head(False), start, [0.0, 0.1], method="euler", step=0.1)
    goal = DiscreteMeasure(torch.zeros(1, D, dtype=torch.float64))
    table = cluster_metrics(run, tolerance=0.1, limit=goal)
    second_moment = float(WEIGHTS @ x.square().sum(dim=1))
    assert table["to_limit"][0] == pytest.approx(math.sqrt(second_moment))
    mean = WEIGHTS @ x
    assert table["spread"][0] == pytest.approx(math.sqrt(second_moment - float(mean @ mean)))


# ---- what is refused


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: cluster_labels(tokens(0, 3, 2), -1.0), "tolerance"),
        (lambda: cluster_labels(tokens(0, 3, 2), math.nan), "tolerance"),
        (lambda: number_of_clusters(tokens(0, 2, 3, 2), 1.0), "state"),
        (lambda: number_of_clusters(tokens(0, 0, 2), 1.0), "state"),
        (lambda: log_interaction_energy(tokens(0, 3, 2), tokens(0, 3, 3)), "matrix"),
        (lambda: log_interaction_energy(tokens(0, 3, 2), beta=0.0), "beta"),
        (lambda: numerical_rank(tokens(0, 3, 2), 1.0), "tolerance"),
        (lambda: Rescaled(random_attention(0)), "attention"),
        (lambda: Rescaled(random_attention(0, d_out=4)), "attention"),
        (lambda: Rescaled(hs.RMSNorm(torch.ones(3))), "attention"),
        (lambda: value_matrix(random_attention(0, d_out=4)), "attention"),
        (
            lambda: cluster_metrics(
                flow(one_head(False), tokens(0, 2, 2, D), [0.0, 0.1], method="euler", step=0.1), tolerance=1.0
            ),
            "trajectory",
        ),
        (lambda: rescaled(flow(one_head(False), tokens(0, 2, D), [0.0, 0.1]), torch.eye(2)), "value"),
    ],
)
def test_bad_input_is_named(call: object, named: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        call()
    assert refused.value.argument == named


def test_tokens_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NonFiniteError):
        effective_rank(torch.full((2, 2), math.nan))
