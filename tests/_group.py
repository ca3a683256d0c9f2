"""Processes that share a sequence, played by threads of one process: quick, and what they send is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
SECONDS = 60.0


class _Table:
    """Where the threads lay down what the others are to read."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.laid: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=SECONDS)

    def swapped(self, rank: int, value: Any) -> list[Any]:
        self.laid[rank] = value
        self.barrier.wait()
        values = list(self.laid)
        self.barrier.wait()
        return values


class ThreadCollectives:
    """The collectives of one thread of a group."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self.world = table.world
        self.table = table
        self.received = 0

    def all_gather(self, out: Tensor, t: Tensor) -> None:
        for place, value in zip(out, self.table.swapped(self.rank, t.clone()), strict=True):
            place.copy_(value)
        self.received += (self.world - 1) * t.nbytes

    def reduce_scatter(self, out: Tensor, t: Tensor) -> None:
        parts = self.table.swapped(self.rank, t.clone())
        out.copy_(sum(part[self.rank] for part in parts))
        self.received += (self.world - 1) * out.nbytes

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self.table.swapped(self.rank, value)


def in_threads(world: int, work: Callable[[ThreadCollectives], T]) -> list[T]:
    """Run ``work`` in ``world`` threads and return what each gave; the error of the first that failed."""
    table = _Table(world)

    def one(rank: int) -> T:
        try:
            return work(ThreadCollectives(rank, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(one, rank) for rank in range(world)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
