"""Upper bounds on the ball of radius R for one head: unmasked, causal, with any mask.

A bound depends on the sizes ‖A‖, |b|, ‖V‖, on n and R alone. So a search for a counterexample fixes the sizes
and raises the norm of the Jacobian, taken by autodiff of a plain attention, over the directions and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.attention_parameters import Head, Parameters
from howsmooth.bounds.ball_upper_bounds import (
    ball_upper_bound,
    causal_ball_upper_bound,
    causal_mean_field_upper_bound,
    causal_rows,
    h_star,
    masked_ball_upper_bound,
    mean_field_upper_bound,
    theorem_3_3,
    theorem_3_5,
    theorem_4_3,
    theorem_4_4,
    theorem_e_3,
)
from howsmooth.bounds.bound import Bound
from howsmooth.errors import ArgumentError
from tests._cases import dense_jacobian, random_attention, tokens
from tests._search import Point, largest_ratio

D = 2


def row_norm_maximum(a: float) -> float:
    return float(h_star(torch.tensor(a, dtype=torch.float64)).value)


def log_causal_rows(n: int, a3: float) -> float:
    return float(causal_rows(n, torch.tensor(a3, dtype=torch.float64)).log)


UNMASKED = (theorem_3_3, theorem_e_3, ball_upper_bound, theorem_3_5, mean_field_upper_bound)
MASKED = (theorem_4_3, causal_ball_upper_bound, theorem_4_4, causal_mean_field_upper_bound)


def _every(
    attention: object, n: int, radius: float, functions: tuple[Callable[..., Bound], ...]
) -> list[Bound]:
    """Call each function, with or without the length."""
    free = (theorem_3_5, mean_field_upper_bound, theorem_4_4, causal_mean_field_upper_bound)
    return [f(attention, radius) if f in free else f(attention, n, radius) for f in functions]


def _attention(A: Tensor, b: Tensor, V: Tensor, visible: Tensor | None, X: Tensor) -> Tensor:
    """Attention as it is defined, sharing no code with the library."""
    scores = (X @ A.T + b) @ X.T
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1) @ X @ V.T


def _jacobian_norm(A: Tensor, b: Tensor, V: Tensor, visible: Tensor | None, X: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(lambda x: _attention(A, b, V, visible, x))(X)
    return torch.linalg.matrix_norm(jacobian.reshape(-1, X.numel()), 2)


def _in_ball(X: Tensor, radius: float) -> Tensor:
    lengths = X.norm(dim=-1, keepdim=True)
    return X * (radius / lengths.clamp(min=radius))


def _largest_norm(
    n: int,
    a: float,
    bias: float,
    visible: Tensor | None,
    *,
    radius: float,
    trials: int,
    steps: int,
    seed: int = 0,
) -> float:
    """Largest ‖D_X f‖ found with ‖A‖R² = a, |b|R = bias, ‖V‖ = 1 and tokens of norm at most R."""

    def draw(generator: torch.Generator) -> Point:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        return {
            "A": normal(D, D) - torch.eye(D),
            "b": normal(D),
            "V": normal(D, D),
            "X": 2 * radius * normal(n, D),
        }

    def norm(point: Point) -> Tensor:
        A = point["A"] * (a / radius**2 / torch.linalg.matrix_norm(point["A"], 2))
        b = point["b"] * (bias / radius / point["b"].norm())
        V = point["V"] / torch.linalg.matrix_norm(point["V"], 2)
        return _jacobian_norm(A, b, V, visible, _in_ball(point["X"], radius))

    return largest_ratio(norm, draw, trials=trials, steps=steps, seed=seed, rate=0.1)


def _head(a: float, bias: float, radius: float) -> Head:
    """A head of those sizes; the bounds see nothing else of it."""
    e = torch.eye(D, dtype=torch.float64)
    return Head(e * (a / radius**2), e, e[0] * (bias / radius) if bias else None)


def _causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


SIZES = [(2, 0.3, 0.0), (5, 0.6, 0.0), (3, 1.5, 0.0), (7, 4.0, 0.0), (4, 0.5, 1.0), (6, 2.0, 0.5)]


# ---- searches for a counterexample


@pytest.mark.parametrize(("n", "a", "bias"), SIZES)
def test_search_unmasked(n: int, a: float, bias: float) -> None:
    radius = 1.7
    found = _largest_norm(n, a, bias, None, radius=radius, trials=2, steps=25)
    for bound in _every(_head(a, bias, radius), n, radius, UNMASKED):
        assert bound.holds == (bias == 0 or bound.name not in ("theorem_3_3", "theorem_3_5"))
        assert found <= bound.value, bound
    assert found > 0.35 * ball_upper_bound(_head(a, bias, radius), n, radius).value  # the search is one


@pytest.mark.parametrize(("n", "a", "bias"), SIZES)
def test_search_masked(n: int, a: float, bias: float) -> None:
    radius = 0.6
    found = _largest_norm(n, a, bias, _causal(n), radius=radius, trials=2, steps=25)
    for bound in _every(_head(a, bias, radius), n, radius, MASKED):
        assert found <= bound.value, bound
    assert found > 0.35 * causal_ball_upper_bound(_head(a, bias, radius), n, radius).value


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_search_long(masked: bool) -> None:
    ratios: dict[str, float] = {}
    for n in (2, 3, 5, 9, 14):
        for a in (0.01, 0.3, 0.5, 0.8, 1.5, 3.0, 6.0):
            for bias in (0.0, 0.7 * a):
                visible = _causal(n) if masked else None
                found = _largest_norm(n, a, bias, visible, radius=1.0, trials=4, steps=150, seed=1)
                for bound in _every(_head(a, bias, 1.0), n, 1.0, MASKED if masked else UNMASKED):
                    assert found <= bound.value, (n, a, bias, bound)
                    ratios[bound.name] = max(ratios.get(bound.name, 0.0), found / bound.value)
    print(ratios)
    assert max(ratios.values()) > (0.9 if masked else 0.95)


@pytest.mark.parametrize("name", ["window", "padding", "alone and all"])
def test_search_any_mask(name: str) -> None:
    n = 5
    i = torch.arange(n)
    visible = {
        "window": (i[:, None] - i[None, :]).abs() <= 1,
        "padding": (i[None, :] < 3).expand(n, n).clone(),
        "alone and all": torch.eye(n, dtype=torch.bool) | (i[:, None] == 0),
    }[name]
    found = _largest_norm(n, 1.2, 0.0, visible, radius=1.0, trials=2, steps=30)
    head = _head(1.2, 0.0, 1.0)
    bound = masked_ball_upper_bound(Parameters((head,), (torch.eye(2).double(),), "other", visible), n, 1.0)
    assert bound.holds
    assert 0.35 * bound.value < found <= bound.value


# ---- equality and near-equality


def test_without_scores_theorem_a_is_exact() -> None:
    """A = 0: f is the mean of the values, of norm ‖V‖."""
    V = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    head = Head(torch.zeros(2, 2, dtype=torch.float64), V)
    zero = torch.zeros(2, dtype=torch.float64)
    truth = float(_jacobian_norm(head.A, zero, V, None, tokens(0, 6, 2)))
    for bound in (ball_upper_bound(head, 6, 100.0), mean_field_upper_bound(head, 100.0)):
        assert bound.value == pytest.approx(truth, rel=1e-11)
        assert bound.value >= truth * (1 - 1e-14)


@pytest.mark.parametrize("function", [ball_upper_bound, causal_ball_upper_bound, masked_ball_upper_bound])
def test_one_token_has_the_norm_of_the_values(function: Callable[..., Bound]) -> None:
    assert function(_head(7.0, 2.0, 1.0), 1, 1.0).value == pytest.approx(1.0, rel=1e-11)


def test_two_clusters_have_the_exponent_of_n_free() -> None:
    """A = −aI and the best length: the truth over the n-free bound stays above 0.6 as a grows."""
    for a in (4.0, 8.0, 30.0):
        n = 1 + 3 * math.exp(2 * a)
        p = 1 / (1 + (n - 1) * math.exp(-2 * a))
        truth = math.sqrt(n - 1) * p * (1 + 2 * a * (1 - p))  # Proposition 3.4, sharper form
        assert 0.6 < truth / mean_field_upper_bound(_head(a, 0.0, 1.0), 1.0).value < 1


def test_hardy_is_the_limit_of_the_masked_bound() -> None:
    """A = 0: f^m is the Cesàro mean, whose norm tends to 2, the bound for every n."""
    head = _head(0.0, 0.0, 1.0)
    assert causal_mean_field_upper_bound(head, 1.0).value == pytest.approx(2.0, rel=1e-11)
    norms = []
    for n in (2, 30, 1000):
        cesaro = torch.ones(n, n).double().tril() / torch.arange(1, n + 1).double()[:, None]
        norms.append(float(torch.linalg.matrix_norm(cesaro, 2)))
        assert norms[-1] <= causal_ball_upper_bound(head, n, 1.0).value
        assert causal_ball_upper_bound(head, n, 1.0).value == pytest.approx(float(cesaro.norm()), rel=1e-11)
    assert norms == sorted(norms)
    assert 1.74 < norms[-1] < 2


# ---- Theorem 4.4 as printed is false


def test_theorem_4_4_as_printed_is_false() -> None:
    """A = 0, n = 2: the norm of the masked mean is 1.144, the printed constant 1."""
    eye = torch.eye(2, dtype=torch.float64)[None]
    f = hs.SelfAttention(0 * eye, eye, eye, causal=True)
    truth = float(torch.linalg.matrix_norm(dense_jacobian(f, tokens(0, 2, 2)), 2))
    assert truth == pytest.approx(1.1441228056353687, rel=1e-12)  # [[1, 0], [1/2, 1/2]]
    bound = theorem_4_4(f, 1.0)
    assert bound.formula == pytest.approx(1.0)
    assert not bound.holds
    assert bound.value == math.inf
    assert causal_mean_field_upper_bound(f, 1.0).value >= truth


def test_theorem_4_4_is_false_for_every_small_a() -> None:
    """Copies of one token give the Cesàro mean whatever A is: 1.66 at n = 150 against 1.59 for a = 0.1."""
    n, a = 150, 0.1
    X = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(n, 2)
    P = torch.softmax((a * X @ X.T).masked_fill(~_causal(n), -math.inf), dim=-1)
    truth = float(torch.linalg.matrix_norm(P, 2))  # z = 0 and C = 0: the Jacobian is P ⊗ V
    bound = theorem_4_4(_head(a, 0.0, 1.0), 1.0)
    assert bound.formula < truth
    assert not bound.holds


def test_theorem_4_4_follows_where_it_is_given() -> None:
    for a in [0.4, 0.41, 0.6, 0.94, 2.0, 10.0, 300.0]:
        bound = theorem_4_4(_head(a, 0.0, 1.0), 1.0)
        assert bound.holds
        assert causal_mean_field_upper_bound(_head(a, 0.0, 1.0), 1.0).log_value <= bound.log_value
    assert not theorem_4_4(_head(0.39, 0.0, 1.0), 1.0).holds
    assert (
        causal_mean_field_upper_bound(_head(0.39, 0.0, 1.0), 1.0).value
        > theorem_4_4(_head(0.39, 0.0, 1.0), 1.0).formula
    )


# ---- the parts of the proofs


@given(st.integers(2, 7), st.floats(0.0, 20.0), st.integers(0, 10_000))
def test_lemma_2(atoms: int, a: float, seed: int) -> None:
    """Σ P_j²(1 + t_j)² <= h*(a) where Σ P_j t_j = 0 and t lies in an interval of length 2a."""
    rng = np.random.default_rng(seed)
    P = rng.dirichlet(np.full(atoms, 0.3))
    t = rng.uniform(0, 2 * a, atoms)
    t -= P @ t
    assert np.sum(P**2 * (1 + t) ** 2) <= row_norm_maximum(a) * (1 + 1e-12)


@pytest.mark.parametrize("a", [0.0, 0.5, 0.50001, 0.7, 1.0, 3.0, 47.0, 1e5, 9.9e7])
def test_h_star(a: float) -> None:
    p = np.concatenate([np.linspace(0, 1, 200_001), 0.5 + np.linspace(-3, 3, 2001) / (2 * a + 6)])
    grid = p**2 * (1 + 2 * a * (1 - p)) ** 2 + (1 - p) ** 2 * (1 - 2 * a * p) ** 2
    assert row_norm_maximum(a) == pytest.approx(grid.max(), rel=1e-7)
    assert row_norm_maximum(a) >= grid.max() * (1 - 1e-12)
    assert row_norm_maximum(a) <= (1 + a * a / 2) * (1 + 1e-15)
    if a <= 0.5:
        assert row_norm_maximum(a) == 1.0


def test_h_star_for_huge_arguments() -> None:
    assert row_norm_maximum(1e8 * (1 + 1e-9)) == pytest.approx(row_norm_maximum(1e8), rel=3e-9)
    assert row_norm_maximum(1e200) == math.inf


@pytest.mark.parametrize("a3", [0.0, 0.2, 0.9, 3.0, 4.5, 5.5, 20.0])
def test_long_sums_of_rows(a3: float) -> None:
    def direct(n: int) -> float:
        p_bar = 1 / (1 + np.arange(n) * math.exp(-2 * a3))
        return math.log(1 + math.fsum(np.minimum(row_norm_maximum(a3), (1 + a3**2) * p_bar)[1:]))

    assert direct(90_000) - 1e-14 <= log_causal_rows(90_000, a3) <= direct(90_000) + 1e-9
    assert log_causal_rows(300, a3) == pytest.approx(direct(300), abs=1e-13)


@pytest.mark.parametrize("a", [0.05, 0.5, 1.0, 3.0])
def test_weights_below_m_over_i_have_norm_at_most_two_root_m(a: float) -> None:
    """Lemma 4: rows of sum one with P_ij <= e^{2a}/i have norm at most 2e^a."""
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(20):
        scores = torch.rand(120, 120, generator=generator, dtype=torch.float64).mul(2 * a).sub(a)
        scores[:, 0] = scores[:, :3].max()
        P = torch.softmax(scores.masked_fill(~_causal(120), -math.inf), dim=-1)
        assert bool((P * torch.arange(1, 121)[:, None] <= math.exp(2 * a)).all())
        largest = max(largest, float(torch.linalg.matrix_norm(P, 2)))
    rows = torch.arange(1, 501, dtype=torch.float64)[:, None]  # greedy: all weight as early as it may go
    cap = (math.exp(2 * a) / rows).clamp(max=1)
    greedy = torch.minimum(cap, (1 - cap * (rows.T - 1)).clamp(min=0))
    assert torch.allclose(greedy.sum(dim=1), torch.ones(500, dtype=torch.float64))
    largest = max(largest, float(torch.linalg.matrix_norm(greedy, 2)))
    assert math.exp(a) < largest <= 2 * math.exp(a)


@given(st.floats(0.0, 30.0), st.floats(0.0, 10.0), st.integers(1, 10**12))
def test_theorem_a_is_below_the_paper(a: float, bias: float, n: int) -> None:
    head, plain = _head(a, bias, 1.0), _head(a, 0.0, 1.0)
    assert ball_upper_bound(plain, n, 1.0).log_value <= theorem_3_3(plain, n, 1.0).log_value
    assert ball_upper_bound(plain, n, 1.0).log_value <= theorem_3_5(plain, 1.0).log_value + 1e-11
    assert mean_field_upper_bound(plain, 1.0).log_value <= theorem_3_5(plain, 1.0).log_value + 1e-11
    assert ball_upper_bound(head, n, 1.0).log_value <= theorem_e_3(head, n, 1.0).log_value
    assert ball_upper_bound(head, n, 1.0).log_value <= mean_field_upper_bound(head, 1.0).log_value + 1e-11
    assert causal_ball_upper_bound(plain, n, 1.0).log_value <= theorem_4_3(plain, n, 1.0).log_value


def test_formulas() -> None:
    """The paper's formulas, written out once more."""
    head = Head(torch.diag(torch.tensor([2.0, 1.0])).double(), 3 * torch.eye(2).double())
    biased = Head(head.A, head.V, torch.tensor([3.0, 4.0]).double())
    n, R = 7, 0.5
    a, root = 2 * R**2, math.sqrt(3)
    expected = {
        theorem_3_3(head, n, R): root * 3 * math.sqrt(4 * R**4 * (4 * n + 1) + n),
        theorem_4_3(head, n, R): root * 3 * math.sqrt(4 * R**4 * (4 * n + 1) + n),
        theorem_3_5(head, R): 3 * (1 + 3 * a) * math.exp(2 * a),
        theorem_4_4(head, R): 3 * (1 + 3 * a) * math.exp(2 * a),
        theorem_e_3(biased, n, R): root * 3 * math.sqrt(a**2 + 4 * n * R**2 * (2 * R + 5) ** 2 + n),
        mean_field_upper_bound(biased, R): 3 * (a + math.exp(3) * math.hypot(1, 3)),
        causal_mean_field_upper_bound(biased, R): 3 * (a + math.exp(3) * (2 + math.sqrt(6) * 3)),
    }
    for bound, number in expected.items():
        assert number <= bound.formula <= number * (1 + 1e-11), bound.name


# ---- any mask


def test_any_mask_has_the_others_as_cases() -> None:
    for causal, function in ((False, ball_upper_bound), (True, causal_ball_upper_bound)):
        f = random_attention(3, heads=1, causal=causal)
        assert masked_ball_upper_bound(f, 9, 2.0).value == function(f, 9, 2.0).value
    n = 6
    full = random_attention(3, heads=1, mask=torch.ones(n, n, dtype=torch.bool))
    assert masked_ball_upper_bound(full, n, 2.0).value == pytest.approx(
        ball_upper_bound(random_attention(3, heads=1), n, 2.0).value, rel=1e-12
    )
    triangle = random_attention(3, heads=1, mask=_causal(n))
    assert masked_ball_upper_bound(triangle, n, 2.0).value == pytest.approx(
        causal_ball_upper_bound(random_attention(3, heads=1, causal=True), n, 2.0).value, rel=1e-12
    )


def test_a_window_has_its_width_in_the_place_of_n() -> None:
    i = torch.arange(40)
    f = random_attention(3, heads=1, mask=(i[:, None] - i[None, :]).abs() <= 2)
    bound = masked_ball_upper_bound(f, 40, 1.0)
    plain = ball_upper_bound(random_attention(3, heads=1), 5, 1.0)
    assert plain.value <= bound.value < 1.1 * plain.value  # 4 tokens seen at an edge count a little more


def test_rows_that_see_one_token_are_linear() -> None:
    f = random_attention(3, heads=1, mask=torch.eye(4, dtype=torch.bool), biases=False)
    truth = float(torch.linalg.matrix_norm(dense_jacobian(f, tokens(1, 4, 6)), 2))
    assert masked_ball_upper_bound(f, 4, 50.0).value == pytest.approx(truth, rel=1e-11)


def test_a_mask_has_its_length() -> None:
    with pytest.raises(ArgumentError, match="length: expected 4, the length of the mask"):
        masked_ball_upper_bound(random_attention(3, heads=1, mask=_causal(4)), 5, 1.0)


# ---- hypotheses, refusals, extremes


def test_a_mask_is_a_hypothesis() -> None:
    plain = random_attention(0, heads=1, biases=False)
    causal = random_attention(0, heads=1, biases=False, causal=True)
    window = random_attention(0, heads=1, biases=False, mask=_causal(5) | _causal(5).T)
    for bounds, f, holds in (
        (UNMASKED, plain, True),
        (UNMASKED, causal, False),
        (UNMASKED, window, False),
        (MASKED, causal, True),
        (MASKED, plain, False),
        (MASKED, window, False),
    ):
        for bound in _every(f, 5, 3.0, bounds):
            assert bound.holds is holds, (bound.name, holds)
            assert math.isfinite(bound.value) is holds
            assert math.isfinite(bound.formula)
    for bound in _every(_head(1.0, 0.0, 1.0), 5, 1.0, UNMASKED + MASKED):
        assert bound.holds  # a head alone has no mask: both rooms take it


def test_a_bias_is_a_hypothesis() -> None:
    for bound in _every(_head(1.0, 0.5, 1.0), 5, 1.0, UNMASKED + MASKED):
        assert bound.holds is (bound.name not in ("theorem_3_3", "theorem_3_5", "theorem_4_3", "theorem_4_4"))


@pytest.mark.parametrize("n", [1, 2, 10**6, 10**400])
@pytest.mark.parametrize("radius", [1e-200, 1.0, 60.0, 1e200])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_extremes_give_numbers(n: int, radius: float, scale: float) -> None:
    head = Head(scale * torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    for bound in _every(head, n, radius, (*UNMASKED, *MASKED, masked_ball_upper_bound)):
        assert not math.isnan(bound.value)
        assert bound.value >= 1.0 - 1e-12
        if radius == 60.0 or scale == 0.0:  # e^{2a} overflows, its logarithm does not
            assert math.isfinite(bound.log_formula)
    zero = Head(head.A, torch.zeros(2, 2, dtype=torch.float64))
    for bound in _every(zero, n, radius, (*UNMASKED, *MASKED, masked_ball_upper_bound)):
        assert bound.formula == 0.0


def test_logarithms_where_the_number_overflows() -> None:
    a = 3600.0
    assert mean_field_upper_bound(_head(a, 0.0, 1.0), 1.0).value == math.inf
    assert mean_field_upper_bound(_head(a, 0.0, 1.0), 1.0).log_value == pytest.approx(
        a + math.log(a), rel=1e-9
    )
    assert theorem_3_5(_head(a, 0.0, 1.0), 1.0).log_value == pytest.approx(
        2 * a + math.log(1 + 3 * a), rel=1e-11
    )
    assert ball_upper_bound(_head(a, 0.0, 1.0), 10**400, 1.0).log_value == pytest.approx(
        200 * math.log(10) + math.log(a) - 0.5 * math.log(2), rel=1e-5
    )


def test_a_query_bias_that_only_seems_to_be_zero() -> None:
    x = 1 + 2.0**-30  # Kᵀ b_q = ±2^-60
    for key, bias, none in (
        ([[x], [-1.0]], [x, x * x], False),
        ([[-1.0], [x]], [x * x, x], False),
        ([[1e-200]], [1e-200], False),
        ([[1.0], [0.0]], [0.0, 1.0], True),
    ):
        K, b = torch.tensor([key], dtype=torch.float64), torch.tensor([bias], dtype=torch.float64)
        product = sum(Fraction(k) * Fraction(q) for (k,), q in zip(key, bias, strict=True))
        assert none == (product == 0)
        f = hs.SelfAttention(torch.ones_like(K), K, torch.ones(1, 1, 1, dtype=torch.float64), query_bias=b)
        assert theorem_3_3(f, 3, 1.0).holds == none
