"""The division of the rows (tokens) of one long sequence among processes, such that all have equal work if
attention is causal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["RowShares"]


@dataclass(frozen=True)
class RowShares:
    """The division of the rows (tokens) of a sequence among processes, such that all have equal work if
    attention is causal.

    The n rows are cut into 2 · world ranges. Process r holds the ranges r and 2 · world − 1 − r.

    The cost of a causal query is proportional to the number of keys that it sees. With one range from each
    end, all processes have equal work, up to the rounding of lengths. For attention that is not causal,
    every division into equal shares would do.

    Parameters
    ----------
    n
        Number of tokens of the sequence.
    world
        Number of processes.

    Raises
    ------
    ArgumentError
        If there are fewer than two tokens for each process.

    """

    n: int
    world: int

    def __post_init__(self) -> None:
        """Raise ArgumentError if the sequence is too short to give every process some of its rows."""
        if self.world < 1 or self.n < 2 * self.world:
            raise ArgumentError(
                "n",
                expected=f"at least two tokens for each of {self.world} processes",
                got=f"n = {self.n}",
                remedy="Use fewer processes: a sequence this short needs one only.",
            )

    def ranges(self, rank: int) -> tuple[slice, ...]:
        """Return the ranges of rows of the sequence that the process ``rank`` holds, in increasing order."""
        pieces = 2 * self.world
        first, last = (
            slice(self.n * piece // pieces, self.n * (piece + 1) // pieces)
            for piece in (rank, pieces - 1 - rank)
        )
        return (slice(first.start, last.stop),) if first.stop == last.start else (first, last)

    def rows(self, rank: int) -> Int[Tensor, " own"]:
        """Return the indices of the rows of the sequence that the process ``rank`` holds."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.ranges(rank)])

    def count(self, rank: int) -> int:
        """Return how many rows of the sequence the process ``rank`` holds."""
        return sum(part.stop - part.start for part in self.ranges(rank))

    @property
    def longest(self) -> int:
        """The largest number of rows of the sequence that one process holds."""
        return max(self.count(rank) for rank in range(self.world))
