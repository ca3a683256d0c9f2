"""Choice of the number of CPU threads with which PyTorch is fastest beside other programs.

The threads of PyTorch wait for each other after every operation. If other programs use the cores, all of them
wait for the one that was interrupted, and together they take up to ten times as long as one thread. So long
calls of this library time a typical computation now and then, with different numbers of threads, and go on
with the fastest. The user's own number is an upper limit, and is restored when the call returns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["fastest_threads", "renew_threads", "with_fastest_threads"]

P = ParamSpec("P")
T = TypeVar("T")

# Shorter calls keep the user's number of threads.
_SHORT = 0.3
# So many times as long as a choice has taken, it stands.
_STANDS = 60
# More threads are taken if they need at most this share of the time of fewer.
_GAIN = 0.9


class _Choice:
    """The number of threads chosen for a running call of the library. Calls within it share the choice."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: set[int] = set()
        self.next = math.inf if most == 1 else time.monotonic() + _SHORT

    def renew(self) -> None:
        began = time.monotonic()
        if began >= self.next:
            best = fastest(self.most)
            self.taken.add(best)
            torch.set_num_threads(best)
            self.next = time.monotonic() + _STANDS * (time.monotonic() - began)

    @property
    def words(self) -> str:
        """A phrase with the chosen numbers of threads, empty if only the user's number was used."""
        if self.taken <= {self.most}:
            return ""
        numbers = " to ".join(map(str, sorted({min(self.taken), max(self.taken)})))
        return f"computed with {numbers} of {self.most} threads, the fastest here"


# Of each Python thread by itself, as OpenMP has a number for each
_running: ContextVar[_Choice | None] = ContextVar("running", default=None)


@contextmanager
def fastest_threads(number: int | None = None) -> Iterator[_Choice]:
    """Let PyTorch use the fastest number of threads in a ``with`` block, or the given ``number``. The block
    gets the choice, whose ``words`` say what was chosen. Afterwards PyTorch uses as many threads as before.

    The fastest number is found by :func:`renew_threads`, from 0.3 s after the beginning of the block on.
    """
    if (outer := _running.get()) is not None:  # the outermost block decides
        yield outer
        return
    before = torch.get_num_threads()
    choice = _Choice(number or before)
    token = _running.set(choice)
    try:
        if number is not None:
            torch.set_num_threads(number)
            choice.next = math.inf
        yield choice
    finally:
        _running.reset(token)
        torch.set_num_threads(before)


def with_fastest_threads(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that each call runs in a :func:`fastest_threads` block."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with fastest_threads():
            return function(*args, **kwargs)

    return call


def renew_threads() -> None:
    """Choose the number of threads again if the last choice was long ago, and a :func:`fastest_threads` block
    is running. Long loops call this in every step.
    """
    choice = _running.get()
    if choice is not None:
        choice.renew()


def fastest(most: int) -> int:
    """Return the number of threads, from 1 to ``most``, with which a typical computation is fastest now."""
    candidates = sorted({1, *(max(most // share, 1) for share in (8, 4, 2, 1))})
    for threads in candidates[1:]:
        seconds(threads)  # the first computation with more threads than before starts them
    # The sum, as the rare rounds in which a thread is interrupted are what costs.
    rounds = [[seconds(threads) for threads in candidates] for _ in range(4)]
    taken = [sum(times) for times in zip(*rounds, strict=True)]
    best = 0
    for i, time_of in enumerate(taken):
        best = i if time_of < _GAIN * taken[best] else best
    return candidates[best]


def seconds(threads: int) -> float:
    """Return the time that a typical short computation takes with the given number of threads."""
    torch.set_num_threads(threads)
    matrix = torch.ones(384, 384)
    began = time.perf_counter()
    for _ in range(3):
        matrix = torch.softmax(matrix @ matrix, dim=1)
    return time.perf_counter() - began
