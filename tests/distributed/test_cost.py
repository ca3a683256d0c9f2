"""Costs counted beforehand, against products that are watched and pairs that are counted one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import howsmooth as hs
from howsmooth.distributed import Device, step_cost
from howsmooth.distributed.communication import Exchange
from howsmooth.distributed.cost import _visible_pairs
from howsmooth.distributed.shared_jacobian import SharedMap
from howsmooth.distributed.token_partition import RowShares
from howsmooth.errors import ArgumentError
from tests._cases import D, random_attention, tokens
from tests._group import ThreadCollectives, in_threads

ROOMY = Device(1e12, 1e12, 1e9, "cpu")


class Operations(TorchDispatchMode):
    """Counts the operations of matrix products, in place or not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = args[-2:] if "add" in name else args[:2]
            self.count += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads_together", [2, 1])
@pytest.mark.parametrize("d_out", [7, None])
def test_counted_are_the_products_that_are_made(heads_together: int, d_out: int | None) -> None:
    n, world = 30, 3
    f = random_attention(0, heads=4, kv_heads=2, d_out=d_out)
    x, e, shares = tokens(0, n, D), tokens(1, n, D), RowShares(n, world)

    def work(collectives: ThreadCollectives) -> tuple[int, int]:
        rows = shares.rows(collectives.rank)
        shared = SharedMap(Exchange(collectives, shares, torch.device("cpu")), heads_together)
        at = shared.jacobian(f, x[rows][None], torch.float64)
        before = collectives.received
        with Operations() as watched:
            at.gram_product(e[rows][None])
        return watched.count, collectives.received - before

    needed = step_cost(f, n, world, ROOMY, dtype=torch.float64)
    assert needed.heads_together == 2
    if heads_together == 1:  # what one head at a time needs, and no more
        tight = Device(1e12, needed.memory - 1.0, 1e9, "cpu")
        needed = step_cost(f, n, world, tight, dtype=torch.float64)
        assert (needed.heads_together, needed.fits) == (1, True)
    for operations, received in in_threads(world, work):
        assert operations == needed.operations
        assert received == needed.received


@given(
    n=st.integers(8, 60),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 70)),
    world=st.integers(1, 4),
)
def test_pairs_are_those_that_are_visible(n: int, causal: bool, window: int | None, world: int) -> None:
    f = random_attention(0, heads=1, causal=causal, window=window)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = torch.ones(n, n, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (i - j).abs() < window
    shares = RowShares(n, world)
    for rank in range(world):
        counted = _visible_pairs(f, n, shares.ranges(rank))
        assert counted == int(seen[shares.rows(rank)].sum())


def test_laws() -> None:
    """Work n² over the processes, causal half of it, bytes n; a million tokens on eight devices."""
    zero = torch.zeros(12, 64, 768)
    output = torch.zeros(768, 768)
    layer = hs.SelfAttention(zero, zero, zero, output, causal=True)
    h200 = Device(40e12, 120e9, 300e9)
    eight = step_cost(layer, 1_000_000, 8, h200)
    assert eight.fits
    # Nine products of n²/2 entries, 768 numbers each, and the projections: on paper.
    assert eight.operations == pytest.approx(9 * 2 * 0.5e12 * 768 / 8, rel=2e-3)
    assert eight.exponentials == pytest.approx(12 * 0.5e12 / 8, rel=1e-3)
    assert eight.received == 2 * 7 * 125_000 * 1536 * 4
    assert eight.seconds == eight.operations / 40e12 + eight.received / 300e9
    # Room for all heads at once, as at the shorter length.
    longer = step_cost(layer, 2_000_000, 8, Device(40e12, 240e9, 300e9))
    assert longer.operations / eight.operations == pytest.approx(4, rel=2e-3)
    assert longer.received == 2 * eight.received
    both = hs.SelfAttention(zero, zero, zero, output)
    assert step_cost(both, 1_000_000, 8, h200).operations / eight.operations == pytest.approx(2, rel=2e-3)
    windowed = hs.SelfAttention(zero, zero, zero, output, causal=True, window=4096)
    assert step_cost(windowed, 1_000_000, 8, h200).exponentials == pytest.approx(
        12 * 4096 * 125_000, rel=4e-3
    )
    assert not step_cost(layer, 10_000_000, 1, h200).fits


def test_what_has_no_cost() -> None:
    with pytest.raises(ArgumentError, match="f: expected SelfAttention, got LayerNorm"):
        step_cost(hs.LayerNorm(torch.ones(3), torch.zeros(3)), 10, 1, ROOMY)
    with pytest.raises(ArgumentError, match="got a mask"):
        step_cost(random_attention(0, mask=torch.ones(9, 9, dtype=torch.bool)), 9, 1, ROOMY)
