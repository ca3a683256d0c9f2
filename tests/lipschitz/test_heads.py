"""head_lipschitz against dense float64 SVD of each head alone."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from howsmooth.lipschitz.heads import head_lipschitz
from tests._cases import CASES, random_attention, tokens, true_norm
from tests._selection import others_slow

HEADED = sorted(
    name
    for name, make in CASES.items()
    if isinstance(make(5), hs.SelfAttention) and name != "norms of all queries, of all keys"
)


@pytest.mark.parametrize(
    "name",
    others_slow(
        HEADED,
        [
            "one head",
            "multi-head",
            "causal window, grouped",
            "score bias for all heads, masked",
            "sinks, softcap, score bias",
            "norms of queries and keys, rotary, causal",
            "rotary, partial, grouped, causal",
            "causal grouped, hot",
        ],
    ),
)
def test_every_head_agrees_with_its_dense_jacobian(name: str) -> None:
    f, x = CASES[name](5), tokens(3, 5, 6)
    assert isinstance(f, hs.SelfAttention)
    for dtype, rtol in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        g, y = f.to(dtype=dtype), x.to(dtype)
        truth = torch.cat([true_norm(g.head(h), y[None]) for h in range(f.heads)])
        found = head_lipschitz(g, y, rtol=rtol)
        assert found.converged.all()
        assert (found.lower <= truth).all()
        assert (truth <= found.upper).all()
        assert torch.allclose(found.value, truth, rtol=rtol)


@pytest.mark.parametrize("d", [6, 40])  # fewer entries of a token than rows of a head's matrices, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_attain_the_value_in_the_coordinates_of_the_tokens(d: int, dtype: torch.dtype) -> None:
    f = random_attention(1, d=d, d_out=d, heads=4, kv_heads=2, causal=True, temperature=3.0, dtype=dtype)
    x = tokens(2, 7, d).to(dtype)
    found = head_lipschitz(f, x, rtol=1e-4)
    assert found.input_direction.shape == (4, 7, d)
    assert found.output_direction.shape == (4, 7, 5)
    for h in range(4):
        head = f.head(h).to(dtype=torch.float64)
        e = found.input_direction[h].double()
        _, moved = torch.func.jvp(head, (x.double(),), (e,))
        assert float(e.norm()) == pytest.approx(1.0, abs=1e-5)
        assert float(moved.norm()) == pytest.approx(float(found.value[h]), rel=1e-6)
        cosine = float((moved / moved.norm() * found.output_direction[h].double()).sum())
        assert cosine == pytest.approx(1.0, abs=1e-4)


def test_heads_of_small_memory_and_of_one_budget_agree() -> None:
    f, x = random_attention(5, heads=6, d=40, d_out=40, dtype=torch.float32), tokens(1, 30, 40).float()
    whole = head_lipschitz(f, x)
    few = head_lipschitz(f, x, memory=1 << 20)  # some heads at a time
    streamed = head_lipschitz(f, x, memory=100_000)  # one head at a time, without its probabilities
    for other in (few, streamed):
        assert (other.lower <= whole.upper).all()
        assert (whole.lower <= other.upper).all()


def test_a_cancelling_head_is_measured_again_in_float64() -> None:
    """Queries that nearly cancel: float32 products lose digits that only the float64 verdict sees."""
    f = random_attention(0, heads=2, d=40, d_out=40, temperature=300.0, dtype=torch.float32)
    x = tokens(9, 12, 40).float() + 30.0
    truth = torch.cat([true_norm(f.head(h), x[None]) for h in range(2)])
    found = head_lipschitz(f, x)
    assert (found.lower <= truth).all()
    assert (truth <= found.upper).all()


def test_seeds_give_each_head_a_start_of_its_own() -> None:
    f, x = random_attention(3), tokens(0, 4, 6)
    assert torch.equal(head_lipschitz(f, x, seed=7).value, head_lipschitz(f, x, seed=7).value)
    same = hs.SelfAttention(*(t[:1].expand(2, -1, -1).clone() for t in (f.query, f.key, f.value)))
    found = head_lipschitz(same, x, rtol=1e-2)
    assert not torch.equal(found.input_direction[0], found.input_direction[1])
