"""Which rows of one long sequence each process holds: an early and a late range, for even work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["RowShares"]


@dataclass(frozen=True)
class RowShares:
    """The rows of n tokens in 2 · world pieces; process r holds the pieces r and 2 · world − 1 − r.

    A causal query costs as many products as it sees keys, so that pieces taken from both ends give every
    process the same work to one piece's rounding. Without an order the choice is of no consequence.

    Parameters
    ----------
    n
        Tokens of the sequence.
    world
        Number of processes.

    Raises
    ------
    ArgumentError
        If there are fewer than two tokens a process.

    """

    n: int
    world: int

    def __post_init__(self) -> None:
        """Refuse a process without work: an empty share has no norm, no mean and no place in a sum."""
        if self.world < 1 or self.n < 2 * self.world:
            raise ArgumentError(
                "n",
                expected=f"at least two tokens for each of {self.world} processes",
                got=f"n = {self.n}",
                remedy="Use fewer processes: a sequence this short needs one only.",
            )

    def ranges(self, rank: int) -> tuple[slice, ...]:
        """Return the ranges of rows of one process, in their order in the sequence."""
        pieces = 2 * self.world
        first, last = (
            slice(self.n * piece // pieces, self.n * (piece + 1) // pieces)
            for piece in (rank, pieces - 1 - rank)
        )
        return (slice(first.start, last.stop),) if first.stop == last.start else (first, last)

    def rows(self, rank: int) -> Int[Tensor, " own"]:
        """Return the numbers of the rows of one process."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.ranges(rank)])

    def count(self, rank: int) -> int:
        """Return how many rows a process holds."""
        return sum(part.stop - part.start for part in self.ranges(rank))

    @property
    def longest(self) -> int:
        """Rows of the process that holds most."""
        return max(self.count(rank) for rank in range(self.world))
