"""The derivative of softmax attention without n × n matrices in memory, where each product recomputes the
probabilities tile by tile.

The tensors that are kept have n rows: q, k, v, the outputs P v, and the logarithm of the denominator of each
row's softmax. From these a tile of P takes one matrix product and one exponential. Rows of queries do not
depend on each other, so JᵀJ is computed one block of rows after the other, and each tile of P is formed once:
nine matrix products a tile. Derivation: documentation page "The Jacobian of attention in closed form".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.attention.scaled_dot_product import ScoreFeatures, cap_slope
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.key_value_moments import Deviations, moment_columns
from howsmooth.jacobian.scratch_memory import Scratch
from howsmooth.jacobian.softmax import Sink, largest_score, outputs_and_sink, rounding_of
from howsmooth.jacobian.softmax_tile import OfKeys, OfOutputs, OfQueries, OfValues, Tile
from howsmooth.jacobian.tiling import Piece, RowBlock, Tiling

__all__ = ["SINGLE_SCORES", "StreamedDerivative", "streamed_derivative"]

# If no score is larger, a sum of n exponentials of scores stays in the range of the dtype.
_BOUNDED = {torch.float32: 32.0, torch.float64: 300.0}
# Probabilities are formed as powers of two: on a CPU they take half the time of exponentials, and a tenth if
# they underflow.
_LOG2_E = math.log2(math.e)

SINGLE_SCORES = 32.0
"""Up to this max|q| max|k| the scores of float32 products are formed in float32; above, in float64."""

Through = Callable[[int, slice, Tensor], Tensor]
"""A function that turns tangents of the heads' outputs into cotangents, between J and Jᵀ.

Its arguments are the number of the batch member, the rows of queries, and the tangents of all heads in these
rows (heads, group, rows, value_dim); it returns a tensor of that shape.
"""


@dataclass(frozen=True)
class StreamedDerivative:
    """The derivative of softmax attention that recomputes the probabilities in each product.

    Axes: b = batch member times key/value head, group = query heads that share the key head, m = query rows,
    n = keys. Tangents and cotangents have the queries of all heads of a group on one axis.

    The fields ``q``, ``k``, ``v``, ``mean``, ``sink`` and ``moments`` are those of
    :class:`~howsmooth.jacobian.softmax.SoftmaxDerivative`.

    ``lse`` is log Σ_j e^{S_ij}, the logarithm of the denominator of each row's softmax, float64, and
    ``kappa`` is max|q| max|k| of each member, float64 on the CPU. Scores are formed from ``exact``, the
    queries and keys in float64, if that is given: if they are large, their rounding in float32 would be an
    error in the exponent. If there is a sink, these keys are unshifted. ``visibility`` and ``features`` say
    which keys a query sees, and have cap, biases, masks and sinks of the scores. ``kv_heads`` counts the key
    heads of a member.
    """

    q: Float[Tensor, "b group m key_dim"]
    k: Float[Tensor, "b n key_dim"]
    v: Float[Tensor, "b n value_dim"]
    lse: Float[Tensor, "b group m"]
    mean: Float[Tensor, "b group m value_dim"]
    exact: tuple[Float[Tensor, "b group m key_dim"], Float[Tensor, "b n key_dim"]] | None
    sink: Sink | None
    kappa: Float[Tensor, " batch"]
    visibility: Visibility
    features: ScoreFeatures
    kv_heads: int
    moments: Deviations | None = None

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Estimate, for each sequence, the relative rounding error of the norm of the attention Jacobian. If
        scores are formed in float32, their bound κ times the machine epsilon is added to it.
        """
        eps = torch.finfo(self.q.dtype).eps
        single = 0.0 if self.exact is not None or self.q.dtype == torch.float64 else eps
        return rounding_of(self.kappa, self.q.dtype) + single * self.kappa

    def product(self, dq: OfQueries, dk: OfKeys, dv: OfValues) -> OfOutputs:
        """Return the tangent of the outputs, given tangents of the scaled queries, keys and values."""
        dq = dq.view(self.q.shape)
        out, tiles = torch.empty_like(self.mean), _Tiles(self, keep=False)
        for block in tiles.blocks():
            out[block.heads, :, block.rows] = tiles.product(block, dq, dk, dv)
        tiles.scratch.leave()
        return out.flatten(1, 2)

    def adjoint(self, do: OfOutputs) -> tuple[OfQueries, OfKeys, OfValues]:
        """Return cotangents of the scaled queries, keys and values, given a cotangent of the outputs."""
        do = do.view(self.mean.shape)
        parts, tiles = _Cotangents(self), _Tiles(self, keep=False)
        for block in tiles.blocks():
            tiles.add_adjoint(block, do[block.heads, :, block.rows], parts)
        tiles.scratch.leave()
        return parts.taken()

    def gram(
        self, dq: OfQueries, dk: OfKeys, dv: OfValues, through: Through
    ) -> tuple[OfQueries, OfKeys, OfValues]:
        """Return Jᵀ(T(J(dq, dk, dv))) for the derivative J of softmax attention, in one pass over blocks of
        query rows. The function T, ``through``, must map each row by itself.
        """
        dq = dq.view(self.q.shape)
        parts, tiles = _Cotangents(self), _Tiles(self, keep=True)
        for whole in tiles.tiling.blocks():
            heads = tiles.tiling.heads_at_once(whole)
            blocks = whole.cut(heads)
            first, *others = (tiles.product(block, dq, dk, dv) for block in blocks)
            do = torch.cat((first, *others)) if others else first
            do = through(whole.heads.start // self.kv_heads, whole.rows, do)
            # ``through`` needs all heads of a row, so the adjoint begins when all heads have their products.
            for block, own in zip(blocks, do.split(heads), strict=True):
                tiles.add_adjoint(block, own, parts)
        tiles.scratch.leave()
        return parts.taken()

    def select(self, rows: Tensor) -> StreamedDerivative:
        """Return the derivative at chosen sequences. ``rows`` lists the indices of their key heads."""
        members = rows[:: self.kv_heads] // self.kv_heads
        features = self.features
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in ("q", "k", "v", "lse", "mean")},
            exact=None if self.exact is None else (self.exact[0][rows], self.exact[1][rows]),
            sink=None if self.sink is None else self.sink.each(lambda t: t[rows]),
            moments=None,
            kappa=self.kappa[members.cpu()],
            features=replace(
                features, bias=_of_members(features.bias, members), seen=_of_members(features.seen, members)
            ),
        )

    @property
    def tiling(self) -> Tiling:
        """How the scores are cut into tiles, given the sizes of this call."""
        b, group, m, _ = self.q.shape
        members, n = b // self.kv_heads, self.k.shape[1]
        scores = self.visibility, bool(self.features)
        return Tiling(members, self.kv_heads, group, m, n, self.q.itemsize, self.q.device, *scores)


@dataclass(frozen=True)
class _Scored:
    """The queries and keys of a block of rows; ``less`` is log₂ of each row's softmax denominator."""

    q: Float[Tensor, "b r key_dim"]
    k: Float[Tensor, "heads n key_dim"]
    less: Float[Tensor, "b r 1"] | None


class _Cotangents:
    """Cotangents of queries, keys and values, to which each tile adds its part.

    The cotangents of keys and values are stored transposed, in one contiguous tensor for each tile of keys:
    ``baddbmm_`` adds to a contiguous tensor at the full rate, and to a part of a larger tensor one product
    after the other.
    """

    def __init__(self, at: StreamedDerivative) -> None:
        self.queries = torch.empty_like(at.q)
        tiling = at.tiling
        self.spans, self.columns = tiling.tiles(slice(0, tiling.n)), tiling.columns
        lengths = [span.stop - span.start for span in self.spans]
        self.keys, self.values = (
            [t.new_zeros(len(t), tiling.batches, t.shape[2], length) for length in lengths]
            for t in (at.k, at.v)
        )

    def add(
        self, block: RowBlock, keys: slice, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
    ) -> None:
        for parts, a, b in zip((self.keys, self.values), left, right, strict=True):
            product = None
            for batches, own in block.places(keys):
                tile, first = divmod(own.start, self.columns)
                # With more than one batch the block is of one head, and each batch has sums of its own.
                heads = (block.heads, 0) if block.batches == 1 else (block.heads.start, batches)
                place = parts[tile][heads]
                if place.shape == (len(a), a.shape[1], b.shape[2]):
                    place.baddbmm_(a, b)
                    continue
                # A part of a tile, at the edge of the visible keys: the product is formed apart.
                product = torch.bmm(a, b) if product is None else product
                own_product = product[batches] if isinstance(batches, int) else product
                place[..., first : first + b.shape[2]].add_(own_product)

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries.flatten(1, 2), self._rows(self.keys), self._rows(self.values)

    def _rows(self, parts: list[Tensor]) -> Tensor:
        b, _, width, _ = parts[0].shape
        out = parts[0].new_empty(b, self.spans[-1].stop, width)
        for span in reversed(self.spans):
            # Popped, so that the memory of each tile is freed when it has been read.
            part = parts.pop()
            out[:, span.start : span.stop] = (part[:, 0] if part.shape[1] == 1 else part.sum(dim=1)).mT
        return out


class _Tiles:
    """One pass over all tiles. With ``keep``, adjoints must get the same blocks in the same order."""

    def __init__(self, at: StreamedDerivative, *, keep: bool) -> None:
        self.at = at
        self.tiling = at.tiling
        self.keep = keep
        self.kept: deque[Tile | None] = deque()
        self.scratch = Scratch()
        self.views: dict[tuple[int, ...], Tensor] = {}

    def blocks(self) -> Iterator[RowBlock]:
        """Yield blocks that cover all query rows and heads, each with as many heads as fit into one tile."""
        for block in self.tiling.blocks():
            yield from block.cut(self.tiling.heads_at_once(block))

    def product(
        self, block: RowBlock, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> Float[Tensor, "heads group rows value_dim"]:
        out = self._of_pieces(block, lambda piece: self._image(piece, dq, dk, dv))
        if self.at.sink is not None:
            own = self.at.sink.of_rows(block.heads, block.rows)
            own.add_tangent(out, dq[block.heads, :, block.rows])
        return out

    def add_adjoint(
        self, block: RowBlock, do: Float[Tensor, "heads group rows value_dim"], parts: _Cotangents
    ) -> None:
        """Write the cotangents of a block's queries to ``parts``; add those of keys and values to it."""
        out = self._of_pieces(
            block, lambda piece: self._cotangent(piece, piece.block.part_of(do, block), parts)
        )
        if self.at.sink is not None:
            self.at.sink.of_rows(block.heads, block.rows).add_adjoint(out, do)
        parts.queries[block.heads, :, block.rows] = out

    def _of_pieces(
        self, block: RowBlock, of_piece: Callable[[Piece], Float[Tensor, "b r width"]]
    ) -> Float[Tensor, "heads group rows width"]:
        group, out = self.at.q.shape[1], None
        for piece in self.tiling.pieces(block):
            part = piece.block.grid(of_piece(piece), group)
            if out is None:
                if piece.block is block:
                    out = part
                    continue
                out = part.new_zeros(block.heads.stop - block.heads.start, group, block.length, part.shape[3])
            piece.block.part_of(out, block).add_(part)
        assert out is not None  # blocks have rows
        return out

    def _image(self, piece: Piece, dq: Tensor, dk: Tensor, dv: Tensor) -> Float[Tensor, "b r value_dim"]:
        at, block = self.at, piece.block
        q, dq, mean = (block.of_rows(t) for t in (at.q, dq, at.mean))
        scored = self._scored(block)
        sums = torch.zeros_like(mean), q.new_zeros(*q.shape[:2], 1)
        for keys in piece.keys:
            # Tiles that are not kept overwrite each other.
            tile = self._tile(len(self.kept), block, keys, q, scored)
            if self.keep:
                self.kept.append(tile)
            if tile is not None:
                dk_here, dv_here = self._keys(dk, block, keys), self._keys(dv, block, keys)
                tile.tangent(dq, dk_here, dv_here, sums, self._empty("ds", tile.p.shape, tile.p.dtype))
        out, total = sums
        # Σ_j T_ij is summed over the tiles; O_i Σ_j T_ij is subtracted once at the end.
        return out.addcmul_(total, mean, value=-1)

    def _cotangent(
        self, piece: Piece, do: Float[Tensor, "heads group rows value_dim"], parts: _Cotangents
    ) -> Float[Tensor, "b r key_dim"]:
        """Add to the cotangents of keys and values in ``parts``, and return that of the piece's queries."""
        at, block = self.at, piece.block
        q, mean = block.of_rows(at.q), block.of_rows(at.mean)
        scored = None if self.keep else self._scored(block)
        do = do.reshape(mean.shape)
        left = (q.mT, do.mT)
        # ⟨do_i, O_i⟩ = Σ_j P_ij ⟨do_i, v_j⟩ is known before the first tile.
        common = (do * mean).sum(dim=-1, keepdim=True)
        out = torch.zeros_like(q)
        for keys in piece.keys:
            tile = self._tile(0, block, keys, q, scored) if scored else self.kept.popleft()
            if tile is not None:
                ds, _ = tile.scores_adjoint(do, common, self._empty("ds", tile.p.shape, tile.p.dtype))
                out.baddbmm_(ds, tile.k)
                parts.add(block, keys, left, (ds, tile.p))
        return out

    def _keys(self, t: Float[Tensor, "heads n width"], block: RowBlock, keys: slice) -> Tensor:
        """Return the rows of ``t`` that belong to a range of keys, as a cached view."""
        name = (id(t), keys.start, keys.stop, *block.keys_of)
        view = self.views.get(name)
        if view is None:
            view = self.views[name] = block.of_keys(t, keys)
        return view

    def _tile(self, place: int, block: RowBlock, keys: slice, q: Tensor, scored: _Scored) -> Tile | None:
        """Form the tile of P for a range of keys in the memory ``place``; return None if a mask hides it."""
        at = self.at
        # Scores in the dtype of the products are turned into P in place, so they need the memory of the tile.
        # Float64 scores of float32 products are temporary, and share one memory.
        found = self._scores(place if scored.q.dtype == at.q.dtype else 0, block, keys, scored)
        if found is None:
            return None
        p, slope = found
        if p.dtype != at.q.dtype:
            p = self._empty(("p", place), p.shape, at.q.dtype).copy_(p)
        p.exp2_()
        at.visibility.clear(block.grid(p, at.q.shape[1]), block.rows, keys)
        if slope is None:
            slope = p
        else:
            slope = torch.mul(p, slope, out=self._empty(("slope", place), p.shape, at.q.dtype))
        return Tile(q, self._keys(at.k, block, keys), self._keys(at.v, block, keys), p, slope, slope)

    def _scored(self, block: RowBlock, *, normalised: bool = True) -> _Scored:
        at = self.at
        q, k = (at.q, at.k) if at.exact is None else at.exact
        less = (block.of_rows(at.lse[..., None]) * _LOG2_E).to(q.dtype) if normalised else None
        return _Scored(block.of_rows(q), k, less)

    def _scores(
        self, place: int, block: RowBlock, keys: slice, scored: _Scored
    ) -> tuple[Float[Tensor, "b r keys"], Tensor | None] | None:
        """Return scores · log₂ e less ``scored.less``, and the cap's derivative; None if all is hidden."""
        at = self.at
        features, mask = at.features.block(block.heads, at.kv_heads, block.rows, keys), at.visibility.mask
        shown = None if mask is None else mask[block.rows, keys]
        if not all(t is None or bool(t.any()) for t in (shown, features.seen)):
            return None
        q, k, less = scored.q, self._keys(scored.k, block, keys).mT, scored.less
        scores = self._empty(("scores", place), (*q.shape[:2], k.shape[2]), q.dtype)
        if not features:
            # One operation multiplies by log₂ e and subtracts the logarithms.
            if less is not None:
                scores.copy_(less)
            return scores.baddbmm_(q, k, beta=0 if less is None else -1, alpha=_LOG2_E), None
        torch.bmm(q, k, out=scores)
        slope = None if features.softcap is None else cap_slope(scores, features.softcap).to(at.q.dtype)
        grid = features.applied(block.grid(scores, at.q.shape[1])).mul_(_LOG2_E)
        scores = grid.reshape(scores.shape)
        return scores if less is None else scores.sub_(less), slope

    def normalise(
        self,
        block: RowBlock,
        table: Float[Tensor, "b n columns"],
        lse: Float[Tensor, "b group m"],
        averages: Float[Tensor, "b group m columns"],
        sink_p: Float[Tensor, "b group m"],
    ) -> None:
        """Compute the softmax of a block of query rows. Write the logs of its denominators Σ_j e^{S_ij} to
        ``lse``, the averages Σ_j P_ij t_j of the rows of ``table`` to ``averages``, and the sinks'
        probabilities to ``sink_p``.

        Running sums are scaled when a row finds a larger score.
        """
        at, sinks = self.at, self.at.features.sinks
        q, v = at.q[block.heads, :, block.rows], table[block.heads]
        top = q.new_full((*q.shape[:-1], 1), float("-inf"), dtype=torch.float64)
        total, out = torch.zeros_like(top), top.new_zeros(*q.shape[:-1], v.shape[-1])
        # If the exponentials of all possible scores are in range, no row has to track its largest score.
        bounded = (
            at.features.bias is None
            and sinks is None
            and float(at.kappa.max()) <= _BOUNDED[q.dtype if at.exact is None else torch.float64]
        )

        def add(scores: Tensor, values: Tensor) -> None:
            nonlocal top
            if not bounded:
                previous, top = top, torch.maximum(top, scores.amax(dim=-1, keepdim=True))
                # A row that has seen no key yet may have any finite reference.
                reference = top.masked_fill(top == float("-inf"), 0.0)
                scores.sub_(reference)
                factor = (previous - reference).exp2()
                total.mul_(factor)
                out.mul_(factor)
            p = scores.exp2_().flatten(1, 2)
            total.add_(p.sum(dim=-1).view(total.shape))
            out.add_((p @ values.to(p.dtype)).view(out.shape))

        scored = self._scored(block, normalised=False)
        for keys in self.tiling.tiles(at.visibility.keys(block.rows)):
            found = self._scores(0, block, keys, scored)
            if found is None:
                continue
            grid = block.grid(found[0], at.q.shape[1])
            seen = at.visibility.block(block.rows, keys, q.device)
            add(grid if seen is None else grid.masked_fill_(~seen, float("-inf")), v[:, keys])
        score: Tensor | None = None
        if sinks is not None:
            first = block.heads.start % at.kv_heads
            score = sinks[first : first + len(q), :, None].double().expand(total.shape[:-1])
            add(_LOG2_E * score[..., None], v.new_zeros(len(v), 1, v.shape[-1]))
        found_lse = ((total.log2() if bounded else top + total.log2()) / _LOG2_E)[..., 0]
        if score is not None:
            sink_p[block.heads, :, block.rows] = (score - found_lse).exp()
        lse[block.heads, :, block.rows] = found_lse
        averages[block.heads, :, block.rows] = out / total

    def _empty(self, name: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.scratch.empty(name, shape, dtype, self.at.q.device)


def streamed_derivative(operands: Operands, visibility: Visibility, dtype: torch.dtype) -> StreamedDerivative:
    """Return attention's derivative at float64 queries, keys and values; products in ``dtype`` recompute P.

    Every query must see a key or have a sink.
    """
    batch, kv_heads = operands.q.shape[:2]
    width = operands.v.shape[-1]
    features = operands.features
    queries, keys, score_keys, values = (
        t.flatten(0, 1) for t in (operands.q, operands.k, operands.score_keys, operands.v)
    )
    # Columns whose averages under P are needed: the values, ones for Σ_j P_ij if there is a sink, and in
    # float64 the columns for the proof of the rounding error.
    columns = [values]
    if features.sinks is not None:
        columns.append(values.new_ones(*values.shape[:2], 1))
    if dtype == torch.float64:
        columns.append(moment_columns(operands))
    table = torch.cat(columns, dim=-1)
    kappa = largest_score(queries, score_keys, batch)
    exact: tuple[Tensor, Tensor] | None = (queries, score_keys)
    rounded = (queries.to(dtype), keys.to(dtype), values.to(dtype))
    # With a sink, scores are always formed from float64 keys, because the keys of the products are shifted.
    if features.sinks is None and (dtype == torch.float64 or float(kappa.max()) <= SINGLE_SCORES):
        exact = None
        # The denominators are summed in the dtype of the products.
        table = table.to(dtype)
    lse, sink_p = (queries.new_zeros(queries.shape[:-1]) for _ in range(2))
    averages = queries.new_empty((*queries.shape[:-1], table.shape[-1]))
    at = StreamedDerivative(
        *rounded, lse, averages[..., :width], exact, None, kappa, visibility, features, kv_heads
    )
    # ``lse`` and ``averages``, which ``at`` holds views of, are written here block by block.
    tiles = _Tiles(at, keep=False)
    for block in tiles.blocks():
        for strip in tiles.tiling.strips(block):
            tiles.normalise(strip, table, lse, averages, sink_p)
    tiles.scratch.leave()
    total = torch.ones_like(lse) if features.sinks is None else averages[..., width]
    mean, sink = outputs_and_sink(operands, averages[..., :width], total, sink_p, dtype)
    moments = None
    if dtype == torch.float64:
        of_moments = averages[..., -columns[-1].shape[-1] :]
        moments = Deviations.of(operands, *(t.flatten(1, 2) for t in (of_moments, mean, total, sink_p)))
    return replace(at, mean=mean.to(dtype).contiguous(), sink=sink, moments=moments)


def _of_members(t: Tensor | None, members: Tensor) -> Tensor | None:
    return t if t is None or t.ndim < 5 or t.shape[0] == 1 else t[members]
