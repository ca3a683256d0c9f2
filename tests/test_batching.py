"""Who is measured together: lengths joined, members that fit, and each by itself that does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth import batching, lipschitz
from howsmooth.attention import Rotary
from howsmooth.batching import are_measured_together, batches, footprint
from howsmooth.jacobian.memory_footprint import cached_bytes
from howsmooth.lipschitz import measurement
from tests._cases import D, random_attention, tokens, true_norm

ROOMY = 1 << 50
LENGTHS = (5, 2, 3, 5, 2, 9)  # from short to long: members 1 and 4, 2, 0 and 3, 5


F = random_attention(0)


def basis_of(n: int) -> int:
    """The two bases of 32 vectors that are counted."""
    return n * 2 * D * 8 * batching._EXPECTED_STEPS


def bytes_of(n: int) -> int:
    return cached_bytes(F, n, torch.float64) + basis_of(n)


def filled(count: int) -> dict[str, Any]:
    return {"_FILLED_BYTES": {"cpu": count}}


AT_THREE = 2 * (bytes_of(3) - bytes_of(2))  # 2, 2 and 3 tokens at the length 3
AT_FIVE = 2 * (bytes_of(5) - bytes_of(2)) + bytes_of(5) - bytes_of(3)
SIX = 6 * cached_bytes(F, 9, torch.float64)
ELSEWHERE = 8 * 6 * basis_of(9)
ALL, BY_LENGTH = [[[1, 4, 2, 0, 3, 5]]], [[[1, 4], [2], [0, 3], [5]]]
CASES: dict[str, tuple[dict[str, Any], int, str, list[list[list[int]]]]] = {
    "filling up costs little": ({}, ROOMY, "cpu", ALL),
    "nothing is filled up": (filled(0), ROOMY, "cpu", BY_LENGTH),
    "two are filled up to 3": (filled(AT_THREE), ROOMY, "cpu", [[[1, 4, 2], [0, 3], [5]]]),
    "a byte less": (filled(AT_THREE - 1), ROOMY, "cpu", BY_LENGTH),
    "three are filled up to 5": (filled(AT_FIVE), ROOMY, "cpu", [[[1, 4, 2, 0, 3], [5]]]),
    "memory for all at length 9": ({}, SIX, "cpu", ALL),
    "a byte less memory": ({}, SIX - 1, "cpu", [[[1, 4, 2, 0, 3]], [[5]]]),
    "bases of five": ({"_BASIS_BYTES": 5 * basis_of(5)}, ROOMY, "cpu", [[[1, 4, 2, 0, 3]], [[5]]]),
    "a byte less of bases": (
        {"_BASIS_BYTES": 5 * basis_of(5) - 1}, ROOMY, "cpu", [[[1, 4, 2, 0]], [[3, 5]]],
    ),
    "bases of lengths that are not filled up": (
        {**filled(0), "_BASIS_BYTES": 2 * basis_of(2) + basis_of(3) + 2 * basis_of(5)},
        ROOMY, "cpu", [[[1, 4], [2], [0, 3]], [[5]]],
    ),
    "a basis larger than allowed": ({"_BASIS_BYTES": 1}, ROOMY, "cpu", [[[i]] for i in (1, 4, 2, 0, 3, 5)]),
    "a share of another device": ({"_BASIS_BYTES": 0}, ELSEWHERE, "meta", ALL),
    "less of another device": ({"_BASIS_BYTES": 0}, ELSEWHERE - 8, "meta", [[[1, 4, 2, 0, 3]], [[5]]]),
    "nothing is filled up elsewhere": ({"_FILLED_ELSEWHERE": 0}, ROOMY, "meta", BY_LENGTH),
    "streamed alone": ({"_STREAMED_FROM": 5}, ROOMY, "cpu", [[[1, 4, 2]], [[0]], [[3]], [[5]]]),
}  # fmt: skip
"""Limits, memory and device; then which members are measured together, in the order of their operators."""


@pytest.mark.parametrize("case", CASES)
def test_members_are_measured_together_where_they_fit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, budget, device, expected = CASES[case]
    for name, value in limits.items():
        if isinstance(value, dict):
            monkeypatch.setitem(getattr(batching, name), "cpu", value["cpu"])
        else:
            monkeypatch.setattr(batching, name, value)
    members = [torch.empty(n, D, dtype=torch.float64, device=device) for n in LENGTHS]
    assert list(batches(F, members, budget)) == expected


def test_one_that_is_streamed_stays_alone_where_a_longer_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room to stream five tokens and not nine; the probabilities of nine fit."""
    monkeypatch.setattr(batching, "_STREAMED_FROM", 5)
    f, xs = random_attention(0), [tokens(0, 9, D), tokens(1, 5, D), tokens(2, 9, D)]
    budget = batching._least_streamed(f, xs[1][None])
    assert cached_bytes(f, 9, torch.float64) * 2 <= budget < batching._least_streamed(f, xs[0][None])
    assert list(batches(f, xs, budget)) == [[[1]], [[0, 2]]]
    found = hs.local_lipschitz(f, xs, memory=budget, rtol=1e-8)
    for x, value in zip(xs, found.value, strict=True):
        torch.testing.assert_close(value, true_norm(f, x[None])[0], rtol=1e-9, atol=0)


def test_equal_maps_are_measured_together_and_no_others() -> None:
    f = random_attention(0)
    turned = [replace_rotary(f, n) for n in (7, 4)]
    assert are_measured_together(f, copy.deepcopy(f))
    assert not are_measured_together(f, random_attention(1))
    assert not are_measured_together(f, turned[0])
    assert are_measured_together(*turned)
    assert not are_measured_together(*turned[::-1])
    assert not are_measured_together(torch.tanh, torch.tanh)


def replace_rotary(f: hs.SelfAttention, n: int) -> hs.SelfAttention:
    """The same attention with rotations by position for at most n tokens."""
    angles = torch.arange(n, dtype=torch.float64)[:, None] * torch.ones(f.key_dim, dtype=torch.float64)
    return hs.SelfAttention(f.query, f.key, f.value, f.output, rotary=Rotary(angles.cos(), angles.sin()))


def test_a_footprint_says_how_a_sequence_will_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against what ``local_lipschitz`` then does."""
    asked: list[bool] = []
    linearised = measurement.closed_form_jacobian

    def streamed(*args: Any, **options: Any) -> Any:
        asked.append(options["streamed"])
        return linearised(*args, **options)

    monkeypatch.setattr(measurement, "closed_form_jacobian", streamed)
    generator = torch.Generator().manual_seed(0)
    f = hs.SelfAttention(*(torch.randn(8, 4, 8, generator=generator) for _ in range(3)))
    n = 512
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    kept = footprint(f, (n, 8), dtype=torch.float32, device=torch.device("cpu"), memory=2**30)
    assert not kept.streamed
    little = kept.size - 1
    found = footprint(f, (n, 8), dtype=torch.float32, device=torch.device("cpu"), memory=little)
    assert found.streamed
    assert found.size < kept.size
    for memory, expected in ((2**30, []), (little, [True])):
        asked.clear()
        lipschitz.local_lipschitz(f, x, max_iterations=2, memory=memory)
        assert asked[:1] == expected
    unknown = footprint(torch.sin, (4, 3), dtype=torch.float32, device=torch.device("cpu"))
    assert (unknown.streamed, unknown.size) == (False, 0)
