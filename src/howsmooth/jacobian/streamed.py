"""The derivative of softmax attention without n × n matrices: probabilities are formed tile by tile.

The algebra is that of :mod:`howsmooth.jacobian.softmax`. What is kept of the point of linearisation has n
rows: q, k, v, the means P v and the logarithms of the softmaxes' denominators, from which a tile of P is one
matrix product and one exponential. Rows of queries do not know each other, so that JᵀJ is made block of rows
by block of rows, each tile of P once: nine matrix products a tile. Derivation: docs/theory/jacobian.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.core import ScoreFeatures, cap_slope
from howsmooth.attention.visibility import Visibility
from howsmooth.jacobian.softmax import largest_score, rounding_of, stacked

__all__ = ["SINGLE_SCORES", "StreamedDerivative", "streamed_derivative", "working_bytes"]

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
# Exponentials of scores up to these, and n times them, are in the range of their dtype.
_BOUNDED = {torch.float32: 32.0, torch.float64: 300.0}
_FEWEST_EDGED_ROWS = 256

SINGLE_SCORES = 32.0
"""Up to this max|q| max|k| the scores of float32 products are formed in float32; above, in float64."""

_ONE_PLACE = (0, 0)

Through = Callable[[int, slice, Tensor], Tensor]
"""What lies between J and Jᵀ: from tangents of the heads' outputs (heads, group, rows, value_dim), of one
member and some rows of queries, to cotangents."""


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


@dataclass(frozen=True)
class _Block:
    """Some rows of queries, counted from the first held, of some key heads of one member."""

    heads: slice
    rows: slice

    def cut(self, heads: int) -> list[_Block]:
        """Take ``heads`` key heads at a time."""
        first, last = self.heads.start, self.heads.stop
        return [_Block(slice(i, min(i + heads, last)), self.rows) for i in range(first, last, heads)]


@dataclass(frozen=True)
class _Sink:
    """One further key of each head, which does not move: probabilities, key and value, centred."""

    p: Float[Tensor, "b group m"]
    k: Float[Tensor, "b key_dim"]
    v: Float[Tensor, "b value_dim"]


@dataclass(frozen=True)
class StreamedDerivative:
    """Derivative of attention at one point, in memory of order n d.

    Axes: b = batch member times key/value head, group = query heads that share it, m query rows, n keys.
    Tangents and cotangents of queries and outputs are (b, group · m, ·).

    Parameters
    ----------
    q
        Scaled queries of the rows from ``first_row`` on.
    k, v
        Keys and values, centred as for :class:`~howsmooth.jacobian.softmax.SoftmaxDerivative`.
    lse
        log Σ_j e^{S_ij} of the scores of q and k, float64.
    mean
        P v.
    exact
        Queries and keys in float64, if scores are to be formed of them: where they are large, their rounding
        in float32 would be an error in the exponent.
    sink
        One further key of each head, if there is one.
    kappa
        max|q| max|k| of each member, float64 on the CPU.
    visibility, features
        Which keys are seen, queries numbered as in the sequence, and what is done to scores.
    kv_heads
        Key heads of a member.
    first_row
        Number in the sequence of the first query held: a shard of a sequence holds some rows only.

    """

    q: Float[Tensor, "b group m key_dim"]
    k: Float[Tensor, "b n key_dim"]
    v: Float[Tensor, "b n value_dim"]
    lse: Float[Tensor, "b group m"]
    mean: Float[Tensor, "b group m value_dim"]
    exact: tuple[Float[Tensor, "b group m key_dim"], Float[Tensor, "b n key_dim"]] | None
    sink: _Sink | None
    kappa: Float[Tensor, " batch"]
    visibility: Visibility
    features: ScoreFeatures
    kv_heads: int
    first_row: int = 0

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Relative error of the derivative's norm that rounding in the products may cause, each member.

        That of :class:`~howsmooth.jacobian.softmax.SoftmaxDerivative`, and that of scores formed in float32.
        """
        eps = torch.finfo(self.q.dtype).eps
        single = 0.0 if self.exact is not None or self.q.dtype == torch.float64 else eps
        return rounding_of(self.kappa, self.q.dtype) + single * self.kappa

    def product(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b rows value_dim"]:
        """Return dO for tangents of the scaled queries, the keys and the values."""
        dq = dq.view(self.q.shape)
        out, tiles = torch.empty_like(self.mean), _Tiles(self, keep=False)
        for whole in self._blocks():
            for block in whole.cut(self._heads_at_once(whole)):
                out[block.heads, :, block.rows] = tiles.product(block, dq, dk, dv)
        return out.flatten(1, 2)

    def adjoint(
        self, do: Float[Tensor, "b rows value_dim"]
    ) -> tuple[Float[Tensor, "b rows key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint's (scaled queries, keys, values) parts for a cotangent of the output."""
        do = do.view(self.mean.shape)
        parts, tiles = _Cotangents(self), _Tiles(self, keep=False)
        for whole in self._blocks():
            for block in whole.cut(self._heads_at_once(whole)):
                tiles.add_adjoint(block, do[block.heads, :, block.rows], parts)
        return parts.taken()

    def gram(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
        through: Through,
    ) -> tuple[Float[Tensor, "b rows key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint of ``through`` of the product, in one pass over blocks of rows.

        ``through`` is called once for each member and block of rows, with all heads.
        """
        dq = dq.view(self.q.shape)
        parts, tiles = _Cotangents(self), _Tiles(self, keep=True)
        for whole in self._blocks():
            heads = self._heads_at_once(whole)
            blocks = whole.cut(heads)
            do = torch.cat([tiles.product(block, dq, dk, dv) for block in blocks])
            do = through(whole.heads.start // self.kv_heads, whole.rows, do)
            for block, own in zip(blocks, do.split(heads), strict=True):
                tiles.add_adjoint(block, own, parts)
        return parts.taken()

    def select(self, rows: Tensor) -> StreamedDerivative:
        """Return the derivative of some rows of the axis b, whole members."""
        members = rows[:: self.kv_heads] // self.kv_heads
        return replace(
            self,
            q=self.q[rows],
            k=self.k[rows],
            v=self.v[rows],
            lse=self.lse[rows],
            mean=self.mean[rows],
            exact=None if self.exact is None else (self.exact[0][rows], self.exact[1][rows]),
            sink=None if self.sink is None else _Sink(*(t[rows] for t in vars(self.sink).values())),
            kappa=self.kappa[members.cpu()],
            features=replace(
                self.features,
                bias=_of_members(self.features.bias, members),
                seen=_of_members(self.features.seen, members),
            ),
        )

    def _blocks(self) -> Iterator[_Block]:
        """Yield blocks of rows, with all key heads of a member."""
        b, group, m, _ = self.q.shape
        n, window = self.k.shape[1], self.visibility.window
        edged = self.visibility.causal or window is not None
        # Keys of a block of rows, about: of these tiles are kept.
        reach = n if window is None else min(n, 2 * window + _COLUMNS["cpu"])
        _, length, _ = _tile_shape(self.kv_heads * group, reach, self.q.itemsize, self.q.device)
        if edged:
            # Half of what a block of rows has at the diagonal is formed for nothing.
            length = min(length, max(_FEWEST_EDGED_ROWS, n // 16))
        for head in range(0, b, self.kv_heads):
            for row in range(0, m, length):
                yield _Block(slice(head, head + self.kv_heads), slice(row, min(row + length, m)))

    def _heads_at_once(self, block: _Block) -> int:
        """Return how many key heads of a block of rows a tile takes."""
        group, n = self.q.shape[1], self.k.shape[1]
        heads, most, _ = _tile_shape(self.kv_heads * group, n, self.q.itemsize, self.q.device)
        # Where rows are fewer, at the end or in a window, heads can be more.
        rows = block.rows.stop - block.rows.start
        return int(max(1, min(self.kv_heads, heads * most // (rows * group))))

    def _rules(self, block: _Block, keys: slice) -> tuple[Tensor | None, ScoreFeatures]:
        """Return which keys are seen, None if all, and what is done to the scores of a tile."""
        rows = _shifted(block.rows, self.first_row)
        heads = torch.arange(block.heads.start, block.heads.stop, device=self.q.device) % self.kv_heads
        member = torch.full_like(heads, block.heads.start // self.kv_heads)
        features = self.features.block(member, heads, rows, keys) if self.features else self.features
        return self.visibility.block(rows, keys, self.q.device), features

    def _key_tiles(self, rows: slice) -> list[slice]:
        """Cut what the rows may see into tiles' columns."""
        keys = self.visibility.keys(_shifted(rows, self.first_row))
        _, _, columns = _tile_shape(1, self.k.shape[1], self.q.itemsize, self.q.device)
        # Whole multiples, so that neighbouring blocks of rows share their tiles' places.
        edges = range(keys.start // columns * columns, keys.stop, columns)
        return [slice(max(i, keys.start), min(i + columns, keys.stop)) for i in edges]


class _Cotangents:
    """Where adjoint parts go.

    Those of keys and values lie tile by tile, each in one piece and transposed: PyTorch adds batches of
    products to such a place at the full rate, and to a part of a larger tensor one by one.
    """

    def __init__(self, at: StreamedDerivative) -> None:
        self.b, self.n, _ = at.k.shape
        _, _, self.columns = _tile_shape(1, self.n, at.k.itemsize, at.k.device)
        self.queries = torch.empty_like(at.q)
        self.keys, self.values = (
            [t.new_zeros(self.b, t.shape[2], len(span)) for span in self._spans()] for t in (at.k, at.v)
        )

    def _spans(self) -> list[range]:
        return [range(i, min(i + self.columns, self.n)) for i in range(0, self.n, self.columns)]

    def add(
        self, block: _Block, keys: slice, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
    ) -> None:
        """Add products of a tile, to its keys and its values."""
        tile, first = divmod(keys.start, self.columns)
        for parts, a, b in zip((self.keys, self.values), left, right, strict=True):
            place = parts[tile][block.heads]
            if b.shape[2] == place.shape[2]:
                place.baddbmm_(a, b)
            else:
                place[:, :, first : first + b.shape[2]] += a @ b

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of queries, keys and values as rows; nothing stays here."""
        return self.queries.flatten(1, 2), self._rows(self.keys), self._rows(self.values)

    def _rows(self, parts: list[Tensor]) -> Tensor:
        out = parts[0].new_empty(self.b, self.n, parts[0].shape[1])
        for span in reversed(self._spans()):
            # Each tile is given back when it has been read.
            out[:, span.start : span.stop] = parts.pop().mT
        return out


class _Tiles:
    """One pass over the tiles of a derivative: scratch memory, and the tiles of the last block of rows."""

    def __init__(self, at: StreamedDerivative, *, keep: bool) -> None:
        self.at = at
        self.keep = keep
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor] | None] = {}
        self.scratch: dict[tuple[str, tuple[int, int]], Tensor] = {}

    def product(self, block: _Block, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Return dO of a block, (heads, group, rows, value_dim)."""
        at = self.at
        q, dq = (t[block.heads, :, block.rows].flatten(1, 2) for t in (at.q, dq))
        k, v, dk, dv = (t[block.heads] for t in (at.k, at.v, dk, dv))
        out = at.v.new_zeros(*q.shape[:2], v.shape[-1])
        total = q.new_zeros(*q.shape[:2], 1)
        for i, keys in enumerate(at._key_tiles(block.rows)):
            tile = self._tile(i, block, keys)
            if tile is None:
                continue
            p, slope = tile
            ds = self._empty("ds", _ONE_PLACE, p.shape, p.dtype)
            torch.bmm(dq, k[:, keys].mT, out=ds)
            ds.baddbmm_(q, dk[:, keys].mT).mul_(slope)
            total += ds.sum(dim=-1, keepdim=True)
            out.baddbmm_(ds, v[:, keys]).baddbmm_(p, dv[:, keys])
        if at.sink is not None:
            ds = (dq @ at.sink.k[block.heads, :, None]) * self._sink_probabilities(at.sink, block)
            total += ds
            out.addcmul_(ds, at.sink.v[block.heads, None])
        mean = at.mean[block.heads, :, block.rows].flatten(1, 2)
        out = out.addcmul_(total, mean, value=-1)
        return out.view(len(out), at.q.shape[1], -1, out.shape[-1])

    def add_adjoint(self, block: _Block, do: Tensor, parts: _Cotangents) -> None:
        """Write the block's cotangents of queries, and add those of keys and values."""
        at = self.at
        q, mean, do = (
            t.flatten(1, 2)
            for t in (at.q[block.heads, :, block.rows], at.mean[block.heads, :, block.rows], do)
        )
        k, v = at.k[block.heads], at.v[block.heads]
        q_t, do_t = q.mT.contiguous(), do.mT.contiguous()
        common = (do * mean).sum(dim=-1, keepdim=True)
        out = torch.zeros_like(q)
        for i, keys in enumerate(at._key_tiles(block.rows)):
            tile = self.kept[self._place(i, block)] if self.keep else self._tile(i, block, keys)
            if tile is None:
                continue
            p, slope = tile
            ds = self._empty("ds", _ONE_PLACE, p.shape, p.dtype)
            torch.bmm(do, v[:, keys].mT, out=ds)
            ds.sub_(common).mul_(slope)
            out.baddbmm_(ds, k[:, keys])
            parts.add(block, keys, (q_t, do_t), (ds, p))
        if at.sink is not None:
            ds = do @ at.sink.v[block.heads, :, None] - common
            out.addcmul_(ds * self._sink_probabilities(at.sink, block), at.sink.k[block.heads, None])
        parts.queries[block.heads, :, block.rows] = out.unflatten(1, (at.q.shape[1], -1))

    def _place(self, i: int, block: _Block) -> tuple[int, int]:
        """Return where a tile is kept: by its number, and its first head within the member."""
        return (i, block.heads.start % self.at.kv_heads) if self.keep else _ONE_PLACE

    def _tile(self, i: int, block: _Block, keys: slice) -> tuple[Tensor, Tensor] | None:
        """Return P and P∘D of a tile, (heads, group · rows, keys); None if none of its keys is seen."""
        place = self._place(i, block)
        tile = self._formed(place, block, keys)
        if self.keep:
            self.kept[place] = tile
        return tile

    def _formed(self, place: tuple[int, int], block: _Block, keys: slice) -> tuple[Tensor, Tensor] | None:
        at = self.at
        # Scores in float64 are rounded to a tile of their own; those of float32 become the tile.
        found = self._scores(_ONE_PLACE if at.exact is not None else place, block, keys)
        if found is None:
            return None
        grid, slope = found
        grid.sub_(at.lse[block.heads, :, block.rows, None].to(grid.dtype))
        p = grid.flatten(1, 2)
        if p.dtype != at.q.dtype:
            p = self._empty("p", place, p.shape, at.q.dtype).copy_(p)
        p.exp_()
        if slope is None:
            return p, p
        return p, torch.mul(p, slope, out=self._empty("slope", place, p.shape, at.q.dtype))

    def _scores(
        self, place: tuple[int, int], block: _Block, keys: slice
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return a tile's scores (heads, group, rows, keys) and the slopes of their cap, if they have one."""
        at = self.at
        seen, features = at._rules(block, keys)
        if not all(t is None or bool(t.any()) for t in (seen, features.seen)):
            return None
        queries, every_key = (at.q, at.k) if at.exact is None else at.exact
        q = queries[block.heads, :, block.rows].flatten(1, 2)
        scores = self._empty("scores", place, (*q.shape[:2], keys.stop - keys.start), q.dtype)
        torch.bmm(q, every_key[block.heads, keys].mT, out=scores)
        slope = None if features.softcap is None else cap_slope(scores, features.softcap).to(at.q.dtype)
        grid = features.applied(scores.unflatten(1, (at.q.shape[1], -1)))
        if seen is not None:
            grid.masked_fill_(~seen, float("-inf"))
        return grid, slope

    def normalise(self, block: _Block, lse: Tensor, mean: Tensor) -> None:
        """Write log Σ_j e^{S_ij} and P v of a block, in one walk over its tiles."""
        at, sinks = self.at, self.at.features.sinks
        q, v = at.q[block.heads, :, block.rows], at.v[block.heads]
        top = q.new_full((*q.shape[:-1], 1), float("-inf"), dtype=torch.float64)
        total, out = torch.zeros_like(top), top.new_zeros(*q.shape[:-1], v.shape[-1])
        # Scores whose exponentials are in range whatever they are need no reference, the largest so far.
        bounded = (
            at.features.bias is None
            and float(at.kappa.max()) <= _BOUNDED[q.dtype if at.exact is None else torch.float64]
        )

        def add(scores: Tensor, values: Tensor) -> None:
            nonlocal top
            if not bounded:
                previous, top = top, torch.maximum(top, scores.amax(dim=-1, keepdim=True))
                # No key seen as yet: any finite reference will do.
                reference = top.masked_fill(top == float("-inf"), 0.0)
                scores.sub_(reference)
                factor = (previous - reference).exp()
                total.mul_(factor)
                out.mul_(factor)
            p = scores.exp_().flatten(1, 2)
            total.add_(p.sum(dim=-1).view(total.shape))
            out.add_((p @ values.to(p.dtype)).view(out.shape))

        for keys in at._key_tiles(block.rows):
            found = self._scores(_ONE_PLACE, block, keys)
            if found is not None:
                add(found[0], v[:, keys])
        score: Tensor | None = None
        if at.sink is not None and sinks is not None:
            k = at.sink.k[block.heads]
            score = torch.einsum("hgrk,hk->hgr", q.double(), k.double()) + sinks[self._own(block), :, None]
            add(score[..., None].clone(), at.sink.v[block.heads, None])
        found_lse = (total.log() if bounded else top + total.log())[..., 0]
        if at.sink is not None and score is not None:
            at.sink.p[block.heads, :, block.rows] = (score - found_lse).to(q.dtype)
        lse[block.heads, :, block.rows] = found_lse
        mean[block.heads, :, block.rows] = (out / total).to(mean.dtype)

    def _own(self, block: _Block) -> slice:
        """Return the numbers of the heads within their member."""
        first = block.heads.start % self.at.kv_heads
        return slice(first, first + block.heads.stop - block.heads.start)

    def _sink_probabilities(self, sink: _Sink, block: _Block) -> Tensor:
        return sink.p[block.heads, :, block.rows].flatten(1, 2)[..., None]

    def _empty(self, name: str, place: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that an earlier tile of this name and place used, if it is large enough."""
        size = 1
        for length in shape:
            size *= length
        held = self.scratch.get((name, place))
        if held is None or len(held) < size:
            held = self.scratch[name, place] = torch.empty(size, dtype=dtype, device=self.at.q.device)
        part: Tensor = held[:size].view(shape)
        return part


def streamed_derivative(
    q: Float[Tensor, "batch kv_heads group m key_dim"],
    k: Float[Tensor, "batch kv_heads n key_dim"],
    v: Float[Tensor, "batch kv_heads n value_dim"],
    scale: float,
    visibility: Visibility,
    features: ScoreFeatures,
    dtype: torch.dtype,
    first_row: int = 0,
) -> StreamedDerivative:
    """Return the derivative at float64 queries, keys and values, for products in ``dtype``.

    Every query is to see a key, or to have a sink.
    """
    batch, kv_heads, group, m = q.shape[:4]
    n = k.shape[2]
    queries, keys, values = stacked(q, k, v, scale, features)
    kappa, queries = largest_score(queries, keys, batch), queries.unflatten(1, (group, m))
    sink = None
    if features.sinks is not None:
        sink = _Sink(queries.new_empty(queries.shape[:-1]), keys[:, n], values[:, n])
        keys, values = keys[:, :n], values[:, :n]
    exact = None
    if dtype != torch.float64:
        # What the products are made of is what the denominators are formed of.
        exact = (queries, keys) if float(kappa.max()) > SINGLE_SCORES else None
        queries, keys, values = (t.to(dtype) for t in (queries, keys, values))
        sink = None if sink is None else _Sink(*(t.to(dtype) for t in vars(sink).values()))
    lse = queries.new_empty(queries.shape[:-1], dtype=torch.float64)
    mean = queries.new_empty((*queries.shape[:-1], values.shape[-1]))
    at = StreamedDerivative(
        queries, keys, values, lse, mean, exact, sink, kappa, visibility, features, kv_heads, first_row
    )
    tiles = _Tiles(at, keep=False)
    for whole in at._blocks():
        for block in whole.cut(at._heads_at_once(whole)):
            tiles.normalise(block, lse, mean)
    if sink is not None:
        sink.p.exp_()
    return at


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _of_members(t: Tensor | None, members: Tensor) -> Tensor | None:
    return t if t is None or t.ndim < 5 or t.shape[0] == 1 else t[members]
