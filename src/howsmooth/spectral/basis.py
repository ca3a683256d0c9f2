"""A Krylov basis kept for reorthogonalisation alone, in half precision if need be, in pieces.

A process may hold some coordinates of every vector only: sums over all are then made by a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from howsmooth.spectral.sums import PIECE, squared_lengths

__all__ = ["Basis", "Reduction", "reduced", "squares"]

Reduction = Callable[[Tensor], Tensor]
"""The sum over processes of a float64 tensor."""

# Rows are allocated together up to this many bytes.
_BLOCK_BYTES = 1 << 26


class Basis:
    """Rows (step, member, size) that grow by one a step, kept in a dtype of their own.

    Half precision holds 2^s v, s the power that brings the entries of a unit vector near to one: without it
    they would fall below its normal range in large dimensions.
    """

    def __init__(self, size: int, dtype: torch.dtype, working: torch.dtype, reduce: Reduction | None) -> None:
        self.dtype = dtype
        self.working = working
        self.reduce = reduce
        self.count = 0
        self.blocks: list[Tensor] = []
        # 2^15 at most: an entry of a unit vector may be one, and float16 ends at 65504.
        self.scale = 2.0 ** min(15, round(math.log2(size) / 2)) if dtype == torch.float16 else 1.0

    def append(self, row: Tensor) -> None:
        """Keep unit vectors (member, size)."""
        if self.count == sum(len(block) for block in self.blocks):
            rows = max(1, min(32, _BLOCK_BYTES // (row.numel() * self.dtype.itemsize)))
            self.blocks.append(row.new_empty(rows, *row.shape, dtype=self.dtype))
        last = self.blocks[-1]
        place = self.count - sum(len(block) for block in self.blocks[:-1])
        for kept, vector in zip(last[place], row, strict=True):
            for low in range(0, len(vector), PIECE):
                kept[low : low + PIECE] = vector[low : low + PIECE] * self.scale
        self.count += 1

    def keep(self, members: Tensor) -> None:
        """Drop all other members."""
        self.blocks = [block[:, members] for block in self.blocks]

    def orthogonalise_(self, z: Tensor, latest: Sequence[Tensor]) -> Tensor:
        """Take from z (member, size), in place, its projection on the basis; return what length is left.

        The ``latest`` vectors, newest first, are at hand unrounded, and take the place of their rows: what is
        left along neighbours would enter in first order.
        """
        if self.dtype == self.working:
            latest = ()
        lengths = squares(z, self.reduce).sqrt()
        for member, vector in enumerate(z):
            for _ in range(2):
                before = float(lengths[member])
                self._subtract_projection_(member, vector, self.count - len(latest))
                for rows in latest:
                    overlap = reduced(_dot(rows[member], vector), self.reduce)
                    vector.addcmul_(rows[member], overlap.to(vector.dtype), value=-1)
                lengths[member] = squares(vector[None], self.reduce).sqrt()[0]
                # Daniel, Gragg, Kaufman, Stewart (1976): again only after a large loss of length.
                if float(lengths[member]) > 0.7 * before:
                    break
        return lengths

    def combine(self, member: int, weights: np.ndarray, out: Tensor) -> None:
        """Write the unit vector along Σ_k weights_k row_k of one member to ``out``."""
        coefficients = torch.as_tensor(weights / self.scale, dtype=self.working, device=out.device)
        out.zero_()
        for low in range(0, len(out), PIECE):
            piece = slice(low, low + PIECE)
            for rows, part in self._parts(member, piece, len(weights)):
                out[piece].addmv_(part.mT, coefficients[rows])
        out /= squares(out[None], self.reduce).sqrt().to(out.dtype)

    def _subtract_projection_(self, member: int, vector: Tensor, count: int) -> None:
        coefficients = torch.zeros(count, dtype=torch.float64, device=vector.device)
        # Pieces stay in a core's cache while all rows of the basis pass over them.
        pieces = [slice(low, low + PIECE) for low in range(0, len(vector), PIECE)]
        summed = self.working if len(pieces) == 1 else torch.float64
        for piece in pieces:
            x = vector[piece].to(summed)
            for rows, part in self._parts(member, piece, count):
                coefficients[rows] += part.to(summed) @ x
        coefficients = reduced(coefficients, self.reduce) / self.scale**2
        weights = coefficients.to(self.working)
        for piece in pieces:
            for rows, part in self._parts(member, piece, count):
                vector[piece].addmv_(part.mT, weights[rows], alpha=-1)

    def _parts(self, member: int, piece: slice, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the first rows of one member's basis in the working dtype, a piece of their columns."""
        first = 0
        for block in self.blocks:
            last = min(first + len(block), count)
            if last <= first:
                return
            yield slice(first, last), block[: last - first, member, piece].to(self.working)
            first = last


def squares(x: Tensor, reduce: Reduction | None) -> Tensor:
    """Return the squared lengths of rows (member, size) in float64, (member,)."""
    return reduced(squared_lengths(x), reduce)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of two vectors (size,), summed in float64."""
    pieces = zip(x.split(PIECE), y.split(PIECE), strict=True)
    return torch.stack([torch.dot(a.double(), b.double()) for a, b in pieces]).sum()


def reduced(values: Tensor, reduce: Reduction | None) -> Tensor:
    """Return the sum over processes; the values themselves where there is one."""
    return values if reduce is None else reduce(values)
