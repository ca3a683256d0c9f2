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


def cut(budget: int = ROOMY, device: str = "cpu") -> list[list[list[int]]]:
    members = [torch.empty(n, D, dtype=torch.float64, device=device) for n in LENGTHS]
    return list(batches(random_attention(0), members, budget))


def bytes_of(n: int) -> int:
    """Probabilities, and the two bases of 32 vectors that are counted."""
    return cached_bytes(random_attention(0), n, torch.float64) + basis_of(n)


def basis_of(n: int) -> int:
    return n * 2 * D * 8 * batching._EXPECTED_STEPS


def test_all_lengths_are_one_operator_where_filling_up_costs_little() -> None:
    assert cut() == [[[1, 4, 2, 0, 3, 5]]]


def test_without_filling_up_each_length_is_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batching._FILLED_BYTES, "cpu", 0)
    assert cut() == [[[1, 4], [2], [0, 3], [5]]]


def test_filled_are_no_more_bytes_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 2 and 3 tokens at the length 3; with one of 5 all of them would be filled up to 5."""
    at_three = 2 * (bytes_of(3) - bytes_of(2))
    monkeypatch.setitem(batching._FILLED_BYTES, "cpu", at_three)
    assert cut() == [[[1, 4, 2], [0, 3], [5]]]
    monkeypatch.setitem(batching._FILLED_BYTES, "cpu", at_three - 1)
    assert cut() == [[[1, 4], [2], [0, 3], [5]]]
    at_five = 2 * (bytes_of(5) - bytes_of(2)) + bytes_of(5) - bytes_of(3)
    monkeypatch.setitem(batching._FILLED_BYTES, "cpu", at_five)
    assert cut() == [[[1, 4, 2, 0, 3], [5]]]


def test_memory_counts_members_at_the_length_that_they_are_filled_up_to() -> None:
    six = 6 * cached_bytes(random_attention(0), 9, torch.float64)
    assert cut(six) == [[[1, 4, 2, 0, 3, 5]]]
    assert cut(six - 1) == [[[1, 4, 2, 0, 3]], [[5]]]


def test_bases_of_members_measured_together_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_BASIS_BYTES", 5 * basis_of(5))
    assert cut() == [[[1, 4, 2, 0, 3]], [[5]]]
    monkeypatch.setattr(batching, "_BASIS_BYTES", 5 * basis_of(5) - 1)
    assert cut() == [[[1, 4, 2, 0]], [[3, 5]]]
    monkeypatch.setitem(batching._FILLED_BYTES, "cpu", 0)
    monkeypatch.setattr(batching, "_BASIS_BYTES", 2 * basis_of(2) + basis_of(3) + 2 * basis_of(5))
    assert cut() == [[[1, 4], [2], [0, 3]], [[5]]]


def test_one_whose_basis_is_larger_is_measured_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr(batching, "_BASIS_BYTES", 1)
    assert cut() == [[[1]], [[4]], [[2]], [[0]], [[3]], [[5]]]


def test_other_devices_fill_up_more_and_keep_bases_in_a_share_of_the_budget(monkeypatch) -> None:
    monkeypatch.setattr(batching, "_BASIS_BYTES", 0)
    assert cut(8 * 6 * basis_of(9), "meta") == [[[1, 4, 2, 0, 3, 5]]]
    assert cut(8 * 6 * basis_of(9) - 8, "meta") == [[[1, 4, 2, 0, 3]], [[5]]]
    monkeypatch.setattr(batching, "_FILLED_ELSEWHERE", 0)
    assert cut(device="meta") == [[[1, 4], [2], [0, 3], [5]]]


def test_a_sequence_that_is_streamed_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_STREAMED_FROM", 5)
    assert cut() == [[[1, 4, 2]], [[0]], [[3]], [[5]]]


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
