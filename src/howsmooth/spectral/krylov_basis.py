"""The basis of Krylov vectors that Lanczos needs for reorthogonalisation, stored in half precision if memory
is short.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from howsmooth.spectral.accurate_sums import PIECE, inner, pieces, row_lengths, split

__all__ = ["Basis"]

# Largest number of bytes that are allocated together. Each step starts operations for every block, which
# takes time on devices other than a CPU, so their blocks are larger.
_BLOCK_BYTES = {"cpu": 1 << 26}
_BLOCK_BYTES_ELSEWHERE = 1 << 29
# Vectors of at least so many entries are projected on the basis one by one on a CPU, where a product of a
# matrix and a vector then takes a fifth of the time that it takes as part of a batch.
_ONE_BY_ONE = 1 << 9
# The vectors of so many maps are projected together, on one basis vector of each map after the other, because
# there are fewer steps than maps, and each operation takes some microseconds to start.
_MANY = 32
# Entries of long float32 vectors whose products a CPU sums in float32: the error is less than that of vectors
# that are summed as a whole.
_SHORT = 1 << 14
# Entries of all shorter vectors that a CPU projects together, so that they stay in its cache.
_TOGETHER = 1 << 14


class Basis:
    """The Krylov vectors of all previous Lanczos steps, for each linear map of a batch.

    They have shape (step, member, size), and the dtype of the products or a smaller one.

    If ``taken`` is set to a tensor (member,), it bounds the sum of squares of the components that
    reorthogonalisation has subtracted from the vectors of each member.

    In half precision the vectors are multiplied by a power of two that brings their entries near to one.
    Otherwise, in large dimensions, the entries of unit vectors would underflow.
    """

    def __init__(self, size: int, dtype: torch.dtype, working: torch.dtype) -> None:
        self.dtype = dtype
        self.working = working
        self.count = 0
        self.taken: Tensor | None = None
        self.blocks: list[Tensor] = []
        # For each block, where the vectors of each map lie in it; None if they lie in the order of the maps.
        self._columns: list[list[int] | None] = []
        # At most 2^15, because an entry of a unit vector may be one, and the largest float16 is 65504.
        self.scale = 2.0 ** min(15, round(math.log2(size) / 2)) if dtype == torch.float16 else 1.0

    def append(self, row: Tensor) -> None:
        """Add the Krylov vectors of one Lanczos step. The argument ``row`` (member, size) has one unit vector
        for each map of the batch.
        """
        if self.count == sum(len(block) for block in self.blocks):
            most = _BLOCK_BYTES.get(row.device.type, _BLOCK_BYTES_ELSEWHERE)
            rows = max(1, min(32, most // (row.numel() * self.dtype.itemsize)))
            self.blocks.append(row.new_empty(rows, *row.shape, dtype=self.dtype))
            self._columns.append(None)
        place = self.count - sum(len(block) for block in self.blocks[:-1])
        last, columns = self.blocks[-1][place], self._columns[-1]
        if columns is not None:
            last[columns] = (row * self.scale).to(self.dtype)
        elif self.scale == 1.0:
            last.copy_(row)
        else:  # piece by piece, so that memory holds no second vector
            for kept, part in zip(*(split(t) for t in (last, row)), strict=True):
                kept.copy_(part * self.scale)
        self.count += 1

    def keep(self, members: Tensor) -> None:
        """Restrict the basis to the given maps of the batch."""
        if self.blocks and self._one_by_one(self.blocks[0]):
            # A copy of the basis would take longer than the few steps that most maps still make.
            chosen = members.tolist()
            self._columns = [chosen if old is None else [old[i] for i in chosen] for old in self._columns]
        else:
            firsts = itertools.accumulate((len(block) for block in self.blocks), initial=0)
            self.blocks = [
                self._kept(block, first, members) for block, first in zip(self.blocks, firsts, strict=False)
            ]
        if self.taken is not None:
            self.taken = self.taken[members.cpu()]

    def _kept(self, block: Tensor, first: int, members: Tensor) -> Tensor:
        """Copy a block for some maps from vector ``first`` on, without rows still to be filled."""
        kept = block.new_empty(len(block), len(members), block.shape[2])
        filled = slice(self.count - first)
        torch.index_select(block[filled], 1, members, out=kept[filled])
        return kept

    def orthogonalise_(self, z: Tensor, latest: Sequence[Tensor]) -> Tensor:
        """Orthogonalise the vectors z (member, size) against the basis, in place, and return their norms
        afterwards.

        ``latest`` are the newest vectors, newest first, in the operator's precision. They are used in place
        of their rounded rows in the basis, because a rest of z along them would enter the tridiagonal matrix
        in first order.
        """
        if self.dtype == self.working:
            latest = ()
        lengths, more = row_lengths(z), None
        for _ in range(2):
            before = lengths
            self._subtract_projection_(z, self.count - len(latest), more)
            for rows in latest:
                overlap = inner(rows, z)
                overlap = overlap if more is None else overlap * more
                z.addcmul_(rows, overlap.to(z.dtype)[:, None], value=-1)
            lengths = row_lengths(z)
            # A second projection is needed only if the first one removed much of the vector (Daniel, Gragg,
            # Kaufman, Stewart 1976).
            more = lengths <= 0.7 * before
            if not bool(more.any()):
                break
        return lengths

    def combine(
        self,
        members: Int[np.ndarray, " some"],
        weights: Float[np.ndarray, "some k"],
        out: Float[Tensor, "all size"],
        places: Int[np.ndarray, " some"],
    ) -> None:
        """Compute one linear combination of basis vectors for each map in ``members``, normalise it, and
        write it to a row of ``out``.

        The combination of a map is Σ_k weights_k row_k. ``members`` are the indices of the maps in the batch,
        and ``places`` are the rows of ``out``.
        """
        coefficients = torch.as_tensor(weights.T / self.scale, dtype=self.working, device=out.device)
        if len(members) < _MANY:
            for member, place, own in zip(members.tolist(), places.tolist(), coefficients.mT, strict=True):
                x = out[place].zero_()
                for piece in pieces(len(x), x.device):
                    for rows, part in self._parts(slice(member, member + 1), piece, len(own)):
                        x[piece].addmv_(part[:, 0].mT, own[rows])
                x /= row_lengths(x[None]).to(x.dtype)
            return
        chosen = torch.as_tensor(members, device=out.device)
        # Some maps at a time, so that memory holds few vectors more
        for some in (slice(first, first + _MANY) for first in range(0, len(members), _MANY)):
            sums = out.new_zeros(len(chosen[some]), out.shape[1])
            for rows, part in self._parts(slice(None), slice(None), len(coefficients)):
                for row, of_row in zip(part, coefficients[rows], strict=True):
                    sums.addcmul_(row[chosen[some]], of_row[some, None])
            out[places[some]] = sums.div_(row_lengths(sums).to(out.dtype)[:, None])

    @staticmethod
    def _one_by_one(z: Tensor) -> bool:
        """Whether vectors (..., member, size) are projected one at a time, which pays for a few long ones."""
        return _is_long(z) and z.shape[-2] < _MANY

    def _together(self, z: Tensor) -> list[slice]:
        """Divide the maps of the batch into groups whose vectors are projected on the basis in one call."""
        size = len(z)
        if self._one_by_one(z):
            size = 1
        elif z.device.type == "cpu" and not _is_long(z):
            size = max(1, _TOGETHER // z.shape[1])
        return [slice(i, i + size) for i in range(0, len(z), size)]

    def _pieces_of_sums(self, z: Tensor) -> tuple[torch.dtype, list[slice]]:
        """Return the dtype in which each piece of columns is summed, and the pieces. They add in float64."""
        size = z.shape[1]
        if size <= PIECE:
            return self.working, [slice(size)]
        if z.device.type != "cpu" or self.working == torch.float64:
            return torch.float64, pieces(size, z.device)
        # A conversion to float64 would take several times as long as the products.
        return self.working, [slice(low, low + _SHORT) for low in range(0, size, _SHORT)]

    def _subtract_projection_(self, z: Tensor, count: int, more: Tensor | None) -> None:
        """Subtract in place each row's projection on the first ``count`` vectors, where ``more`` if given."""
        if not count:
            return
        groups, some = self._together(z), pieces(z.shape[1], z.device)
        summed, summands = self._pieces_of_sums(z)
        for members in groups:
            if more is not None and len(groups) > 1 and not bool(more[members].any()):
                continue
            x = z[members]
            sums = []
            for piece in summands:
                y = x[:, piece].to(summed)
                parts = self._parts(members, piece, count)
                sums.append(torch.cat([_by_member(part.to(summed), y) for _, part in parts]))
            coefficients = sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0, dtype=torch.float64)
            if self.scale != 1.0:
                coefficients = coefficients / self.scale**2
            if more is not None:
                coefficients = coefficients * more[members]
            if self.taken is not None:
                # A factor of two for the two projections, and the rest because the rows are not exactly
                # orthonormal.
                self.taken[members] += 2.5 * coefficients.double().square().sum(dim=0).cpu()
            weights = coefficients.to(self.working)
            for piece in some:
                for rows, part in self._parts(members, piece, count):
                    _subtract_(x[:, piece], part, weights[rows])

    def _parts(self, members: slice, piece: slice, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of the first ``count`` vectors, some maps and columns, in the computation's dtype."""
        first = 0
        for block, columns in zip(self.blocks, self._columns, strict=True):
            last = min(first + len(block), count)
            if last <= first:
                return
            places = members
            if columns is not None:
                (place,) = columns[members]
                places = slice(place, place + 1)
            yield slice(first, last), block[: last - first, places, piece].to(self.working)
            first = last


def _by_member(rows: Tensor, z: Tensor) -> Tensor:
    """Map (step, member, size) and (member, size) to the inner products (step, member)."""
    if len(z) == 1:  # a product of a matrix and a vector is faster than a batch of one
        return torch.mv(rows[:, 0], z[0])[:, None]
    if _is_long(z):
        return torch.stack([torch.linalg.vecdot(row, z) for row in rows])
    return torch.einsum("kmp,mp->km", rows, z)


def _subtract_(z: Tensor, rows: Tensor, weights: Tensor) -> None:
    """Subtract Σ_k weights[k, m] rows[k, m] from each z[m] in place, where k counts the steps."""
    if len(z) == 1:
        z[0].addmv_(rows[:, 0].mT, weights[:, 0], alpha=-1)
    elif _is_long(z):
        for row, of_row in zip(rows, weights, strict=True):
            z.addcmul_(row, of_row[:, None], value=-1)
    else:
        z -= torch.einsum("km,kmp->mp", weights, rows)


def _is_long(z: Tensor) -> bool:
    """Whether one operation a vector is faster, on a CPU, than one batched product."""
    return z.device.type == "cpu" and z.shape[-1] >= _ONE_BY_ONE
