"""Constants of L2, scaled cosine, Sinkhorn and LipschitzNorm attention, and of softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.bound import Bound
from howsmooth.bounds.variant_upper_bounds import (
    l2_attention,
    l2_attention_upper_bound,
    lipschitz_norm,
    lipschitz_norm_upper_bound,
    scaled_cosine,
    scaled_cosine_upper_bound,
    sinkhorn,
    softmax_upper_bound,
)
from howsmooth.errors import ArgumentError, NonFiniteError
from tests._cases import random_attention
from tests._search import Point, largest_ratio


def _norm(jacobian: Tensor, size: int) -> Tensor:
    return torch.linalg.matrix_norm(jacobian.reshape(-1, size), 2)


def _drawer(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], Point]:
    def draw(generator: torch.Generator) -> Point:
        size = float(10 ** (torch.rand((), generator=generator) * 1.5 - 0.75))
        return {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64)
            * (size if name == "X" else 1.0)
            for name, shape in shapes.items()
        }

    return draw


# ---- L2 attention


def _l2(q: Tensor, v: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """Kim et al.: P_ij ∝ exp(−|x_i W_Q − x_j W_Q|²/√k), head P X W_Q W_Qᵀ/√k W_V, tied query and key."""
    k = q.shape[1]
    u = x @ q.mT  # (heads, n, k)
    scores = -((u[:, :, None] - u[:, None]) ** 2).sum(dim=-1) / math.sqrt(k)
    heads = torch.softmax(scores, dim=-1) @ (x @ q.mT @ q / math.sqrt(k)) @ v.mT
    return heads.movedim(0, 1).flatten(1) @ w.T


def _search_l2(n: int, d: int, *, trials: int, steps: int) -> tuple[float, float]:
    heads, k = 2, d
    usual = 0.0

    def ratio(point: Point) -> Tensor:
        nonlocal usual
        q, v, w = point["Q"], point["V"], point["W"]
        truth = _norm(torch.func.jacrev(lambda x: _l2(q, v, w, x))(point["X"]), n * d)
        bounds = [
            f(q.detach(), v.detach(), w.detach(), n).value for f in (l2_attention, l2_attention_upper_bound)
        ]
        usual = max(usual, float(truth.detach()) / bounds[0])
        return truth / bounds[1]

    draw = _drawer(Q=(heads, k, d), V=(heads, k, d), W=(d, heads * k), X=(n, d))
    sharp = largest_ratio(ratio, draw, trials=trials, steps=steps)
    return usual, sharp


@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 1), (4, 2)])
def test_l2_search(n: int, d: int) -> None:
    usual, sharp = _search_l2(n, d, trials=4, steps=20)
    assert 0.02 < usual <= sharp <= 1 + 1e-12
    assert sharp > 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 1), (5, 2)])
def test_l2_search_long(n: int, d: int) -> None:
    usual, sharp = _search_l2(n, d, trials=10, steps=150)
    print(n, d, usual, sharp)
    assert 0.2 < usual <= sharp <= 1


def test_l2_as_usually_printed_is_false() -> None:
    """‖W_Q‖² under the root in the place of ‖W_Q‖⁴: 7.07 for a linear map of norm 70.7."""
    q, v, w = 10 * torch.eye(2).double()[None], torch.eye(2).double()[None], torch.eye(2).double()
    x = torch.randn(1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = float(_norm(torch.func.jacrev(lambda x: _l2(q, v, w, x))(x), 2))
    printed = math.sqrt(1) / math.sqrt(2) * (4 * 0 + 1) * math.sqrt(10**2 * 1**2) * 1
    assert printed == pytest.approx(7.0710678)
    assert truth == pytest.approx(70.710678)
    for bound in (l2_attention(q, v, w, 1), l2_attention_upper_bound(q, v, w, 1)):
        assert bound.value == pytest.approx(truth, rel=1e-10)
        assert bound.value >= truth * (1 - 1e-13)


def test_l2_two_tokens() -> None:
    """Two tokens on a line at the best distance reach 0.58 of the sharper constant; one token reaches it."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    ratios = []
    for gap in np.linspace(0.1, 3, 60):
        x = torch.tensor([[0.0], [gap]], dtype=torch.float64)
        truth = float(_norm(torch.func.jacrev(lambda x: _l2(one, one, one[0], x))(x), 2))
        ratios.append(truth / l2_attention_upper_bound(one, one, one[0], 2).value)
    assert 0.57 < max(ratios) <= 1


@pytest.mark.parametrize("n", [1, 2, 17, 10**6, 10**400])
def test_l2_phi(n: int) -> None:
    """(4Φ + 1)√N with Φ e^{Φ+1} = N − 1, checked through the logarithm of the equation."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    log_bound = l2_attention(one, one, None, n).log_value
    phi = (math.exp(log_bound - 0.5 * math.log(n)) - 1) / 4
    if n == 1:
        assert phi == pytest.approx(0, abs=1e-11)
    else:
        assert math.log(phi) + phi + 1 == pytest.approx(math.log(n - 1), abs=1e-8)


# ---- scaled cosine attention


def _cosine(q: Tensor, k: Tensor, v: Tensor, tau: float, nu: float, eps: float, x: Tensor) -> Tensor:
    def rows(w: Tensor) -> Tensor:
        u = x @ w.T
        return u / torch.sqrt((u * u).sum(dim=-1, keepdim=True) + eps)

    return nu * torch.softmax(tau * rows(q) @ rows(k).T, dim=-1) @ rows(v)


def _search_cosine(n: int, tau: float, *, trials: int, steps: int) -> tuple[float, float]:
    usual = 0.0

    def ratio(point: Point) -> Tensor:
        nonlocal usual
        q, k, v = point["Q"], point["K"], point["V"]
        truth = _norm(torch.func.jacrev(lambda x: _cosine(q, k, v, tau, 2.0, 0.1, x))(point["X"]), 2 * n)
        arguments = (q.detach(), k.detach(), v.detach(), n)
        values = [
            f(*arguments, temperature=tau, gain=2.0, eps=0.1).value
            for f in (scaled_cosine, scaled_cosine_upper_bound)
        ]
        usual = max(usual, float(truth.detach()) / values[0])
        return truth / values[1]

    draw = _drawer(Q=(2, 2), K=(2, 2), V=(2, 2), X=(n, 2))
    sharp = largest_ratio(ratio, draw, trials=trials, steps=steps)
    return usual, sharp


@pytest.mark.parametrize(("n", "tau"), [(1, 1.0), (4, 10.0)])
def test_cosine_search(n: int, tau: float) -> None:
    usual, sharp = _search_cosine(n, tau, trials=3, steps=20)
    assert 1e-4 < usual <= sharp <= 1
    assert sharp > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "tau"), [(2, 0.3), (3, 2.0), (4, 10.0), (8, 5.0)])
def test_cosine_search_long(n: int, tau: float) -> None:
    usual, sharp = _search_cosine(n, tau, trials=10, steps=150)
    print(n, tau, usual, sharp)
    assert 1e-4 < usual <= sharp <= 1


def test_cosine_is_exact_for_one_token_at_zero() -> None:
    q = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(1, 4, dtype=torch.float64)
    truth = float(_norm(torch.func.jacrev(lambda x: _cosine(q, q, q, 3.0, -2.0, 1e-3, x))(x), 4))
    bound = scaled_cosine_upper_bound(q, q, q, 1, temperature=3.0, gain=-2.0, eps=1e-3)
    assert bound.value == pytest.approx(truth, rel=1e-10)
    assert scaled_cosine(q, q, q, 1, temperature=3.0, gain=-2.0, eps=1e-3).value == pytest.approx(2 * truth)


@given(st.integers(1, 10**9), st.floats(0, 40), st.integers(0, 1000))
def test_cosine_sharp_is_below_the_published_one(n: int, tau: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, 3, generator=generator) * 10 ** float(torch.randn((), generator=generator))
        for _ in range(3)
    )
    published = scaled_cosine(q, k, v, n, temperature=tau, eps=0.5)
    sharp = scaled_cosine_upper_bound(q, k, v, n, temperature=tau, eps=0.5)
    assert sharp.log_value <= published.log_value
    norms = [float(torch.linalg.matrix_norm(w.double(), 2)) for w in (q, k, v)]
    assert published.value == pytest.approx(
        (2 * n * (n - 1) * tau * norms[1] + 2 * (n - 1) * tau * norms[0] + 2 * n * norms[2]) / math.sqrt(0.5),
        rel=1e-10,
    )
    if n > 1:
        c = math.sqrt(n / (1 + (n - 1) * math.exp(-2 * tau)))
        expected = c * norms[2] + tau * norms[0] + min(math.sqrt(n / 2), c) * tau * norms[1]
        assert sharp.value == pytest.approx(expected / math.sqrt(0.5), rel=1e-10)


# ---- Sinkhorn attention


def _sinkhorn(A: Tensor, V: Tensor, x: Tensor, iterations: int) -> Tensor:
    """Attention whose P is e^S, its rows and columns normalised in turn."""
    log_p = torch.log_softmax(x @ A.T @ x.T, dim=1)
    for _ in range(iterations):
        log_p = torch.log_softmax(torch.log_softmax(log_p, dim=0), dim=1)
    return torch.exp(log_p) @ x @ V.T


def _search_sinkhorn(n: int, a: float, *, trials: int, steps: int, iterations: int) -> float:
    bound = sinkhorn(Head(a * torch.eye(2), torch.eye(2)), 1.0).value

    def ratio(point: Point) -> Tensor:
        A = point["A"] * (a / torch.linalg.matrix_norm(point["A"], 2))
        V = point["V"] / torch.linalg.matrix_norm(point["V"], 2)
        x = point["X"] / point["X"].norm(dim=-1, keepdim=True).clamp(min=1)
        return _norm(torch.func.jacrev(lambda x: _sinkhorn(A, V, x, iterations))(x), 2 * n) / bound

    return largest_ratio(ratio, _drawer(A=(2, 2), V=(2, 2), X=(n, 2)), trials=trials, steps=steps)


@pytest.mark.parametrize(("n", "a"), [(2, 0.2), (4, 1.0), (3, 3.0)])
def test_sinkhorn_search(n: int, a: float) -> None:
    assert 0.3 < _search_sinkhorn(n, a, trials=2, steps=12, iterations=60) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "a"), [(2, 0.2), (4, 1.0), (3, 3.0), (6, 0.5)])
def test_sinkhorn_search_long(n: int, a: float) -> None:
    ratio = _search_sinkhorn(n, a, trials=4, steps=80, iterations=150)
    print(n, a, ratio)
    assert 0.99 / (1 + 2 * a) < ratio <= 1  # copies of one token give ‖V‖


def test_sinkhorn_is_not_a_bound_before_convergence() -> None:
    """Rows normalised last, columns never: this is softmax attention, which grows with n."""
    n, a = 60, 3.0
    x = torch.tensor([[1.0]] + [[-1.0]] * (n - 1), dtype=torch.float64)
    A, V = -a * torch.eye(1).double(), torch.eye(1).double()
    bound = sinkhorn(Head(A, V), 1.0).value
    assert bound == pytest.approx(1 + 2 * a)
    few = float(_norm(torch.func.jacrev(lambda x: _sinkhorn(A, V, x, 0))(x), n))
    many = float(_norm(torch.func.jacrev(lambda x: _sinkhorn(A, V, x, 100))(x), n))
    assert few > 1.5 * bound
    assert many <= bound


def test_sinkhorn_forgets_the_query_bias_and_knows_masks() -> None:
    plain, biased = random_attention(0, heads=1, biases=False), random_attention(0, heads=1)
    assert sinkhorn(plain, 2.0).value == sinkhorn(biased, 2.0).value
    assert not sinkhorn(random_attention(0, heads=1, causal=True), 2.0).holds
    with pytest.raises(ArgumentError, match="one head"):
        sinkhorn(random_attention(0), 2.0)
    with pytest.raises(ArgumentError, match="radius"):
        sinkhorn(plain, 0.0)
    zero = Head(torch.zeros(2, 2), 3 * torch.eye(2))
    assert sinkhorn(zero, 1e200).value == pytest.approx(3.0)  # P = 1/n: exact


# ---- LipschitzNorm


def _lipschitz_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sizes = q.norm(), k.norm(dim=-1).max(), v.norm(dim=-1).max()
    largest = torch.stack([sizes[0] * sizes[1], sizes[0] * sizes[2], sizes[1] * sizes[2]]).max()
    return torch.softmax(q @ k.T / largest, dim=-1) @ v


def _search_lipschitz_norm(m: int, n: int, *, trials: int, steps: int) -> float:
    sharp = lipschitz_norm_upper_bound(m, n)
    assert sharp.value <= lipschitz_norm(m, n).value

    def ratio(point: Point) -> Tensor:
        q, k, v = point["Q"], point["K"], point["V"]
        jacobians = torch.func.jacrev(_lipschitz_norm, argnums=(0, 1, 2))(q, k, v)
        joint = torch.cat([j.reshape(m * 2, -1) for j in jacobians], dim=1)
        return torch.linalg.matrix_norm(joint, 2) / sharp.value

    def draw(generator: torch.Generator) -> Point:
        return {
            name: torch.randn(rows, 2, generator=generator, dtype=torch.float64)
            * 10 ** float(torch.randn((), generator=generator))
            for name, rows in {"Q": m, "K": n, "V": n}.items()
        }

    return largest_ratio(ratio, draw, trials=trials, steps=steps)


@pytest.mark.parametrize(("m", "n"), [(5, 2), (1, 4)])
def test_lipschitz_norm_search(m: int, n: int) -> None:
    assert 0.2 < _search_lipschitz_norm(m, n, trials=4, steps=20) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), [(2, 2), (8, 2), (2, 6), (1, 4), (4, 4)])
def test_lipschitz_norm_search_long(m: int, n: int) -> None:
    ratio = _search_lipschitz_norm(m, n, trials=20, steps=150)
    print(m, n, ratio, ratio * lipschitz_norm_upper_bound(m, n).value / lipschitz_norm(m, n).value)
    assert ratio <= 1


def test_lipschitz_norm_formulas() -> None:
    for m, n in ((1, 2), (3, 3), (7, 2), (2, 900), (10**400, 10**401)):
        root = math.exp(0.5 * (math.log(m) - math.log(n)))
        assert lipschitz_norm(m, n).value == pytest.approx(
            math.exp(math.sqrt(3)) * root + 2 * math.sqrt(6), rel=1e-11
        )
        kappa = math.exp(0.5 * (math.log(m) + lipschitz_log_p_bar(n)))
        squares = max((kappa + 1) ** 2 + 4.5, kappa**2 + 4 + (1 + math.sqrt(0.5)) ** 2)
        assert lipschitz_norm_upper_bound(m, n).value == pytest.approx(math.sqrt(squares), rel=1e-11)
        assert kappa <= math.e * root * (1 + 1e-12)
    # one key: every output is v_1, and m copies of it have norm √m
    assert lipschitz_norm_upper_bound(9, 1).value == pytest.approx(3.0, rel=1e-11)


def lipschitz_log_p_bar(n: int) -> float:
    return -math.log(n) - math.log1p((1 - 1 / n if n < 1e300 else 1.0) * math.expm1(-2.0))


# ---- softmax


@pytest.mark.parametrize("scale", [0.3, -2.0, 50.0])
def test_softmax(scale: float) -> None:
    rng = np.random.default_rng(0)
    bound = softmax_upper_bound(scale)
    assert bound.value == pytest.approx(abs(scale) / 2, rel=1e-11)
    largest = dict.fromkeys((1, 2, np.inf), 0.0)
    for _ in range(300):
        p = rng.dirichlet(np.full(rng.integers(2, 6), 0.4))
        jacobian = scale * (np.diag(p) - np.outer(p, p))
        for order in largest:
            largest[order] = max(largest[order], float(np.linalg.norm(jacobian, order)))
    assert all(0.9 * bound.value < value <= bound.value for value in largest.values())
    x = torch.zeros(2, dtype=torch.float64)  # attained for two classes of equal weight
    jacobian_at_zero = torch.func.jacrev(lambda x: torch.softmax(scale * x, dim=0))(x)
    assert float(torch.linalg.matrix_norm(jacobian_at_zero, 2)) == pytest.approx(bound.value, rel=1e-11)


# ---- refusals and extremes


def test_refusals() -> None:
    q = torch.randn(2, 3, 4)
    v = torch.randn(2, 5, 4)
    w = torch.randn(4, 10)
    l2: tuple[Callable[..., Bound], ...] = (l2_attention, l2_attention_upper_bound)
    for f in l2:
        for arguments, name in (
            ((q[0], v, w, 3), "query"),
            ((q, v[:1], w, 3), "value"),
            ((q, v, w.T, 3), "output"),
            ((q, v, w, 0), "length"),
            ((q, v, w, 2.0), "length"),
            ((None, v, w, 3), "query"),
        ):
            with pytest.raises(ArgumentError, match=rf"^{name}:"):
                f(*arguments)
        with pytest.raises(NonFiniteError, match="query"):
            f(q * math.nan, v, w, 3)
        assert f(0 * q, v, w, 3).value == 0.0
    cosine: tuple[Callable[..., Bound], ...] = (scaled_cosine, scaled_cosine_upper_bound)
    for f in cosine:
        k = q[0]
        for keywords, name in (
            ({"temperature": math.nan, "eps": 1.0}, "temperature"),
            ({"temperature": 1.0, "eps": 0.0}, "eps"),
            ({"temperature": 1.0, "eps": "small"}, "eps"),
            ({"temperature": 1.0, "eps": 1.0, "gain": math.inf}, "gain"),
        ):
            with pytest.raises(ArgumentError, match=rf"^{name}:"):
                f(k, k, v[0], 3, **keywords)
        with pytest.raises(ArgumentError, match=r"^key:"):
            f(k, k[:2], v[0], 3, temperature=1.0, eps=1.0)
        with pytest.raises(ArgumentError, match=r"^length:"):
            f(k, k, v[0], 0, temperature=1.0, eps=1.0)
        assert math.isfinite(f(k, k, v[0], 10**400, temperature=1e300, eps=1e-300).log_value)
    norms: tuple[Callable[..., Bound], ...] = (lipschitz_norm, lipschitz_norm_upper_bound)
    for f in norms:
        with pytest.raises(ArgumentError, match=r"^queries:"):
            f(0, 3)
        with pytest.raises(ArgumentError, match=r"^keys:"):
            f(3, 1.5)
    for value in (math.inf, "hot", None, True):
        with pytest.raises(ArgumentError, match=r"^inverse_temperature:"):
            softmax_upper_bound(value)
    assert softmax_upper_bound(0).value == 0.0
