"""Visibility by blocks against one naive matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.attention.masks import Visibility


def naive(n: int, causal: bool, window: int | None, mask: torch.Tensor | None) -> torch.Tensor:
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            seen[i, j] = (
                (not causal or j <= i)
                and (window is None or abs(i - j) < window)
                and (mask is None or bool(mask[i, j]))
            )
    return seen


@given(
    n=st.integers(1, 9),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 10),
    masked=st.booleans(),
    cut=st.tuples(*[st.integers(0, 8)] * 4),
)
def test_blocks_and_ranges_are_those_of_the_whole_matrix(n, causal, window, masked, cut) -> None:
    mask = torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.6 if masked else None
    visibility = Visibility(n, causal, window, mask)
    whole = naive(n, causal, window, mask)
    rows = slice(cut[0] % n, max(cut[0] % n, cut[1] % n) + 1)
    keys = slice(cut[2] % n, max(cut[2] % n, cut[3] % n) + 1)
    block = visibility.block(rows, keys)
    expected = whole[rows, keys]
    assert torch.equal(torch.ones_like(expected) if block is None else block, expected)
    allowed = naive(n, causal, window, None)[rows].any(dim=0).nonzero().flatten()
    assert visibility.keys(rows) == slice(int(allowed[0]), int(allowed[-1]) + 1)
    shared = visibility.shared_keys(rows)
    assert naive(n, causal, window, None)[rows].all(dim=0).nonzero().flatten().tolist() == list(
        range(shared.start, shared.stop)
    )
    cleared = torch.full((2, *expected.shape), torch.inf)
    visibility.clear(cleared, rows, keys)
    assert torch.equal(cleared, torch.where(expected, torch.inf, 0.0).expand_as(cleared))


@pytest.mark.parametrize("window", [None, 64])
def test_what_is_wholly_seen_makes_no_block(window: int | None) -> None:
    visibility = Visibility(1 << 40, True, window)
    rows = slice(1 << 30, (1 << 30) + 16)
    assert visibility.block(rows, slice(rows.start - 48, rows.start + 1)) is None
    assert visibility.block(rows, rows) is not None
