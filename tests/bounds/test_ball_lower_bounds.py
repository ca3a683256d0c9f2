"""Lower bounds over a ball: each against dense Jacobians at its own witness, and against closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth import adversarial
from howsmooth.adversarial import balanced
from howsmooth.bounds.attention_parameters import Head, parameters_of
from howsmooth.bounds.ball_lower_bounds import (
    causal_two_cluster_lower_bound,
    causal_two_heavy_tokens_lower_bound,
    equal_tokens_lower_bound,
    heavy_token_lower_bound,
    log_column_norm,
    proposition_3_4,
    quadratic_growth,
    two_cluster_lower_bound,
    two_heavy_tokens_lower_bound,
)
from howsmooth.bounds.ball_upper_bounds import ball_upper_bound, causal_ball_upper_bound
from howsmooth.bounds.bound import Bound
from howsmooth.bounds.worst_case_tokens import (
    HeavyTokens,
    searched_pairs,
    searched_tokens,
    two_cluster_points,
)
from tests._cases import D, dense_jacobian, random_attention, tokens, true_norm
from tests._selection import others_slow

ROTATION = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)


def eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def attention_of(head: Head, *, causal: bool = False) -> hs.SelfAttention:
    """The head as an attention, from its A, V, b."""
    return hs.SelfAttention(
        head.A[None], eye(head.d)[None], head.V[None], query_bias=head.b[None], scale=1.0, causal=causal
    )


def norm_at(f: hs.SelfAttention, x: Tensor) -> float:
    return float(true_norm(f, x[None])[0])


def failed(bound: Bound) -> list[str]:
    return [hypothesis.statement for hypothesis in bound.hypotheses if not hypothesis.holds]


# ---- the lemma


@pytest.mark.parametrize(("n", "causal"), [(1, True), *itertools.product((2, 3, 7), (False, True))])
@pytest.mark.parametrize("heads", [1, 3])
def test_heavy_token_is_the_norm_of_the_heavy_columns(heads, n, causal):
    """Without a mask of the rows of the light tokens, with a causal one of every row."""
    f = random_attention(40, heads=heads, temperature=2.0, causal=causal)
    z, w = tokens(41, 2, D)
    x = torch.cat([z[None], w.expand(n - 1, D)])
    columns = dense_jacobian(f, x).reshape(n, f.d_out, n * D)[0 if causal else 1 :, :, :D].reshape(-1, D)
    bound = math.exp(log_column_norm(parameters_of(f), n, HeavyTokens(z[None], w)))
    assert bound == pytest.approx(float(torch.linalg.matrix_norm(columns, 2)), rel=1e-10)
    assert bound <= norm_at(f, x)


# ---- each statement at its witness


@pytest.mark.parametrize(
    ("sizes", "causal"),
    others_slow(
        itertools.product([(1, False, 2), (1, True, 2), (1, False, 6), (2, True, 6)], [False, True]),
        [((1, True, 2), True), ((1, False, 6), False), ((1, False, 6), True), ((2, True, 6), False)],
    ),
)
def test_each_bound_is_below_the_norm_at_its_witness(sizes, causal):
    heads, biases, n = sizes
    radius = 2.0
    f = random_attention(50, heads=heads, biases=biases, temperature=2.0, d_out=None, causal=causal)
    folded = [parameters_of(f).folded(h) for h in range(heads)]

    def largest(witnesses):
        return max(norm_at(f, witness.tokens(n)) for witness in witnesses)

    if not causal:
        pairs = largest(t for head in folded for t in searched_tokens(head, radius)[:2])
        assert heavy_token_lower_bound(f, n, radius).value <= pairs
    clusters = [two_cluster_points(head, radius, c) for head in folded for c in ("max", "min")]
    if heads == 1 and any(clusters):
        two = causal_two_cluster_lower_bound if causal else two_cluster_lower_bound
        assert two(f, n, radius).value <= largest(t for t in clusters if t is not None)
    if n >= 3:
        ties = largest(t for head in folded for t in searched_pairs(head, n, radius, masked=causal)[:2])
        tie = causal_two_heavy_tokens_lower_bound if causal else two_heavy_tokens_lower_bound
        assert 0.5 * ties < tie(f, n, radius).value <= ties


def test_a_tie_is_a_tie():
    head = parameters_of(random_attention(75, heads=1)).folded(0)
    witness = searched_pairs(head, 9, 2.0, masked=False)[0]
    y = head.A @ witness.light + head.b
    scores = witness.heavies @ y
    assert float(scores[0] - scores[1]) == pytest.approx(0.0, abs=1e-9)
    # half their difference is orthogonal to y, their mean parallel to it
    mean = witness.heavies.mean(0)
    assert float(mean @ y) == pytest.approx(float(mean.norm() * y.norm()), rel=1e-9)


# ---- closed forms


@pytest.mark.parametrize("gammas", [(-1.0, 2.0, 0.5), (-0.1, 2.0, 0.5)])
@pytest.mark.parametrize("n", [2, 5, 100])
def test_two_clusters_have_their_closed_form(gammas, n):
    radius = 1.3
    V = tokens(80, 4, 3)
    head = Head(torch.diag(torch.tensor(gammas, dtype=torch.float64)), V)
    value = {}
    for gamma, axis in ((-gammas[0], 0), (gammas[1] / 8, 1)):
        g = gamma * radius**2
        p = 1 / (1 + (n - 1) * math.exp(-2 * g))
        u = eye(3)[axis]
        steep = V @ (eye(3) + 2 * g * (1 - p) * torch.outer(u, u))
        value[gamma] = math.sqrt(n - 1) * p * float(torch.linalg.matrix_norm(steep, 2))
    assert two_cluster_lower_bound(head, n, radius).value == pytest.approx(max(value.values()), rel=1e-9)
    unit = Head(head.A, eye(3))
    gamma = max(-gammas[0], gammas[1] / 8)
    paper = math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * radius**2 * gamma))
    assert proposition_3_4(unit, n, radius).value == pytest.approx(paper, rel=1e-9)
    assert proposition_3_4(unit, n, radius).value <= two_cluster_lower_bound(unit, n, radius).value


def test_masked_two_clusters_reach_both_closed_forms():
    n, radius = 20, 1.5
    V = torch.diag(torch.tensor([0.5, 2.0], dtype=torch.float64))
    head = Head(torch.diag(torch.tensor([-1.0, 0.0], dtype=torch.float64)), V)
    g = radius**2
    p = [1 / (1 + (i - 1) * math.exp(-2 * g)) for i in range(2, n + 1)]
    across = math.sqrt(1 + sum(t * t for t in p)) * 2.0
    along = math.sqrt(sum((t * (1 + 2 * g * (1 - t))) ** 2 for t in p)) * 0.5
    value = causal_two_cluster_lower_bound(head, n, radius).value
    assert value >= max(across, along) * (1 - 1e-9)
    along_with_first = math.sqrt(0.25 + along**2)
    assert value == pytest.approx(max(across, along_with_first), rel=1e-9)


def test_rotations_have_no_real_eigenvalue_but_a_bound():
    n, radius, size = 50, 1.7, 3.0
    head = Head(size * ROTATION, eye(2))
    assert failed(two_cluster_lower_bound(head, n, radius)) == [
        "A has a real eigenvalue (else use heavy_token_lower_bound)"
    ]
    assert failed(proposition_3_4(head, n, radius)) == [
        "A has a real eigenvalue (else use heavy_token_lower_bound)"
    ]
    # |Aw| − ⟨Aw, w⟩ = 3 for every unit w
    p = 1 / (1 + (n - 1) * math.exp(-size * radius**2))
    w = torch.tensor([radius, 0.0], dtype=torch.float64)
    y = size * ROTATION @ w
    steep = eye(2) + (1 - p) * torch.outer(radius * y / y.norm() - w, y)
    formula = math.sqrt(n - 1) * p * float(torch.linalg.matrix_norm(steep, 2))
    assert heavy_token_lower_bound(head, n, radius).value == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_gap_is_at_least_what_the_page_says(seed):
    head = Head(tokens(90 + seed, 4, 4), eye(4))
    points = searched_tokens(head, 1.0)[0]
    gap = float((head.A @ points.light) @ (points.heavies[0] - points.light))
    values = torch.linalg.eigvals(head.A)
    real = values.real[values.imag == 0]
    least = [head.A_norm / 4, *(-2 * real).tolist(), *(real / 4).tolist()]
    assert gap >= max(least) * (1 - 1e-9)


def test_tie_is_at_least_its_formula():
    n, radius = 30, 2.0
    head = parameters_of(random_attention(95, heads=1)).folded(0)
    witness = searched_pairs(head, n, radius, masked=False)[0]
    y = head.A @ witness.light + head.b
    half = (witness.heavies[0] - witness.heavies[1]) / 2
    gap = float(y @ (witness.heavies[0] - witness.light))
    p = 1 / (2 + (n - 2) * math.exp(-gap))
    formula = math.sqrt(2 * (n - 2)) * p * float(y.norm() * (head.V @ half).norm())
    assert formula * (1 - 1e-9) <= two_heavy_tokens_lower_bound(head, n, radius).value <= 1.2 * formula
    p_i = [1 / (2 + (i - 2) * math.exp(-gap)) for i in range(3, n + 1)]
    masked = math.sqrt(2 * sum(t * t for t in p_i)) * float(y.norm() * (head.V @ half).norm())
    assert causal_two_heavy_tokens_lower_bound(head, n, radius).value >= masked * (1 - 1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_quadratic_growth(n, causal):
    radius, gamma = 1.5, 0.7
    head = Head(gamma * eye(2), eye(2))
    f = attention_of(head, causal=causal)
    value = quadratic_growth(f, n, radius).value
    if n % 2:
        assert value == pytest.approx((1 + (n - 1) * gamma * radius**2) / n, rel=1e-9)
    x = torch.zeros(1, 2, dtype=torch.float64) if n == 1 else balanced(f, n, radius).x
    assert float(x.norm(dim=1).max()) <= radius * (1 + 1e-12)
    last = dense_jacobian(f, x)[-2:, -2:]
    assert float(torch.linalg.matrix_norm(last, 2)) == pytest.approx(value, rel=1e-9)


def test_quadratic_growth_of_two_tokens_of_any_head():
    # Heads whose A and V have no directions in common, and biases, which the tokens avoid.
    for seed in range(5):
        head = Head(tokens(seed, 4, 4), tokens(seed + 10, 3, 4), tokens(seed + 20, 4))
        plain = Head(head.A, head.V)
        radius = 100.0
        x = balanced(head, 2, radius).x
        assert float((x[0] @ head.b).abs()) <= 1e-9 * radius
        for one, built in ((head, x), (plain, balanced(plain, 2, radius).x)):
            assert norm_at(attention_of(one), built) >= 0.1 * radius**2 * head.A_norm * head.V_norm / 4
        lower = quadratic_growth(plain, 2, radius).value
        assert lower <= norm_at(attention_of(plain), balanced(plain, 2, radius).x) * (1 + 1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("masking", ["none", "causal", "other"])
def test_repeated_token_is_exact(n, masking):
    mask = None if masking != "other" else torch.rand(n, n) < 0.5
    if mask is not None:
        mask |= torch.eye(n, dtype=torch.bool)
    f = random_attention(97, causal=masking == "causal", mask=mask)
    x = tokens(98, 1, D).expand(n, D)
    assert equal_tokens_lower_bound(f, n, 1.0).value == pytest.approx(norm_at(f, x), rel=1e-9)


def test_cesaro_norms():
    head = attention_of(Head(eye(1), eye(1)), causal=True)
    assert equal_tokens_lower_bound(head, 2, 1.0).value == pytest.approx(1.1441, abs=5e-5)
    values = [equal_tokens_lower_bound(head, n, 1.0).value for n in (10, 100, 512, 513, 20_000, 10**400)]
    assert values == sorted(values)
    assert 1.6 < values[-1] < 2.0  # Hardy's constant is 2, approached as 1/log² n


# ---- how near the upper bounds, and rates


def nilpotent(a: float) -> Head:
    """Scores that send e_1 to e_2, and values that read e_3: the tie's best case."""
    A = torch.zeros(3, 3, dtype=torch.float64)
    A[1, 0] = a
    return Head(A, eye(3))


def test_a_tie_reaches_nine_tenths_of_theorem_a():
    head = nilpotent(60.0)
    x = adversarial.two_heavy_tokens(head, 400, 1.0).x
    value = float(hs.local_lipschitz(attention_of(head), x).value)
    assert value >= 0.9 * ball_upper_bound(head, 400, 1.0).value
    assert value <= ball_upper_bound(head, 400, 1.0).value
    assert two_heavy_tokens_lower_bound(head, 400, 1.0).value == pytest.approx(value, rel=0.01)


def test_a_masked_tie_reaches_nine_tenths_of_masked_theorem_a():
    head = nilpotent(60.0)
    value = causal_two_heavy_tokens_lower_bound(head, 400, 1.0).value
    assert (
        0.9 * causal_ball_upper_bound(head, 400, 1.0).value
        <= value
        <= causal_ball_upper_bound(head, 400, 1.0).value
    )


def test_rates_in_n_and_in_radius():
    head = nilpotent(1.0)

    def slope(low: float, high: float, ratio: float) -> float:
        return (high - low) / math.log(ratio)

    by_n = slope(
        two_heavy_tokens_lower_bound(head, 1000, 30.0).log_value,
        two_heavy_tokens_lower_bound(head, 4000, 30.0).log_value,
        4.0,
    )
    assert by_n == pytest.approx(0.5, abs=0.02)
    by_radius = slope(
        two_heavy_tokens_lower_bound(head, 1000, 30.0).log_value,
        two_heavy_tokens_lower_bound(head, 1000, 60.0).log_value,
        2.0,
    )
    assert by_radius == pytest.approx(2.0, abs=0.05)
    unit = Head(-eye(2), eye(2))
    limit = proposition_3_4(unit, 1000, 30.0).value
    assert limit == pytest.approx(math.sqrt(999), rel=1e-9)


# ---- hypotheses, extremes, refusals


def test_hypotheses_that_fail_make_a_bound_trivial():
    f = random_attention(100, heads=1)
    causal = random_attention(100, heads=1, causal=True)
    assert "no mask" in failed(proposition_3_4(causal, 4, 1.0))
    assert {"V = I", "no query bias"} <= set(failed(proposition_3_4(f, 4, 1.0)))
    assert failed(two_cluster_lower_bound(causal, 4, 1.0)) == ["no mask"]
    assert failed(two_heavy_tokens_lower_bound(causal, 4, 1.0)) == ["no mask"]
    assert (
        failed(causal_two_heavy_tokens_lower_bound(f, 4, 1.0))
        == failed(causal_two_cluster_lower_bound(f, 4, 1.0))
        == ["a causal mask and no other"]
    )
    assert failed(two_heavy_tokens_lower_bound(f, 2, 1.0)) == ["n >= 3"]
    assert failed(quadratic_growth(f, 4, 1.0)) == ["no query bias"]
    one = Head(eye(1), eye(1))
    assert failed(two_heavy_tokens_lower_bound(one, 4, 1.0)) == ["d >= 2"]
    assert causal_two_heavy_tokens_lower_bound(
        Head(eye(2), eye(2)), 4, 1.0
    ).holds  # a bare head has no mask of its own
    for bound in (
        two_heavy_tokens_lower_bound(causal, 4, 1.0),
        causal_two_heavy_tokens_lower_bound(f, 4, 1.0),
        two_heavy_tokens_lower_bound(one, 4, 1.0),
    ):
        assert bound.value == 0.0


def test_zero_scores_and_zero_values():
    zero = torch.zeros(2, 2, dtype=torch.float64)
    uniform = Head(zero, eye(2))
    assert heavy_token_lower_bound(uniform, 5, 1.0).value == pytest.approx(math.sqrt(4) / 5)
    assert two_heavy_tokens_lower_bound(uniform, 5, 1.0).value == 0.0
    assert two_heavy_tokens_lower_bound(Head(eye(2), zero), 5, 1.0).value == 0.0
    assert equal_tokens_lower_bound(Head(eye(2), zero), 5, 1.0).value == 0.0
