"""L2 attention and Sinkhorn attention against their definitions, other libraries and their bounds."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import scaled_dot_product
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure
from tests._cases import D, dense_jacobian, parameters, random_attention, tokens


def random_l2(seed: int, *, scale: float = 0.3, causal: bool = False, **keywords: object) -> hs.L2Attention:
    """L2 attention with the Gaussian parameters of the softmax attention of this seed."""
    f = random_attention(seed, **keywords)
    return hs.L2Attention(**(parameters(f) | {"scale": scale, "causal": causal}))


def naive_l2(
    f: hs.L2Attention, x: Tensor, weights: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """One atom, one head at a time, with the squared distances as they are written."""
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(f.heads):
            g = h * f.kv_heads // f.heads
            q = f.query[h] @ x[i] + f.query_bias[h]
            over, under = torch.zeros(f.value_dim, dtype=torch.float64), 0.0
            for j in range(len(x)):
                if positions is not None and positions[j] > positions[i]:
                    continue
                k = f.key[g] @ x[j] + f.key_bias[g]
                kernel = weights[j] * math.exp(-f.scale * float((q - k).square().sum()))
                over, under = over + kernel * (f.value[g] @ x[j] + f.value_bias[g]), under + kernel
            heads.append(over / under)
        rows.append(f.output @ torch.cat(heads) + f.output_bias)
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_equals_its_definition(causal: bool, kv_heads: int) -> None:
    f = random_l2(0, heads=4, kv_heads=kv_heads, causal=causal)
    x = tokens(0, 2, 5, D)
    order = np.arange(5) if causal else None
    for member, image in zip(x, f(x), strict=True):
        np.testing.assert_allclose(image, naive_l2(f, member, np.ones(5), order), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_acts_on_measures(causal: bool) -> None:
    f, x = random_l2(1, causal=causal), tokens(1, 4, D)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    positions = torch.tensor([0.3, 0.9, 0.3, 0.1])
    image = f(DiscreteMeasure(x, weights, positions=positions))
    expected = naive_l2(f, x, weights.numpy(), positions.numpy() if causal else None)
    np.testing.assert_allclose(image.points, expected, rtol=1e-12, atol=1e-12)
    if causal:
        with pytest.raises(ArgumentError, match="without positions"):
            f(DiscreteMeasure(x, weights))


def test_distances_of_far_tokens_keep_their_digits() -> None:
    """Far from zero the scores are differences of numbers near 1e12, unless queries and keys are shifted."""
    f = random_l2(2, biases=False)
    x = tokens(2, 5, D)
    shift = 1e6 * tokens(3, D)
    tied = hs.L2Attention(f.query, f.query, f.value, f.output, scale=f.scale)
    moved = tied(x + shift) - tied(x)
    torch.testing.assert_close(moved, moved[:1].expand(5, D), rtol=0, atol=1e-7)


def _kim(seed: int, heads: int, key_dim: int, value_dim: int, d: int, size: float) -> hs.L2Attention:
    """The attention of Kim et al.: tied, scale 1/√k, values V QᵀQ / √k."""
    q = size * tokens(seed, heads, key_dim, d)
    v, o = tokens(seed + 1, heads, value_dim, d), tokens(seed + 2, d, heads * value_dim)
    root = math.sqrt(key_dim)
    f = hs.L2Attention(q, q, v @ q.mT @ q / root, o, scale=1 / root)
    f.kim = (q, v, o)
    return f


@pytest.mark.parametrize(
    ("seed", "heads", "key_dim", "size"), [(0, 1, 2, 0.3), (1, 3, 4, 1.0), (2, 2, 1, 3.0)]
)
@pytest.mark.parametrize("n", [1, 7])
def test_bounds_hold_for_the_attention_of_kim_et_al(seed, heads, key_dim, size, n) -> None:
    f = _kim(seed, heads, key_dim, 3, 5, size)
    sharp = hs.bounds.l2_attention_upper_bound(*f.kim, n).value
    assert sharp <= hs.bounds.l2_attention(*f.kim, n).value
    for radius in (0.3, 3.0):
        estimate = hs.local_lipschitz(f, radius * tokens(seed + 5, 2, n, 5), rtol=1e-3)
        assert bool(estimate.converged.all())
        assert float(estimate.upper.max()) <= sharp
    # A bound that allows a hundredth of the constant would not be met.
    assert float(estimate.value.max()) > sharp / 100


def test_local_constant_is_that_of_the_dense_jacobian() -> None:
    f, x = random_l2(4, causal=True), tokens(4, 6, D)
    estimate = hs.local_lipschitz(f, x)
    assert float(estimate.value) == pytest.approx(
        float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2)), rel=1e-6
    )
    assert estimate.method == "autodiff"
    assert estimate.scope == "L2 attention, 3 heads, causal, with output projection"


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_a_scale_that_is_not_positive(scale: float) -> None:
    one = torch.ones(1, 1, 1)
    with pytest.raises(ArgumentError, match="scale"):
        hs.L2Attention(one, one, one, scale=scale)


def random_sinkhorn(seed: int, *, tolerance: float = 1e-9, **keywords: object) -> hs.SinkhornAttention:
    """Sinkhorn attention with the Gaussian parameters of the softmax attention of this seed."""
    f = random_attention(seed, **keywords)
    return hs.SinkhornAttention(**parameters(f), tolerance=tolerance)


def _by_pot(f: hs.SinkhornAttention, x: Tensor, weights: np.ndarray) -> np.ndarray:
    """Entropic transport from the measure to itself, at the cost −S, gives (a_i P_ij)."""
    heads = []
    for h in range(f.heads):
        g = h * f.kv_heads // f.heads
        scores = (f.scale * (x @ f.query[h].T + f.query_bias[h]) @ (x @ f.key[g].T).T).numpy()
        plan = ot.sinkhorn(weights, weights, -scores, 1.0, stopThr=1e-15, numItermax=100_000)
        heads.append(plan / weights[:, None] @ (x @ f.value[g].T + f.value_bias[g]).numpy())
    return np.concatenate(heads, axis=1) @ f.output.numpy().T + f.output_bias.numpy()


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_equals_entropic_transport_by_pot(kv_heads: int) -> None:
    f, x = random_sinkhorn(0, kv_heads=kv_heads), tokens(0, 2, 6, D)
    for member, image in zip(x, f(x), strict=True):
        np.testing.assert_allclose(image, _by_pot(f, member, np.full(6, 1 / 6)), rtol=1e-7, atol=1e-7)
    weights = torch.tensor([0.3, 0.1, 0.05, 0.25, 0.2, 0.1], dtype=torch.float64)
    image = f(DiscreteMeasure(x[0], weights)).points
    np.testing.assert_allclose(image, _by_pot(f, x[0], weights.numpy()), rtol=1e-7, atol=1e-7)


def test_rows_and_columns_have_their_sums() -> None:
    """With values that are the unit vectors, the output is P itself."""
    n = 5
    r = random_attention(1, heads=2, d=n, temperature=3.0)
    x = torch.eye(n, dtype=torch.float64)
    f = hs.SinkhornAttention(r.query, r.key, x.expand(2, n, n), tolerance=1e-12)
    weights = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
    for a, p in ((torch.full((n,), 1 / n).double(), f(x)), (weights, f(DiscreteMeasure(x, weights)).points)):
        for head in p.split(n, dim=1):
            torch.testing.assert_close(head.sum(dim=1), torch.ones(n).double(), rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(a @ head, a, rtol=1e-11, atol=1e-14)
            assert float((head - 1 / n).abs().max()) > 0.1


def test_weights_are_multiplicities() -> None:
    f, x = random_sinkhorn(2, tolerance=1e-12), tokens(2, 3, D)
    counts = torch.tensor([2, 1, 3])
    image = f(DiscreteMeasure(x, counts.double() / 6))
    torch.testing.assert_close(
        image.points.repeat_interleave(counts, 0), f(x.repeat_interleave(counts, 0)), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("exponent", [3.0, 700.0, 2000.0])
def test_two_atoms_of_very_unequal_weights(exponent: float) -> None:
    """The coupling with given marginals and e^{S11 + S22 − S12 − S21} solves a quadratic equation."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    f = hs.SinkhornAttention(one, one, one)
    points = torch.tensor([[1.2], [-0.4]], dtype=torch.float64)
    light = -exponent
    heavy = math.log1p(-math.exp(light))
    image = f(DiscreteMeasure(points, log_weights=torch.tensor([light, heavy], dtype=torch.float64))).points
    mpmath.mp.dps = 2500
    x, y = (mpmath.mpf(float(t)) for t in points.flatten())
    a = mpmath.exp(mpmath.mpf(light))
    ratio = mpmath.exp((x - y) ** 2)
    # t = π_11: t (1 − 2a + t) = ratio (a − t)²
    p, q, r = 1 - ratio, 1 - 2 * a + 2 * a * ratio, -ratio * a**2
    t = (-q + mpmath.sqrt(q**2 - 4 * p * r)) / (2 * p)
    p11, p21 = t / a, (a - t) / (1 - a)
    assert float(image[0]) == pytest.approx(float(p11 * x + (1 - p11) * y), rel=1e-8)
    assert float(image[1]) == pytest.approx(float(p21 * x + (1 - p21) * y), rel=1e-8)


def test_derivatives_are_those_of_the_limit() -> None:
    """Finite differences of first and second order; forward and reverse mode; points and weights."""
    f, x = random_sinkhorn(3, heads=2, temperature=2.0), tokens(3, 4, D)
    assert torch.autograd.gradcheck(f, (x.clone().requires_grad_(),))
    assert torch.autograd.gradgradcheck(f, (x[:3].clone().requires_grad_(),))
    j = dense_jacobian(f, x)
    torch.testing.assert_close(torch.func.jacfwd(f)(x).reshape(j.shape), j, rtol=1e-10, atol=1e-10)
    e = tokens(4, 4, D)
    with torch.no_grad():
        tangent = torch.func.jvp(f, (x,), (e,))[1]
    torch.testing.assert_close(tangent.flatten(), j @ e.flatten(), rtol=1e-10, atol=1e-10)
    h = 1e-5
    difference = (f(x + h * e) - f(x - h * e)) / (2 * h)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-6)

    def of_weights(logits: Tensor) -> Tensor:
        return f(DiscreteMeasure(x, log_weights=torch.log_softmax(logits, dim=0))).points

    assert torch.autograd.gradcheck(of_weights, (tokens(5, 4).requires_grad_(),))


def test_with_and_without_derivatives_the_values_agree_to_the_tolerance() -> None:
    f, x = random_sinkhorn(4, temperature=2.0), tokens(6, 5, D)
    plain, tracked = f(x), f(x.clone().requires_grad_()).detach()
    assert 0 < float((plain - tracked).abs().max()) < 1e-7
    tight = random_sinkhorn(4, temperature=2.0, tolerance=1e-13)(x)
    torch.testing.assert_close(tracked, tight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("seed", "radius"), [(0, 0.3), (1, 1.0), (2, 2.5)])
def test_bound_holds(seed: int, radius: float) -> None:
    softmax = random_attention(seed, heads=1, biases=False, d=3, d_out=3)
    f = hs.SinkhornAttention(**parameters(softmax), max_iterations=20_000)
    x = tokens(seed, 2, 4, 3)
    x = radius * x / x.norm(dim=-1, keepdim=True)
    bound = hs.bounds.sinkhorn(softmax, radius).value
    estimate = hs.local_lipschitz(f, x)
    assert bool(estimate.converged.all())
    assert bound / 20 < float(estimate.upper.max()) <= bound
    assert float(estimate.value[0]) == pytest.approx(
        float(torch.linalg.matrix_norm(dense_jacobian(f, x[0]), 2)), rel=1e-6
    )


def test_refused_where_it_does_not_converge() -> None:
    f = random_sinkhorn(0, temperature=30.0)
    with pytest.raises(ArgumentError, match="1000, after which a column is off by") as caught:
        f(tokens(0, 7, D))
    assert caught.value.argument == "max_iterations"
    with pytest.raises(NonFiniteError, match="X: expected finite scores"):
        random_sinkhorn(0)(torch.full((3, D), 1e200, dtype=torch.float64))


def test_vmap_is_refused_and_the_batch_does_the_same() -> None:
    f, x = random_sinkhorn(0), tokens(0, 2, 4, D)
    with pytest.raises(ArgumentError, match=r"within torch\.func\.vmap"):
        torch.func.vmap(f)(x)
    assert f(x).shape == (2, 4, D)


def test_blocks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = random_sinkhorn(5, kv_heads=1), tokens(7, 2, 6, D)
    whole = f(x)
    torch.testing.assert_close(torch.stack([f(member) for member in x]), whole, rtol=1e-13, atol=1e-13)
    for entries in (1, 40, 250):
        monkeypatch.setitem(scaled_dot_product._ENTRIES, "cpu", entries)
        monkeypatch.setattr(scaled_dot_product, "_FUSED_ABOVE", 0)
        torch.testing.assert_close(f(x), whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("keywords", "argument"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"max_iterations": True}, "max_iterations"),
        ({"scale": float("inf")}, "scale"),
    ],
)
def test_refuses_numbers_that_do_not_fit(keywords: dict, argument: str) -> None:
    one = torch.ones(1, 1, 1)
    with pytest.raises(ArgumentError) as caught:
        hs.SinkhornAttention(one, one, one, **keywords)
    assert caught.value.argument == argument
