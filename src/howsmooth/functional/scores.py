"""How attention scores are formed from tensors, and the softmax of one block of query rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.functional.blockwise_autograd import Grid, Part, ScoreBlock, kept_whole
from howsmooth.jacobian.softmax_tile import WholeRows

__all__ = ["PARTS", "Scores", "rows_of"]

PARTS: Mapping[str, Part] = {
    "q": "queries",
    "k": "keys",
    "v": "keys",
    "seen": "scores",
    "mask": "scores",
    "bias": "scores",
    "sinks": "scores",
    "seed": "scores",
}


@dataclass(frozen=True, eq=False)
class Scores:
    """The rule of the scores S = c tanh(s/c) + mask + bias with s = scale · q kᵀ.

    ``names`` are those of the tensors: ``q``, ``k``, ``v``, and any of ``seen`` (True where a query sees a
    key), ``mask`` and ``bias`` (numbers that are added), ``sinks`` (the score of one more key whose value is
    zero), and ``seed`` (of dropout, one int32 for each index of the leading axis). ``softcap`` is c, None
    for S = s + mask + bias. With ``seed``, ``dropout`` is the probability that an entry of P is dropped.
    """

    grid: Grid
    scale: float
    softcap: float | None
    names: tuple[str, ...]
    dropout: float = 0.0


def rows_of(scores: Scores, block: ScoreBlock, x: Mapping[str, Tensor]) -> WholeRows:
    """Return attention at one block of query rows. ``x`` holds, by name, the block's part of each tensor."""
    q, k = scores.scale * x["q"], x["k"]
    # The rows of all query heads of a group form one matrix, so that heads with one key head share a product.
    s = (q.flatten(-3, -2) @ k.squeeze(-3).mT).unflatten(-2, q.shape[-3:-1])
    tanh = None
    if scores.softcap is not None:
        tanh = torch.tanh(s / scores.softcap)
        s = scores.softcap * tanh
    added = [name for name in ("mask", "bias") if name in x]
    alive = None
    if "seen" not in x and not added and scores.grid.visible.all_see(block.rows):
        s = _ordered(s, scores.grid.visible, block)
    else:
        seen = scores.grid.visible.block(block.rows, block.keys, s.device)
        hidden = torch.zeros((), dtype=torch.bool, device=s.device) if seen is None else ~seen
        if "seen" in x:
            hidden = hidden | ~x["seen"]
        for name in added:
            low = torch.isneginf(x[name])
            hidden = hidden | low
            s = s + x[name].masked_fill(low, 0.0)
        # A row that sees no key is not masked here, since a softmax over −∞ alone is NaN; its P is set to
        # zero below. The last axis of ``hidden`` may have length 1, for all keys.
        alive = ~hidden.all(dim=-1, keepdim=True)
        s = s.masked_fill(hidden & alive, float("-inf"))
    sink = None
    if "sinks" in x:
        # The sink is a last column of the scores; its probability is split off after the softmax.
        rows = torch.broadcast_shapes(x["sinks"].shape, (*s.shape[:-1], 1))
        s = torch.cat((s.expand(*rows[:-1], s.shape[-1]), x["sinks"].expand(rows)), dim=-1)
        p = torch.softmax(s, dim=-1)
        p, sink = p[..., :-1], p[..., -1:]
    else:
        p = torch.softmax(s, dim=-1)
    p = p if alive is None else p * alive
    dropout = _dropout(scores, block, x["seed"], p.dtype) if "seed" in x else None
    return WholeRows({"q": q, "k": k, "v": x["v"]}, scores.scale, p, scores.softcap, tanh, sink, dropout)


def _dropout(scores: Scores, block: ScoreBlock, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix of dropout factors of a block: 0 for dropped entries, and 1/(1 − p) for all others.

    An entry depends on the seed, head, query and key alone. So the derivatives, whose blocks may be others,
    form the same matrix again, and nothing is kept.
    """
    grid = scores.grid
    numbers = partial(torch.arange, dtype=torch.int32, device=seed.device)
    heads = numbers(*block.heads.indices(grid.kv_heads)[:2])[:, None, None, None]
    heads = heads * grid.group + numbers(grid.group)[:, None, None]
    rows = heads * grid.m + numbers(*block.rows.indices(grid.m)[:2])[:, None]
    keys = numbers(*block.keys.indices(grid.visible.n)[:2])
    # The exclusive or of hashes of the row and of the key, hashed again.
    bits = _hashed(_hashed(_hashed(seed) + rows) ^ _hashed(~keys))
    # The bits are uniform on the int32 numbers, which begin at −2³¹.
    kept = bits >= min(round(scores.dropout * 2**32), 2**32 - 1) - 2**31
    return kept.to(dtype) * (1 / (1 - scores.dropout) if scores.dropout < 1 else 0)


def _hashed(x: Tensor) -> Tensor:
    """Scramble the bits of int32 numbers by the invertible hash function lowbias32 of C. Wellons."""
    # The products overflow, as intended. A shift of a negative number fills up with ones, which & removes.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _ordered(s: Tensor, visible: Visibility, block: ScoreBlock) -> Tensor:
    first = block.keys.start
    if visible.triangle:
        # In causal order all rows of the block see the keys before its first row.
        first = max(first, block.rows.start + visible.offset)
    seen = visible.block(block.rows, slice(first, block.keys.stop), s.device)
    if seen is None:
        return s
    before = first - block.keys.start
    if kept_whole(s):
        return torch.cat((s[..., :before], s[..., before:].masked_fill(~seen, float("-inf"))), dim=-1)
    s[..., before:].masked_fill_(~seen, float("-inf"))
    return s
