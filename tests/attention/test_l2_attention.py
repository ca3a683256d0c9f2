"""L2 attention against its definition and its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure
from tests._cases import D, parameters, random_attention, tokens


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
def test_bounds_hold_for_the_attention_of_kim_et_al(
    seed: int, heads: int, key_dim: int, size: float, n: int
) -> None:
    f = _kim(seed, heads, key_dim, 3, 5, size)
    sharp = hs.bounds.l2_attention_upper_bound(*f.kim, n).value
    assert sharp <= hs.bounds.l2_attention(*f.kim, n).value
    for radius in (0.3, 3.0):
        estimate = hs.local_lipschitz(f, radius * tokens(seed + 5, 2, n, 5), rtol=1e-3)
        assert bool(estimate.converged.all())
        assert float(estimate.upper.max()) <= sharp
    # A bound that allows a hundredth of the constant would not be met.
    assert float(estimate.value.max()) > sharp / 100


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_a_scale_that_is_not_positive(scale: float) -> None:
    one = torch.ones(1, 1, 1)
    with pytest.raises(ArgumentError, match="scale"):
        hs.L2Attention(one, one, one, scale=scale)
