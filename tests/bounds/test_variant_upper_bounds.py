"""Constants of L2, scaled cosine, Sinkhorn and LipschitzNorm attention, and of softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def _norm(jacobian: Tensor, size: int) -> Tensor:
    return torch.linalg.matrix_norm(jacobian.reshape(-1, size), 2)


# ---- L2 attention


def _l2(q: Tensor, v: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """Kim et al.: P_ij ∝ exp(−|x_i W_Q − x_j W_Q|²/√k), head P X W_Q W_Qᵀ/√k W_V, tied query and key."""
    k = q.shape[1]
    u = x @ q.mT  # (heads, n, k)
    scores = -((u[:, :, None] - u[:, None]) ** 2).sum(dim=-1) / math.sqrt(k)
    heads = torch.softmax(scores, dim=-1) @ (x @ q.mT @ q / math.sqrt(k)) @ v.mT
    return heads.movedim(0, 1).flatten(1) @ w.T


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


Q, V, W = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(4, 10)
HOT = {"temperature": 1.0, "eps": 1.0}
L2_WRONG = [
    ("query", (Q[0], V, W, 3)), ("value", (Q, V[:1], W, 3)), ("output", (Q, V, W.T, 3)),
    ("length", (Q, V, W, 0)), ("length", (Q, V, W, 2.0)), ("query", (None, V, W, 3)),
    ("query", (Q * math.nan, V, W, 3)),
]  # fmt: skip
COSINE_WRONG = [
    ("temperature", (Q[0], Q[0], V[0], 3), HOT | {"temperature": math.nan}),
    ("eps", (Q[0], Q[0], V[0], 3), HOT | {"eps": 0.0}),
    ("eps", (Q[0], Q[0], V[0], 3), HOT | {"eps": "small"}),
    ("gain", (Q[0], Q[0], V[0], 3), HOT | {"gain": math.inf}),
    ("key", (Q[0], Q[0][:2], V[0], 3), HOT),
    ("length", (Q[0], Q[0], V[0], 0), HOT),
]
REFUSED: list[tuple[Callable[..., Bound], str, tuple[Any, ...], dict[str, Any]]] = [
    *((f, name, given, {}) for f in (l2_attention, l2_attention_upper_bound) for name, given in L2_WRONG),
    *((f, *wrong) for f in (scaled_cosine, scaled_cosine_upper_bound) for wrong in COSINE_WRONG),
    *((f, "queries", (0, 3), {}) for f in (lipschitz_norm, lipschitz_norm_upper_bound)),
    *((f, "keys", (3, 1.5), {}) for f in (lipschitz_norm, lipschitz_norm_upper_bound)),
    *((softmax_upper_bound, "inverse_temperature", (x,), {}) for x in (math.inf, "hot", None, True)),
]


@pytest.mark.parametrize(("f", "argument", "given", "named"), REFUSED)
def test_refusals(
    f: Callable[..., Bound], argument: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises((ArgumentError, NonFiniteError), match=rf"^{argument}:"):
        f(*given, **named)


def test_extremes() -> None:
    for f in (l2_attention, l2_attention_upper_bound):
        assert f(0 * Q, V, W, 3).value == 0.0
    for f in (scaled_cosine, scaled_cosine_upper_bound):
        assert math.isfinite(f(Q[0], Q[0], V[0], 10**400, temperature=1e300, eps=1e-300).log_value)
    assert softmax_upper_bound(0).value == 0.0
