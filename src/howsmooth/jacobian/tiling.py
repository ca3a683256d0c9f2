"""How n × n scores are cut: into blocks of query rows, pieces of a block, and tiles of a piece.

Rows of queries do not know each other, so that a block of rows is all that has to be in memory at a time. A
block at the edge of what its queries see, at the diagonal of causal order or at the ends of a window, has two
sorts of pieces: what all its rows see, and strips of few rows with what only they see. Where threads have
rows of their own, each has its own square at the diagonal, and strips of all squares are one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.visibility import Visibility

__all__ = ["Block", "Piece", "Stairs", "Tiling", "batches_apart", "shifted", "working_bytes"]

# Entries of a tile: enough for the full rate of matrix products, few enough for a processor's caches.
_TILE = {"cpu": 1 << 19}
_TILE_ELSEWHERE = 1 << 26
_COLUMNS = {"cpu": 512}
_COLUMNS_ELSEWHERE = 8192
# Rows of a block, at least: keys are read again, and their cotangents written, for every block of rows. Heads
# are rather taken a few at a time.
_ROWS = 256
# The tiles of one block of rows are kept between J and Jᵀ: at most these bytes, as far as rows can be fewer.
_PANEL = {"cpu": 1 << 30}
_PANEL_ELSEWHERE = 1 << 32
_FEWEST_ROWS = 16
# Rows of a strip: half of what it has at the diagonal is formed for nothing.
_STRIP = 256
# Rows of a batch, at least, where each thread has one; and threads, at most: each has cotangents of all keys.
_FEWEST_ROWS_APART = 64
_MOST_THREADS_APART = 4


def _tile_shape(heads: int, n: int, itemsize: int, device: torch.device) -> tuple[int, int, int]:
    """Return how many of ``heads`` heads a tile takes, its rows of queries and its columns."""
    columns = min(n, _COLUMNS.get(device.type, _COLUMNS_ELSEWHERE))
    entries = _TILE.get(device.type, _TILE_ELSEWHERE)
    rows = max(entries // (heads * columns), _ROWS)
    panel = _PANEL.get(device.type, _PANEL_ELSEWHERE)
    rows = max(_FEWEST_ROWS, min(rows, panel // (heads * n * itemsize)))
    return max(1, min(heads, entries // (rows * columns))), rows, columns


def working_bytes(heads: int, m: int, n: int, itemsize: int, device: torch.device, *, capped: bool) -> int:
    """Bytes that a pass over the tiles takes beside tensors of n rows, at most."""
    _, rows, columns = _tile_shape(heads, n, itemsize, device)
    kept, formed = (2 if capped else 1) * n * itemsize, 4 * columns * 8
    return heads * min(rows, m) * (kept + formed)


def batches_apart(kv_heads: int, device: torch.device) -> int:
    """Return in how many batches products of one head are made, where it has enough rows.

    One product with few columns is shared badly between the threads of a processor: each writes what the
    other reads next. With one key head each thread has rows, and cotangents of all keys, of its own.
    """
    threads = torch.get_num_threads() if kv_heads == 1 and device.type == "cpu" else 1
    return threads if threads <= _MOST_THREADS_APART else 1


def shifted(rows: slice, by: int) -> slice:
    """Return the rows counted from another one."""
    return slice(rows.start + by, rows.stop + by)


@dataclass(frozen=True)
class Block:
    """Some rows of queries, counted from the first held, of some key heads of one member.

    Matrix products are made in batches: of the heads or, of one head, of ``batches`` parts of the rows. Axis
    b below is the one or the other, and r is group · rows / batches.
    """

    heads: slice
    rows: slice
    batches: int = 1

    @property
    def length(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def keys_of(self) -> tuple[int, ...]:
        """What tells the keys of one block from those of another."""
        return self.heads.start, self.heads.stop, self.batches

    def cut(self, heads: int) -> list[Block]:
        """Take ``heads`` key heads at a time."""
        first, last = self.heads.start, self.heads.stop
        return [replace(self, heads=slice(i, min(i + heads, last))) for i in range(first, last, heads)]

    def of_rows(self, t: Float[Tensor, "heads group m width"]) -> Float[Tensor, "b r width"]:
        """Return the block's part of what every query has."""
        t = t[self.heads, :, self.rows]
        return t.reshape(t.shape[0] * self.batches, -1, t.shape[-1])

    def of_keys(self, t: Float[Tensor, "heads n width"], keys: slice) -> Float[Tensor, "b keys width"]:
        """Return what some keys have, for the block's heads."""
        t = t[self.heads, keys]
        return t if self.batches == 1 else t.expand(self.batches, -1, -1)

    def grid(self, t: Float[Tensor, "b r width"], group: int) -> Float[Tensor, "heads group rows width"]:
        """Return what :meth:`of_rows` gave, or what is of its shape, with heads and rows apart."""
        return t.view(self.heads.stop - self.heads.start, group, self.length, t.shape[-1])

    def numbers(self, first_row: int) -> slice:
        """Return the rows as they are numbered in the sequence."""
        return shifted(self.rows, first_row)

    def part_of(self, t: Tensor, block: Block) -> Tensor:
        """Return this block's part of what the rows of a larger one have, shaped as by :meth:`grid`."""
        return t[:, :, shifted(self.rows, -block.rows.start)]

    def places(self, keys: slice) -> list[tuple[slice | int, slice]]:
        """Return batches, and which keys they have; an int stands for one batch."""
        return [(slice(self.batches), keys)]


@dataclass(frozen=True)
class Stairs(Block):
    """The same rows of each batch of a block of one head, with keys of their own: strips of several squares.

    Rows and keys are numbered from the first of a batch's square.
    """

    origin: int = 0
    key_origin: int = 0
    side: int = 0

    @property
    def keys_of(self) -> tuple[int, ...]:
        """What tells the keys of one block from those of another."""
        return *super().keys_of, self.key_origin, self.side

    def of_rows(self, t: Float[Tensor, "heads group m width"]) -> Float[Tensor, "b r width"]:
        """Return the block's part of what every query has."""
        start, _, row, entry = t.stride()
        return self._strips(t, self.heads.start * start, self.origin, self.rows, row, entry)

    def of_keys(self, t: Float[Tensor, "heads n width"], keys: slice) -> Float[Tensor, "b keys width"]:
        """Return what some keys of each square have."""
        start, row, entry = t.stride()
        return self._strips(t, self.heads.start * start, self.key_origin, keys, row, entry)

    def grid(self, t: Float[Tensor, "b r width"], group: int) -> Float[Tensor, "b 1 r width"]:
        """Return what :meth:`of_rows` gave with one group."""
        return t.unsqueeze(1)

    def numbers(self, first_row: int) -> slice:
        """Return the rows as they are numbered among the keys, which are those of the square."""
        return self.rows

    def part_of(self, t: Tensor, block: Block) -> Tensor:
        """Return this block's part of what the rows of a larger one have, shaped as by :meth:`grid`."""
        _, _, row, entry = t.stride()
        return self._strips(t, 0, self.origin - block.rows.start, self.rows, row, entry).unsqueeze(1)

    def places(self, keys: slice) -> list[tuple[slice | int, slice]]:
        """Return batches, and which keys they have, as they are numbered outside; an int stands for one."""
        return [(i, shifted(keys, self.key_origin + i * self.side)) for i in range(self.batches)]

    def _strips(
        self, t: Tensor, start: int, origin: int, own: slice, row: int, entry: int
    ) -> Float[Tensor, "b own width"]:
        """Return rows of each square; the head begins at ``start``; ``row`` and ``entry`` are strides."""
        # One operation in place of four: at 2048 tokens the time to start operations counts.
        shape, strides = (self.batches, own.stop - own.start, t.shape[-1]), (self.side * row, row, entry)
        return t.as_strided(shape, strides, t.storage_offset() + start + (origin + own.start) * row)


@dataclass(frozen=True)
class Piece:
    """Rows of a block, and the tiles of keys with which they are worked on, numbered as the block does it."""

    block: Block
    keys: list[slice]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key whose probabilities are formed, of one head."""
        squares = self.block.batches if isinstance(self.block, Stairs) else 1
        return int(squares * self.block.length * sum(keys.stop - keys.start for keys in self.keys))


@dataclass(frozen=True)
class Tiling:
    """How the scores of m queries and n keys are cut.

    Parameters
    ----------
    members, kv_heads, group, m, n
        Members of the batch, key heads of each, query heads that share one, queries and keys.
    itemsize
        Bytes of a probability.
    device
        Where they are formed.
    visibility, first_row
        Which keys are seen, queries numbered as in the sequence; the number of the first one.
    features
        Whether something is done to scores.

    """

    members: int
    kv_heads: int
    group: int
    m: int
    n: int
    itemsize: int
    device: torch.device
    visibility: Visibility
    first_row: int
    features: bool

    @cached_property
    def columns(self) -> int:
        """Keys of a tile, at most; tiles begin and end at its multiples, or with what is seen."""
        return _tile_shape(1, self.n, self.itemsize, self.device)[2]

    @property
    def batches(self) -> int:
        """In how many batches products of one head are made, where it has enough rows."""
        return batches_apart(self.kv_heads, self.device)

    def spans(self) -> list[range]:
        """Return the keys of all tiles."""
        return [range(i, min(i + self.columns, self.n)) for i in range(0, self.n, self.columns)]

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of rows, with all key heads of a member."""
        window = self.visibility.window
        # Keys of a block of rows, about: of these tiles are kept.
        reach = self.n if window is None else min(self.n, 2 * window + _COLUMNS["cpu"])
        _, length, _ = _tile_shape(self.kv_heads * self.group, reach, self.itemsize, self.device)
        if self._edged and self.device.type != "cpu":
            length = min(length, self._strip)
        for head in range(0, self.members * self.kv_heads, self.kv_heads):
            for row in range(0, self.m, length):
                yield self._block(slice(head, head + self.kv_heads), row, min(row + length, self.m))

    def heads_at_once(self, block: Block) -> int:
        """Return how many key heads of a block of rows a tile takes."""
        heads, most, _ = _tile_shape(self.kv_heads * self.group, self.n, self.itemsize, self.device)
        # Where rows are fewer, at the end or in a window, heads can be more.
        return max(1, min(self.kv_heads, heads * most // (block.length * self.group)))

    def strips(self, block: Block) -> list[Block]:
        """Cut a block so that few keys are seen by some of the rows only."""
        length = self._strip if self._edged else block.length
        if block.length <= length:
            return [block]
        first, last = block.rows.start, block.rows.stop
        return [self._block(block.heads, i, min(i + length, last)) for i in range(first, last, length)]

    def pieces(self, block: Block) -> list[Piece]:
        """Cut a block into what all its rows see, and what is left to its strips."""
        strips = self.strips(block)
        if len(strips) > 1 and self._has_stairs(block):
            first = block.rows.start + self.first_row
            before = [Piece(block, self.tiles(slice(0, first)))] if first else []
            return before + self._stairs(block)
        seen = [self.visibility.keys(strip.numbers(self.first_row)) for strip in strips]
        shared = self.visibility.shared_keys(block.numbers(self.first_row))
        start = -(-shared.start // self.columns) * self.columns
        stop = shared.stop // self.columns * self.columns
        if len(strips) == 1 or start >= stop:
            return [Piece(strip, self.tiles(keys)) for strip, keys in zip(strips, seen, strict=True)]
        return [Piece(block, self.tiles(slice(start, stop)))] + [
            Piece(strip, self.tiles(slice(keys.start, start)) + self.tiles(slice(stop, keys.stop)))
            for strip, keys in zip(strips, seen, strict=True)
        ]

    def _has_stairs(self, block: Block) -> bool:
        """Tell whether each batch of a block can have a square at the diagonal."""
        plain = self.visibility.triangle and self.group == 1 and not self.features
        side = block.length // block.batches
        # No tile of a square may lie in two of all keys' tiles.
        aligned = (block.rows.start + self.first_row) % self.columns == 0
        aligned &= side % self.columns == 0 or self.columns % side == 0
        return bool(block.batches > 1 and plain and aligned)

    def _stairs(self, block: Block) -> list[Piece]:
        """Cut what lies between a block's first row and the diagonal."""
        first, side = block.rows.start, block.length // block.batches
        below = [
            Piece(
                self._block(block.heads, i, i + side),
                self.tiles(slice(first + self.first_row, i + self.first_row)),
            )
            for i in range(first + side, block.rows.stop, side)
        ]
        strips = [slice(i, min(i + self._strip, side)) for i in range(0, side, self._strip)]
        squares = [
            Stairs(block.heads, rows, block.batches, first, first + self.first_row, side) for rows in strips
        ]
        return below + [Piece(stairs, self.tiles(slice(0, stairs.rows.stop))) for stairs in squares]

    def tiles(self, keys: slice) -> list[slice]:
        """Cut keys into tiles' columns."""
        # Whole multiples, so that neighbouring blocks of rows share their tiles' places.
        edges = range(keys.start // self.columns * self.columns, keys.stop, self.columns)
        return [slice(max(i, keys.start), min(i + self.columns, keys.stop)) for i in edges]

    @property
    def _edged(self) -> bool:
        return self.visibility.causal or self.visibility.window is not None

    @property
    def _strip(self) -> int:
        return _STRIP if self.device.type == "cpu" else max(_STRIP, self.n // 16)

    def _block(self, heads: slice, first: int, last: int) -> Block:
        each, left = divmod(self.group * (last - first), self.batches)
        apart = left == 0 and each >= _FEWEST_ROWS_APART
        return Block(heads, slice(first, last), self.batches if apart else 1)
