"""Attention formed in blocks: the same numbers, in memory that does not grow with n²."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import howsmooth as hs
from howsmooth.attention import scaled_dot_product
from howsmooth.measures import DiscreteMeasure
from tests._cases import ACTING, CASES, D, dense_jacobian, parameters, random_attention, tokens
from tests._forked import memory_added
from tests._selection import others_slow

WEIGHTS = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.15, 0.05], dtype=torch.float64)


def _l2(seed: int, *, causal: bool) -> hs.L2Attention:
    projections = parameters(random_attention(seed, heads=4, kv_heads=2))
    return hs.L2Attention(**projections, scale=0.3, causal=causal)


MAPS = CASES | {"L2": lambda n: _l2(1, causal=False), "L2, causal": lambda n: _l2(2, causal=True)}


@pytest.mark.parametrize("entries", [1, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAPS)
def test_blocks_do_not_change_the_map(name: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry: a row of one head at a time; 150: several heads, or some rows of a group."""
    f, x = MAPS[name](7), tokens(0, 2, 7, D)
    whole = f(x)
    positions = torch.tensor([0.1, 0.9, 0.1, 0.3, 0.4, 0.2, 0.2])
    acts = name in ACTING or name.startswith("L2")
    moved = f(DiscreteMeasure(x[0], WEIGHTS, positions=positions)).points if acts else None
    monkeypatch.setitem(scaled_dot_product._ENTRIES, "cpu", entries)
    monkeypatch.setattr(scaled_dot_product, "_FUSED_ABOVE", 0)
    # Without derivatives by the fused kernel, where it can; with them in blocks.
    for y in (x, x.clone().requires_grad_()):
        torch.testing.assert_close(f(y).detach(), whole, rtol=1e-13, atol=1e-13)
        if acts:
            image = f(DiscreteMeasure(y[0], WEIGHTS, positions=positions)).points.detach()
            torch.testing.assert_close(image, moved, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "causal"),
    others_slow(
        [(key, value, causal) for key, value in ((3, 5), (5, 3), (4, 4)) for causal in (False, True)],
        [(3, 5, False), (5, 3, True), (4, 4, True)],
    ),
)
def test_the_fused_kernel_is_used_and_takes_every_size(key_dim, value_dim, causal, monkeypatch) -> None:
    f = random_attention(3, heads=4, kv_heads=2, key_dim=key_dim, value_dim=value_dim, causal=causal)
    x = tokens(4, 2, 3, 7, D)
    whole = f(x)
    used = []
    fused = scaled_dot_product._fused
    monkeypatch.setattr(scaled_dot_product, "_fused", lambda *a, **k: used.append(1) or fused(*a, **k))
    monkeypatch.setitem(scaled_dot_product._ENTRIES, "cpu", 1)
    monkeypatch.setattr(scaled_dot_product, "_FUSED_ABOVE", 0)
    torch.testing.assert_close(f(x), whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(f.to(dtype=torch.float32)(x.float()), whole.float(), rtol=1e-5, atol=1e-5)
    assert len(used) == 2
    # No derivative goes through it, in whatever mode.
    torch.func.jvp(f, (x,), (x,))
    torch.func.vjp(f, x)
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, x))
    torch.func.jvp(torch.func.vmap(f), (x,), (x,))
    torch.func.jvp(lambda t: torch.func.vjp(lambda s: f(t) * s, x[0, 0])[0], (x,), (x,))
    assert len(used) == 2


def test_blocks_are_differentiated_in_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = CASES["causal grouped, hot"](5), tokens(1, 5, D)
    whole = dense_jacobian(f, x)
    monkeypatch.setitem(scaled_dot_product._ENTRIES, "cpu", 1)
    monkeypatch.setattr(scaled_dot_product, "_FUSED_ABOVE", 0)
    torch.testing.assert_close(dense_jacobian(f, x), whole, rtol=1e-12, atol=1e-12)
    forward = torch.func.jacfwd(f)(x).reshape(whole.shape)
    torch.testing.assert_close(forward, whole, rtol=1e-12, atol=1e-12)
    members = tokens(2, 3, 5, D)
    torch.testing.assert_close(torch.func.vmap(f)(members), f(members), rtol=1e-13, atol=1e-13)


def test_memory_of_a_call_does_not_grow_with_the_square_of_n(tmp_path: Path) -> None:
    """One n × n matrix of one head would take 288 MB; the blocks of a call take 60 to 110."""
    parameters = [tokens(i, *shape) for i, shape in enumerate([(2, 2, 2), (1, 2, 2), (1, 2, 2), (2, 4)])]
    softmax, l2 = hs.SelfAttention(*parameters), hs.L2Attention(*parameters, causal=True)
    x = tokens(5, 6000, 2)

    def called() -> None:
        softmax(x)
        softmax(DiscreteMeasure(x))
        l2(DiscreteMeasure.sequence(x))

    assert memory_added(called, tmp_path) < 200e6


@pytest.mark.slow
def test_memory_of_sinkhorn_attention_does_not_grow_with_the_square_of_n(tmp_path: Path) -> None:
    """One n × n matrix would take 162 MB."""
    f = hs.SinkhornAttention(tokens(0, 1, 2, 2) / 5, tokens(1, 1, 2, 2), tokens(2, 1, 2, 2))
    f(tokens(3, 10, 2))
    assert memory_added(lambda: f(tokens(3, 4500, 2)), tmp_path) < 100e6


def test_no_block_is_left_out_at_the_true_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 tokens do not fit into one block; some rows by hand."""
    f = CASES["one head"](1)
    x = tokens(3, 2000, D)
    rows = torch.tensor([0, 523, 524, 1048, 1999])
    q, k, v = f.projections(x)
    p = torch.softmax(f.scale * q[0, rows] @ k[0].mT, dim=-1)
    expected = p @ v[0] @ f.output.mT + f.output_bias
    for y in (x, x.clone().requires_grad_()):
        torch.testing.assert_close(f(y).detach()[rows], expected, rtol=1e-12, atol=1e-12)
    assert isinstance(f, hs.SelfAttention)
