"""Scratch memory: used again by the next tile and the next pass of a thread, and by nobody else."""

from __future__ import annotations

import threading

import pytest
import torch

from howsmooth.jacobian import scratch_memory
from howsmooth.jacobian.scratch_memory import Scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_memory, "_left", threading.local())


def place(own: Scratch, size: int, name: str = "p", dtype: torch.dtype = torch.float32) -> int:
    return own.empty(name, (size,), dtype, CPU).data_ptr()


def test_a_tile_takes_the_memory_of_an_earlier_one_that_was_as_large() -> None:
    own = Scratch()
    large = own.empty("p", (3, 4), torch.float32, CPU)
    small = own.empty("p", (2, 5), torch.float32, CPU)
    assert small.shape == (2, 5)
    assert small.data_ptr() == large.data_ptr()
    assert len({large.data_ptr(), place(own, 12, "ds"), place(own, 12, dtype=torch.float64)}) == 3
    assert own.empty("p", (13,), torch.float32, CPU).shape == (13,)


def test_the_next_pass_has_what_the_last_one_left() -> None:
    first = Scratch()
    given = first.empty("p", (8,), torch.float32, CPU)
    first.leave()
    second = Scratch()
    assert place(second, 8) == given.data_ptr()
    # Two passes at a time share nothing.
    assert place(Scratch(), 8) != given.data_ptr()


def test_much_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_memory, "_LEFT", 31)
    own = Scratch()
    place(own, 8)
    own.leave()
    assert not scratch_memory._left.memory
    assert not own.memory


def test_threads_share_nothing() -> None:
    own = Scratch()
    given = own.empty("p", (8,), torch.float32, CPU)
    own.leave()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(len(Scratch().memory)))
    thread.start()
    thread.join()
    assert found == [0]
    assert place(Scratch(), 8) == given.data_ptr()


def test_memory_made_in_inference_mode_serves_outside_of_it() -> None:
    own = Scratch()
    with torch.inference_mode():
        given = own.empty("p", (8,), torch.float32, CPU)
        given.zero_()
    own.leave()
    assert Scratch().empty("p", (8,), torch.float32, CPU).add_(1).sum() == 8
