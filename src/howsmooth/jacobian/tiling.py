"""Rules for cutting the n × n attention scores into blocks of query rows, and these blocks into tiles that
fit into memory.

Rows of queries do not depend on each other, so only one block of rows has to be in memory at a time. A block
at the causal diagonal or at the ends of a window has two sorts of pieces: the keys that all of its rows see,
and strips of few rows with the keys that only these rows see. If each thread has rows of its own, each has a
square at the diagonal, and the same strip of all squares is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.masks import Visibility

__all__ = ["DiagonalSquares", "Piece", "RowBlock", "Tiling", "parts_for_threads", "shifted", "working_bytes"]

# Most entries of a tile, enough for the full rate of matrix products, and on a CPU few enough for its caches;
# and most keys (columns) of a tile.
_TILE = {"cpu": 1 << 19}
_TILE_ELSEWHERE = 1 << 26
_COLUMNS = {"cpu": 512}
_COLUMNS_ELSEWHERE = 8192
# Fewest rows of a block, unless _PANEL asks for fewer. Every block reads all keys and writes their
# cotangents, so a tile has fewer heads rather than fewer rows.
_ROWS = 256
# Most bytes of the tiles of one block of rows, which are kept between J and Jᵀ. Rows are reduced for it, but
# not below the number that follows.
_PANEL = {"cpu": 1 << 30}
_PANEL_ELSEWHERE = 1 << 32
_FEWEST_ROWS = 16
# Rows of a strip. Half of its square at the diagonal is formed for nothing.
_STRIP = 256
# If each thread has rows of its own: the fewest rows of a thread, and the most threads, as each has its own
# cotangents of all keys.
_FEWEST_ROWS_APART = 64
_MOST_THREADS_APART = 4


def _tile_shape(heads: int, n: int, itemsize: int, device: torch.device) -> tuple[int, int, int]:
    """Return the numbers of heads, query rows and key columns of one tile of attention scores."""
    columns = min(n, _COLUMNS.get(device.type, _COLUMNS_ELSEWHERE))
    entries = _TILE.get(device.type, _TILE_ELSEWHERE)
    rows = max(entries // (heads * columns), _ROWS)
    panel = _PANEL.get(device.type, _PANEL_ELSEWHERE)
    rows = max(_FEWEST_ROWS, min(rows, panel // (heads * n * itemsize)))
    return max(1, min(heads, entries // (rows * columns))), rows, columns


def working_bytes(heads: int, m: int, n: int, itemsize: int, device: torch.device, *, capped: bool) -> int:
    """Return an upper bound on the bytes of all tiles that are in memory at once, for probabilities of
    ``itemsize`` bytes. With a soft cap P∘D is stored as well as P. Scores are counted as float64.
    """
    _, rows, columns = _tile_shape(heads, n, itemsize, device)
    kept, formed = (2 if capped else 1) * n * itemsize, 4 * columns * 8
    return heads * min(rows, m) * (kept + formed)


def parts_for_threads(kv_heads: int, device: torch.device) -> int:
    """Return the number of equal parts into which the query rows of one head are cut. It is the number of
    threads if there is a single key head on a CPU with at most four threads, and otherwise 1.

    The threads share one matrix product with few columns badly, because each writes memory that another reads
    next. Parts of the rows make a batch of products instead, each with its own cotangents of all keys.
    """
    threads = torch.get_num_threads() if kv_heads == 1 and device.type == "cpu" else 1
    return threads if threads <= _MOST_THREADS_APART else 1


def shifted(rows: slice, by: int) -> slice:
    """Return the range ``rows`` moved by ``by`` positions."""
    return slice(rows.start + by, rows.stop + by)


@dataclass(frozen=True)
class RowBlock:
    """A range of query rows with all keys, for a range of key heads of one sequence.

    Matrix products are batched over the heads or, if there is one head, over ``batches`` equal parts of the
    rows. In the shapes below, b is the number of heads times ``batches``, and r = group · rows / batches.
    """

    heads: slice
    rows: slice
    batches: int = 1

    @property
    def length(self) -> int:
        """The number of query rows in this block."""
        return int(self.rows.stop - self.rows.start)

    @property
    def keys_of(self) -> tuple[int, ...]:
        """A tuple that is equal for two blocks if they use the same keys."""
        return self.heads.start, self.heads.stop, self.batches

    def cut(self, heads: int) -> list[RowBlock]:
        """Divide this block into blocks of at most ``heads`` key heads each."""
        first, last = self.heads.start, self.heads.stop
        return [replace(self, heads=slice(i, min(i + heads, last))) for i in range(first, last, heads)]

    def of_rows(self, t: Float[Tensor, "heads group m width"]) -> Float[Tensor, "b r width"]:
        """Return the rows of ``t`` that belong to this block's queries."""
        t = t[self.heads, :, self.rows]
        return t.reshape(t.shape[0] * self.batches, -1, t.shape[-1])

    def of_keys(self, t: Float[Tensor, "heads n width"], keys: slice) -> Float[Tensor, "b keys width"]:
        """Return the rows of ``t`` that belong to a range of keys, for the heads of this block."""
        t = t[self.heads, keys]
        return t if self.batches == 1 else t.expand(self.batches, -1, -1)

    def grid(self, t: Float[Tensor, "b r width"], group: int) -> Float[Tensor, "heads group rows width"]:
        """Reshape matrices of :meth:`of_rows` to the axes (heads, group, rows, width)."""
        return t.view(self.heads.stop - self.heads.start, group, self.length, t.shape[-1])

    def part_of(self, t: Tensor, block: RowBlock) -> Tensor:
        """Return this block's rows of a tensor (heads, group, rows, width) of a larger block."""
        return t[:, :, shifted(self.rows, -block.rows.start)]

    def places(self, keys: slice) -> list[tuple[slice | int, slice]]:
        """Return which matrices of a batched product belong to which range of keys in the whole sequence, as
        pairs. In a plain block all belong to ``keys``.
        """
        return [(slice(self.batches), keys)]


@dataclass(frozen=True)
class DiagonalSquares(RowBlock):
    """The same range of query rows in several equal squares on the causal diagonal, one for each thread.

    ``rows`` and keys are numbered from the first row and key of their square. The first square begins at row
    and key ``origin``; each has ``side`` rows and keys.
    """

    origin: int = 0
    side: int = 0

    @property
    def keys_of(self) -> tuple[int, ...]:
        """A tuple that is equal for two sets of squares if they use the same keys."""
        return *super().keys_of, self.origin, self.side

    def of_rows(self, t: Float[Tensor, "heads group m width"]) -> Float[Tensor, "b r width"]:
        """Return the rows of ``t`` that belong to the queries of each square."""
        start, _, row, entry = t.stride()
        return self._strips(t, self.heads.start * start, self.origin, self.rows, row, entry)

    def of_keys(self, t: Float[Tensor, "heads n width"], keys: slice) -> Float[Tensor, "b keys width"]:
        """Return the rows of ``t`` that belong to a range of keys in each square."""
        start, row, entry = t.stride()
        return self._strips(t, self.heads.start * start, self.origin, keys, row, entry)

    def grid(self, t: Float[Tensor, "b r width"], group: int) -> Float[Tensor, "b 1 r width"]:
        """Insert an axis of length one for query heads, because squares have a single query head."""
        return t.unsqueeze(1)

    def part_of(self, t: Tensor, block: RowBlock) -> Tensor:
        """Return this block's rows of a tensor (1, 1, rows, width) of a larger block."""
        _, _, row, entry = t.stride()
        return self._strips(t, 0, self.origin - block.rows.start, self.rows, row, entry).unsqueeze(1)

    def places(self, keys: slice) -> list[tuple[slice | int, slice]]:
        """Return the number of each square, and where its range of ``keys`` lies in the whole sequence."""
        return [(i, shifted(keys, self.origin + i * self.side)) for i in range(self.batches)]

    def _strips(
        self, t: Tensor, start: int, origin: int, own: slice, row: int, entry: int
    ) -> Float[Tensor, "b own width"]:
        """Return the rows ``own`` of each square at the diagonal as one view of ``t`` with strides."""
        # One operation instead of four: at 2048 tokens the time to start operations matters.
        shape, strides = (self.batches, own.stop - own.start, t.shape[-1]), (self.side * row, row, entry)
        return t.as_strided(shape, strides, t.storage_offset() + start + (origin + own.start) * row)


@dataclass(frozen=True)
class Piece:
    """A block of queries and some keys that they see, with one key range for each score tile."""

    block: RowBlock
    keys: list[slice]

    @property
    def pairs(self) -> int:
        """The number of probabilities that are computed for one head of this piece."""
        squares = self.block.batches if isinstance(self.block, DiagonalSquares) else 1
        return int(squares * self.block.length * sum(keys.stop - keys.start for keys in self.keys))


@dataclass(frozen=True)
class Tiling:
    """The rules by which the scores of m queries and n keys are cut into blocks, pieces and tiles.

    Each of ``members`` sequences has ``kv_heads`` key heads, each shared by ``group`` query heads. A
    probability has ``itemsize`` bytes. ``features`` says whether the scores have a cap, a bias, sinks or
    masks of their own.
    """

    members: int
    kv_heads: int
    group: int
    m: int
    n: int
    itemsize: int
    device: torch.device
    visibility: Visibility
    features: bool

    @cached_property
    def columns(self) -> int:
        """The largest number of keys in a tile. Tiles end at its multiples, and where visible keys end."""
        return _tile_shape(1, self.n, self.itemsize, self.device)[2]

    @property
    def batches(self) -> int:
        """The number of equal parts into which the query rows of one head are cut."""
        return parts_for_threads(self.kv_heads, self.device)

    def blocks(self) -> Iterator[RowBlock]:
        """Yield blocks of query rows that cover all scores. Each block has all key heads of one sequence."""
        window = self.visibility.window
        # Keys that a block of rows sees, roughly: their tiles are kept between J and Jᵀ.
        reach = self.n if window is None else min(self.n, 2 * window + _COLUMNS["cpu"])
        _, length, _ = _tile_shape(self.kv_heads * self.group, reach, self.itemsize, self.device)
        if self._edged and self.device.type != "cpu":
            # On other devices a block is a single strip, which :meth:`strips` does not divide further.
            length = min(length, self._strip)
        for head in range(0, self.members * self.kv_heads, self.kv_heads):
            for row in range(0, self.m, length):
                yield self._block(slice(head, head + self.kv_heads), row, min(row + length, self.m))

    def heads_at_once(self, block: RowBlock) -> int:
        """Return the number of key heads for which the scores of a block fit into one tile."""
        heads, most, _ = _tile_shape(self.kv_heads * self.group, self.n, self.itemsize, self.device)
        # A block with fewer rows, at the end of the sequence or in a window, can have more heads.
        return max(1, min(self.kv_heads, heads * most // (block.length * self.group)))

    def strips(self, block: RowBlock) -> list[RowBlock]:
        """Divide a block into smaller ones, unless all of its rows see the same keys."""
        length = self._strip if self._edged else block.length
        if block.length <= length:
            return [block]
        first, last = block.rows.start, block.rows.stop
        return [self._block(block.heads, i, min(i + length, last)) for i in range(first, last, length)]

    def pieces(self, block: RowBlock) -> list[Piece]:
        """Divide a block of query rows into pieces so that few masked scores are computed. One piece has the
        keys that all rows see; each strip of rows has a further piece with the other keys that its rows see.
        """
        strips = self.strips(block)
        # Squares at the diagonal, one for each thread, preceded by the keys before the block's first row.
        if len(strips) > 1 and self._has_diagonal_squares(block):
            first = block.rows.start
            before = [Piece(block, self.tiles(slice(0, first)))] if first else []
            return before + self._diagonal_squares(block)
        seen = [self.visibility.keys(strip.rows) for strip in strips]
        shared = self.visibility.shared_keys(block.rows)
        # Only whole tiles are shared; a tile that not all rows see belongs to the strips.
        start = -(-shared.start // self.columns) * self.columns  # rounded up
        stop = shared.stop // self.columns * self.columns
        if len(strips) == 1 or start >= stop:
            return [Piece(strip, self.tiles(keys)) for strip, keys in zip(strips, seen, strict=True)]
        return [Piece(block, self.tiles(slice(start, stop)))] + [
            Piece(strip, self.tiles(slice(keys.start, start)) + self.tiles(slice(stop, keys.stop)))
            for strip, keys in zip(strips, seen, strict=True)
        ]

    def _has_diagonal_squares(self, block: RowBlock) -> bool:
        plain = self.visibility.triangle and self.group == 1 and not self.features
        side = block.length // block.batches
        # A tile of a square must lie within one tile of the sequence, where its cotangents are added.
        aligned = block.rows.start % self.columns == 0
        aligned &= side % self.columns == 0 or self.columns % side == 0
        return bool(block.batches > 1 and plain and aligned)

    def _diagonal_squares(self, block: RowBlock) -> list[Piece]:
        """Each thread's rows form a piece before the diagonal, and a square at it that is cut into strips."""
        first, side = block.rows.start, block.length // block.batches
        below = [
            Piece(self._block(block.heads, i, i + side), self.tiles(slice(first, i)))
            for i in range(first + side, block.rows.stop, side)
        ]
        strips = [slice(i, min(i + self._strip, side)) for i in range(0, side, self._strip)]
        squares = [DiagonalSquares(block.heads, rows, block.batches, first, side) for rows in strips]
        return below + [Piece(strip, self.tiles(slice(0, strip.rows.stop))) for strip in squares]

    def tiles(self, keys: slice) -> list[slice]:
        """Divide a range of keys into one range for each tile."""
        # The cuts are at multiples of ``columns``, so all blocks of rows add to the same tiles of cotangents.
        edges = range(keys.start // self.columns * self.columns, keys.stop, self.columns)
        return [slice(max(i, keys.start), min(i + self.columns, keys.stop)) for i in edges]

    @property
    def _edged(self) -> bool:
        return self.visibility.causal or self.visibility.window is not None

    @property
    def _strip(self) -> int:
        return _STRIP if self.device.type == "cpu" else max(_STRIP, self.n // 16)

    def _block(self, heads: slice, first: int, last: int) -> RowBlock:
        # Rows are cut into a part for each thread only if all parts have the same size and are not too small.
        each, left = divmod(self.group * (last - first), self.batches)
        apart = left == 0 and each >= _FEWEST_ROWS_APART
        return RowBlock(heads, slice(first, last), self.batches if apart else 1)
