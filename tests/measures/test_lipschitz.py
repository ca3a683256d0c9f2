"""The local constant of mean-field attention, as statements about transport distances.

Distances are those of POT's exact solver and of assignments, between measures made by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError
from howsmooth.measures import DiscreteMeasure, Gaussian, wasserstein_lipschitz
from tests._cases import D, dense_jacobian, random_attention, tokens
from tests.jacobian.test_weighted import POSITIONS, WEIGHTS, Unknown, weighted_dense


def w2(mu: DiscreteMeasure, nu: DiscreteMeasure) -> float:
    """W_2 of measures without positions, by POT's network simplex; d_2 with them, one problem a position."""
    if mu.positions is None or nu.positions is None:
        return math.sqrt(_cost(mu.points, mu.weights, nu.points, nu.weights))
    total = 0.0
    for s in mu.positions.unique():
        here, there = mu.positions == s, nu.positions == s
        mass = float(mu.weights[here].sum())
        assert mass == pytest.approx(float(nu.weights[there].sum()), rel=1e-12)
        total += mass * _cost(
            mu.points[here], mu.weights[here] / mass, nu.points[there], nu.weights[there] / mass
        )
    return math.sqrt(total)


def _cost(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> float:
    cost = cdist(x.numpy(), y.numpy(), "sqeuclidean")
    # Small costs would drown in the solver's tolerance beside large ones.
    unit = float(np.median(cost.min(axis=1))) or 1.0
    a, b = a.numpy() / a.numpy().sum(), b.numpy() / b.numpy().sum()
    return unit * float(ot.emd2(a, b, cost / unit, numItermax=10**6))


def line(gamma: float) -> hs.SelfAttention:
    """A = γ, V = 1 on the line."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    return hs.SelfAttention(gamma * one, one, one, scale=1.0)


def on_the_line(points: list[float], weights: list[float]) -> DiscreteMeasure:
    return DiscreteMeasure(
        torch.tensor(points, dtype=torch.float64)[:, None], torch.tensor(weights, dtype=torch.float64)
    )


# ---- the numbers


@pytest.mark.parametrize("keywords", [{"heads": 1}, {"heads": 4, "kv_heads": 2}, {"causal": True}])
def test_the_weighted_norm_and_split_atoms_against_dense_matrices(keywords: dict[str, object]) -> None:
    f, x = random_attention(2, temperature=4.0, **keywords), 1.5 * tokens(20, 5, D)
    mu = DiscreteMeasure(x, WEIGHTS, positions=POSITIONS)
    estimate = hs.local_lipschitz(f, mu, rtol=1e-10)
    whole = float(torch.linalg.matrix_norm(weighted_dense(f, x, WEIGHTS, POSITIONS), 2))
    assert float(estimate.value) == pytest.approx(whole, rel=1e-10)
    assert estimate.lower <= whole <= estimate.upper
    assert bool(estimate.converged)
    assert "at a measure of 5 atoms" in estimate.scope
    found = wasserstein_lipschitz(f, mu, rtol=1e-10)
    halves = weighted_dense(
        f, x.repeat_interleave(2, 0), WEIGHTS.repeat_interleave(2) / 2, POSITIONS.repeat_interleave(2)
    )
    split = float(torch.linalg.matrix_norm(halves, 2))
    assert found.value == pytest.approx(split, rel=1e-10)
    assert found.lower <= split <= found.upper
    assert found.converged


def test_a_measure_at_which_splitting_is_worse_than_moving() -> None:
    """A = −1, mass 0.6 at 0 and 0.2 at ±2: the atom at 0 sees the variance 1.6."""
    f, mu = line(-1.0), on_the_line([0.0, 2.0, -2.0], [0.6, 0.2, 0.2])
    found = wasserstein_lipschitz(f, mu, rtol=1e-9)
    assert found.by == "splitting"
    assert found.atom == 0
    assert found.value == found.splitting == pytest.approx(1.6, rel=1e-12)
    assert found.splitting_lower <= 1.6 <= found.splitting_upper
    assert float(found.weighted.value) < 1.4
    assert found.splitting_direction.abs().tolist() == [1.0]
    assert "by splitting" in repr(found)


def test_the_atom_that_splits_is_named_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.jacobian.fixed_measure_derivative._BLOCK", 1)
    found = wasserstein_lipschitz(line(-1.0), on_the_line([2.0, -2.0, 0.0], [0.2, 0.2, 0.6]))
    assert found.atom == 2
    assert found.value == pytest.approx(1.6)


@pytest.mark.parametrize("name", ["causal", "unmasked"])
def test_coinciding_atoms_may_be_given_apart_or_together(name: str) -> None:
    f, x = random_attention(5, temperature=4.0, causal=name == "causal"), tokens(21, 5, D)
    x[2] = x[1]  # POSITIONS[1] == POSITIONS[2]
    apart = DiscreteMeasure(x, WEIGHTS, positions=POSITIONS)
    together = apart.merged()
    assert together.n == 4
    values = [wasserstein_lipschitz(f, mu, rtol=1e-11).value for mu in (apart, together)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_one_atom_is_moved_by_the_values_alone() -> None:
    f = random_attention(16)
    mu = DiscreteMeasure(tokens(33, 1, D))
    values = sum(f.output[:, h * f.value_dim : (h + 1) * f.value_dim] @ f.value[h] for h in range(f.heads))
    found = wasserstein_lipschitz(f, mu, rtol=1e-9)
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(values, 2)), rel=1e-9)
    assert found.splitting == pytest.approx(0.0, abs=1e-12)
    autodiff = hs.local_lipschitz(f, mu, rtol=1e-9, method="autodiff")
    assert autodiff.method == "autodiff"
    assert float(autodiff.value) == pytest.approx(found.value, rel=1e-9)


def test_repeated_tokens_and_weights_agree() -> None:
    """‖D_X f‖ at tokens repeated 1, 3 and 2 times is the constant in W₂ where each of these may split."""
    f, x, counts = random_attention(7, temperature=3.0), tokens(23, 3, D), torch.tensor([2, 3, 4])
    tokens_norm = float(torch.linalg.matrix_norm(dense_jacobian(f, x.repeat_interleave(counts, 0)), 2))
    found = wasserstein_lipschitz(f, DiscreteMeasure(x, counts.double() / 9), rtol=1e-10)
    assert found.value == pytest.approx(tokens_norm, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Unknown(random_attention(8, temperature=3.0, causal=True)),
        lambda: hs.Residual(Unknown(random_attention(9))),
    ],
)
def test_maps_without_a_closed_form_are_weighted_too(make: Callable[[], TokenMap]) -> None:
    f, mu = make(), DiscreteMeasure(tokens(24, 5, D), WEIGHTS, positions=POSITIONS)
    estimate = hs.local_lipschitz(f, mu, rtol=1e-8)
    assert estimate.method == "autodiff"
    dense = weighted_dense(f, mu.points, WEIGHTS, POSITIONS)
    assert float(estimate.value) == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-8)
    known = f.inner if isinstance(f, Unknown) else hs.Residual(f.inner.inner)
    assert wasserstein_lipschitz(f, mu, rtol=1e-8).splitting == pytest.approx(
        wasserstein_lipschitz(known, mu).splitting, rel=1e-9
    )


def other_attention(kind: str) -> TokenMap:
    generator = torch.Generator().manual_seed(31)
    query, key, value = (torch.randn(2, 3, D, generator=generator, dtype=torch.float64) / 2 for _ in range(3))
    output = torch.randn(D, 6, generator=generator, dtype=torch.float64)
    if kind == "sinkhorn":
        return hs.SinkhornAttention(query, key, value, output)
    return hs.L2Attention(query, key, value, output, causal=kind == "l2, causal")


@pytest.mark.parametrize("kind", ["l2", "l2, causal", "sinkhorn"])
def test_other_attentions_at_measures(kind: str) -> None:
    """The whole matrix for atoms that move; for one that splits, two blocks of the halves' matrix apart."""
    f, x = other_attention(kind), tokens(32, 5, D)
    found = wasserstein_lipschitz(f, DiscreteMeasure(x, WEIGHTS, positions=POSITIONS), rtol=1e-7)
    whole = torch.linalg.matrix_norm(weighted_dense(f, x, WEIGHTS, POSITIONS), 2)
    assert float(found.weighted.value) == pytest.approx(float(whole), rel=1e-6)
    halves = weighted_dense(
        f, x.repeat_interleave(2, 0), WEIGHTS.repeat_interleave(2) / 2, POSITIONS.repeat_interleave(2)
    ).unflatten(0, (10, D))
    halves = halves.unflatten(2, (10, D)).movedim(2, 1)
    apart = [torch.linalg.matrix_norm(halves[2 * i, 2 * i] - halves[2 * i, 2 * i + 1], 2) for i in range(5)]
    assert found.splitting == pytest.approx(float(torch.stack(apart).max()), rel=1e-6)
    assert found.atom == int(torch.stack(apart).argmax())


def test_float32_measures_are_measured_in_float64() -> None:
    f, x = random_attention(10, dtype=torch.float32), tokens(25, 5, D, dtype=torch.float32)
    mu = DiscreteMeasure(x, WEIGHTS)
    estimate = hs.local_lipschitz(f, mu, rtol=1e-10)
    exact = weighted_dense(f.to(dtype=torch.float64), x.double(), WEIGHTS)
    assert estimate.value.dtype == torch.float64
    assert float(estimate.value) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-10)


def test_what_cannot_be_measured_is_refused() -> None:
    mu = DiscreteMeasure(tokens(26, 5, D), WEIGHTS)
    with pytest.raises(ArgumentError, match="a map of howsmooth"):
        hs.local_lipschitz(torch.sin, mu)
    with pytest.raises(ArgumentError, match="positions"):
        hs.local_lipschitz(random_attention(0, causal=True), mu)
    with pytest.raises(ArgumentError, match="dtype"):
        hs.local_lipschitz(random_attention(0, dtype=torch.float32), mu)
    with pytest.raises(ArgumentError, match="dimension"):
        hs.local_lipschitz(random_attention(0, d=4), mu)
    with pytest.raises(ArgumentError, match="max_iterations"):
        hs.local_lipschitz(random_attention(0), mu, max_iterations=0)
    for words in ({"rtol": 0.0}, {"confidence": 2.0}, {"seed": (1, 2)}):
        with pytest.raises(HowsmoothError):
            wasserstein_lipschitz(random_attention(0), mu, **words)
    with pytest.raises(ArgumentError, match=r"got Tensor\. For tokens X use DiscreteMeasure"):
        wasserstein_lipschitz(random_attention(0), mu.points)
    gaussian = Gaussian(torch.zeros(D).double(), torch.eye(D).double())
    for measured in (hs.local_lipschitz, wasserstein_lipschitz):
        with pytest.raises(ArgumentError, match="atoms"):
            measured(random_attention(0), gaussian)
    with pytest.raises(ArgumentError, match="closed form"):
        hs.local_lipschitz(Unknown(random_attention(0)), mu, method="closed form")


def test_a_constant_beyond_the_range_of_float64_is_refused() -> None:
    """Roots of weights e^676 apart fit into float64, the constant of 10^13 times the values does not."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    f, x = hs.SelfAttention(-one, one, 1e13 * one, scale=1.0), torch.tensor([[1.0], [-1.0]]).double() * 26.0
    logs = torch.tensor([-2 * 26.0**2 - math.log(3), 0.0]).double()
    with pytest.raises(NonFiniteError):
        hs.local_lipschitz(f, DiscreteMeasure(x, log_weights=logs - torch.logsumexp(logs, 0)))
    small = hs.SelfAttention(-one, one, 1e-200 * one, scale=1.0)
    found = hs.local_lipschitz(small, DiscreteMeasure(x / 26, WEIGHTS[:2] / WEIGHTS[:2].sum()))
    big = hs.local_lipschitz(line(-1.0), DiscreteMeasure(x / 26, WEIGHTS[:2] / WEIGHTS[:2].sum()))
    assert float(found.value) == pytest.approx(1e-200 * float(big.value), rel=1e-9)


@given(n=st.integers(1, 7), seed=st.integers(0, 99), far=st.floats(0.01, 3.0))
def test_w2_of_empirical_measures_is_at_most_the_distance_of_tokens(n: int, seed: int, far: float) -> None:
    x = tokens(seed, n, 3)
    y = x + far * tokens(seed + 1, n, 3)
    assert w2(DiscreteMeasure(x), DiscreteMeasure(y)) <= float((x - y).norm()) / math.sqrt(n) * (1 + 1e-9)


@given(n=st.integers(2, 7), seed=st.integers(0, 99), share=st.floats(0.05, 0.95))
def test_small_perturbations_of_distinct_tokens_are_matched_by_the_identity(
    n: int, seed: int, share: float
) -> None:
    """Lemma B.3: with all displacements below half of the least distance, W₂ is |X − Y| / √n."""
    x = tokens(seed, n, 3)
    gap = float((torch.cdist(x, x) + torch.diag(torch.full((n,), math.inf).double())).min())
    e = tokens(seed + 1, n, 3)
    y = x + share * gap / 4 * e / e.norm(dim=1, keepdim=True)
    _, columns = linear_sum_assignment(cdist(x.numpy(), y.numpy(), "sqeuclidean"))
    assert columns.tolist() == list(range(n))
    distance = float((x - y).norm()) / math.sqrt(n)
    assert w2(DiscreteMeasure(x), DiscreteMeasure(y)) == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_the_image_of_an_empirical_measure_is_that_of_the_tokens(causal: bool) -> None:
    """Lemma B.3: F(m(X)) = m(f(X)), here for tokens in any order where there is no mask."""
    f, x = random_attention(11, causal=causal), tokens(27, 6, D)
    image = f(DiscreteMeasure.sequence(x))
    torch.testing.assert_close(image.points, f(x), rtol=1e-12, atol=1e-13)
    assert w2(image, DiscreteMeasure.sequence(f(x))) < 1e-12
    if not causal:
        shuffled = f(DiscreteMeasure(x[torch.randperm(6)]))
        assert w2(shuffled, DiscreteMeasure(f(x))) < 1e-7


@pytest.mark.parametrize("causal", [False, True])
def test_the_constant_of_tokens_is_reached_in_the_distance_of_measures(causal: bool) -> None:
    """Lemmas 3.2 and 4.2: W₂ (d₂ where masked) of F moves along the leading direction as f does.

    So Lip(f on B_R^n) <= Lip(F), locally: the quotient tends to ‖D_X f‖.
    """
    f, x, t = random_attention(12, causal=causal, temperature=3.0), tokens(28, 6, D), 1e-5
    found = hs.local_lipschitz(f, x, rtol=1e-9)
    mu, nu = (DiscreteMeasure.sequence(y) for y in (x, x + t * found.input_direction))
    if not causal:
        mu, nu = DiscreteMeasure(mu.points), DiscreteMeasure(nu.points)
    assert w2(mu, nu) == pytest.approx(t / math.sqrt(6), rel=1e-6)
    assert w2(f(mu), f(nu)) / w2(mu, nu) == pytest.approx(float(found.value), rel=1e-3)


@given(seed=st.integers(0, 99), far=st.floats(0.01, 2.0))
def test_masked_distance_of_sequences_is_that_of_tokens(seed: int, far: float) -> None:
    """Lemma 4.2: at distinct positions d₂(m(X), m(Y)) = |X − Y| / √n, near or far."""
    x = tokens(seed, 5, 3)
    y = x + far * tokens(seed + 1, 5, 3)
    distance = w2(DiscreteMeasure.sequence(x), DiscreteMeasure.sequence(y))
    assert distance == pytest.approx(float((x - y).norm()) / math.sqrt(5), rel=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_the_weighted_norm_is_reached_by_moving_the_atoms(causal: bool) -> None:
    f, x, t = random_attention(13, temperature=4.0, causal=causal), 1.5 * tokens(29, 5, D), 1e-5
    positions = POSITIONS if causal else None
    mu = DiscreteMeasure(x, WEIGHTS, positions=positions)
    found = hs.local_lipschitz(f, mu, rtol=1e-9)
    e = found.input_direction / WEIGHTS.sqrt()[:, None]
    nu = DiscreteMeasure(x + t * e, WEIGHTS, positions=positions)
    assert w2(mu, nu) == pytest.approx(t, rel=1e-6)
    assert w2(f(mu), f(nu)) / w2(mu, nu) == pytest.approx(float(found.value), rel=1e-3)


# ---- Lemma C.5, and what it lacks: atoms that split


def halved(mu: DiscreteMeasure, moves: Tensor) -> DiscreteMeasure:
    """Each atom in two halves, moved by ``moves`` (2 n, d)."""
    positions = None if mu.positions is None else mu.positions.repeat_interleave(2)
    return DiscreteMeasure(
        mu.points.repeat_interleave(2, 0) + moves, mu.weights.repeat_interleave(2) / 2, positions=positions
    )


def test_the_constant_in_w2_is_reached_by_splitting() -> None:
    f, mu, t = line(-1.0), on_the_line([0.0, 2.0, -2.0], [0.6, 0.2, 0.2]), 1e-4
    found = wasserstein_lipschitz(f, mu)
    moves = torch.zeros(6, 1, dtype=torch.float64)
    moves[2 * found.atom], moves[2 * found.atom + 1] = (
        s * t * found.splitting_direction for s in (1.0, -1.0)
    )
    nu = halved(mu, moves)
    quotient = w2(f(mu), f(nu)) / w2(mu, nu)
    assert quotient == pytest.approx(found.value, rel=1e-4)
    assert quotient > 1.1 * float(found.weighted.value)


@pytest.mark.parametrize("causal", [False, True])
def test_no_small_displacement_of_split_atoms_does_more(causal: bool) -> None:
    """Pairs ν, ν' within 1e-3 of μ in W_∞, random or nearly apart in the worst direction, stay below it."""
    f, x = random_attention(14, heads=1, temperature=6.0, causal=causal), tokens(30, 5, D)
    mu = DiscreteMeasure(x, WEIGHTS, positions=POSITIONS if causal else None)
    found = wasserstein_lipschitz(f, mu)
    worst = (found.weighted.input_direction / WEIGHTS.sqrt()[:, None]).repeat_interleave(2, 0)
    largest = 0.0
    for trial in range(20):
        first, second = 1e-4 * tokens(2 * trial, 10, D), 1e-4 * tokens(2 * trial + 1, 10, D)
        if trial % 2:
            second = first + 1e-4 * (worst + 0.05 * second / 1e-4)
        nu, other = halved(mu, first), halved(mu, second)
        largest = max(largest, w2(f(nu), f(other)) / w2(nu, other))
    assert 0.9 * found.value < largest <= found.value * (1 + 2e-3)


def test_a_little_mass_moved_far_is_another_matter() -> None:
    """A = 10, half a mass at −1 and at 1: the constant is 1, and yet W₂-small changes of μ do 1.6 times more.

    The mass 1e-8 moved from −1 to 0.2 has W₂ = 1.2e-4 and W_∞ = 1.2; its image goes from −1 to tanh 2.
    """
    f, mu = line(10.0), on_the_line([-1.0, 1.0], [0.5, 0.5])
    local = wasserstein_lipschitz(f, mu).value
    assert local == pytest.approx(1.0, abs=1e-6)
    little = 1e-8
    nu = on_the_line([-1.0, 0.2, 1.0], [0.5 - little, little, 0.5])
    quotient = w2(f(mu), f(nu)) / w2(mu, nu)
    assert quotient == pytest.approx((1 + math.tanh(2.0)) / 1.2, rel=1e-3)
    assert quotient > 1.6 * local


# ---- globally: the supremum of the local constants


def test_the_supremum_over_the_ball_bounds_far_measures() -> None:
    """W₂(F(μ), F(ν)) <= W₂(μ, ν) times the largest local constant along the displacement between them."""
    f = random_attention(15, heads=1, d=2, d_out=2, key_dim=2, value_dim=2, temperature=5.0, biases=False)
    for seed in range(2):
        x, y = tokens(40 + seed, 4, 2), tokens(60 + seed, 4, 2)
        _, match = linear_sum_assignment(cdist(x.numpy(), y.numpy(), "sqeuclidean"))
        y = y[torch.as_tensor(match)]
        mu, nu = DiscreteMeasure(x), DiscreteMeasure(y)
        way = [DiscreteMeasure(x + t * (y - x)) for t in torch.linspace(0, 1, 41).tolist()]
        local = [float(torch.linalg.matrix_norm(weighted_dense(f, m.points, m.weights), 2)) for m in way]
        # The quotient is at most the mean of the local constants; the mesh leaves a part in a thousand.
        assert w2(f(mu), f(nu)) <= w2(mu, nu) * np.trapezoid(local, dx=0.025) * (1 + 1e-3)
