"""Softmax attention of one block of query rows: the output, its forward- and reverse-mode derivatives, and
second derivatives.

With S = c tanh(s/c) + mask + bias, s = scale · q kᵀ, D the derivative of the cap, P the row softmax, O = P v:

- tangent: dS = D∘(dq kᵀ + q dkᵀ)·scale + dmask + dbias, dP = P∘(dS − rowsum(P∘dS)), dO = dP v + P dv;
- adjoint, with A = U vᵀ, r = rowsum(P∘A) and G = P∘(A − r): the cotangent of mask and bias is G, of q
  scale · (D∘G) k, of k scale · (D∘G)ᵀ q, and of v Pᵀ U.

Dropout multiplies P where it meets the values by a constant matrix M with the entries 0 and 1/(1 − p):
O = (P∘M) v, dO = (dP∘M) v + (P∘M) dv, A = (U vᵀ)∘M, and the cotangent of v is (P∘M)ᵀ U.

The gradient of ⟨U, tangent⟩ = ⟨adjoint, dx⟩ in x is the derivative of the adjoint along dx. So these three
give every second derivative except forward over forward (documentation page "The Jacobian of attention in
closed form", section "Second derivatives").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.functional.blockwise_autograd import Block, Grid, Part, kept_whole

__all__ = ["PARTS", "Scores", "Weights", "adjoint", "output", "second", "tangent", "weights"]

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
_ADDED = ("mask", "bias")


@dataclass(frozen=True, eq=False)
class Scores:
    """The settings from which attention scores S = c tanh(s/c) + mask + bias with s = scale · q kᵀ are
    computed.

    Parameters
    ----------
    grid
        Axes of the scores, with the rules of causal order and window.
    scale
        Factor of q kᵀ.
    softcap
        c; None for S = s + mask + bias.
    names
        Names of the tensors: ``q``, ``k``, ``v``, and any of ``seen`` (True where a query sees a key),
        ``mask`` and ``bias`` (numbers that are added), ``sinks`` (the score of one more key whose value is
        zero), and ``seed`` (of dropout, one int32 for each index of the leading axis).
    dropout
        Probability that an entry of P is dropped; used with ``seed`` only.

    """

    grid: Grid
    scale: float
    softcap: float | None
    names: tuple[str, ...]
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Weights:
    """The attention probabilities P of one block of query rows, and the tensors from which they were
    computed.

    Parameters
    ----------
    x
        The block's parts of the tensors, by name.
    scale, softcap
        As in :class:`Scores`.
    p
        P; rows that see no key are zero.
    tanh
        tanh(s/c); None without a cap.
    sink
        Probability of the sink in each row, (..., rows, 1); None without sinks.
    dropout
        The matrix M by which dropout multiplies P; None without dropout.

    """

    x: Mapping[str, Tensor]
    scale: float
    p: Tensor
    softcap: float | None
    tanh: Tensor | None
    sink: Tensor | None
    dropout: Tensor | None

    def dropped(self, t: Tensor) -> Tensor:
        """Apply dropout, if attention has any, to a matrix of the shape of P."""
        return t if self.dropout is None else t * self.dropout

    @property
    def slope(self) -> Tensor | None:
        """The derivative of the soft cap at each attention score, or None if the scores have no cap."""
        return None if self.tanh is None else (1 - self.tanh) * (1 + self.tanh)


def weights(scores: Scores, block: Block, x: Mapping[str, Tensor]) -> Weights:
    """Compute the attention probabilities of one block of query rows.

    The argument ``x`` holds the block's part of each tensor, by name.
    """
    s = _products(scores.scale * x["q"], x["k"])
    tanh = None
    if scores.softcap is not None:
        tanh = torch.tanh(s / scores.softcap)
        s = scores.softcap * tanh
    added = [name for name in _ADDED if name in x]
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
    return Weights(x, scores.scale, p, scores.softcap, tanh, sink, dropout)


def _dropout(scores: Scores, block: Block, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix of dropout factors of a block: 0 for dropped entries, and 1/(1 − p) for all others,
    where p is the dropout probability.

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


def output(at: Weights) -> Tensor:
    """Return the attention outputs of one block of query rows."""
    return _over_keys(at.dropped(at.p), at.x["v"])


def _ordered(s: Tensor, visible: Visibility, block: Block) -> Tensor:
    """Set the attention scores of a block to −∞ where the causal order or a window hides the key.

    The scores ``s`` may be changed in place.
    """
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


def tangent(at: Weights, d: Mapping[str, Tensor]) -> Tensor:
    """Return the tangent of the attention outputs of one block of query rows, for tangents ``d`` of queries,
    keys, values and other arguments.

    Tangents are given by name; missing ones count as zero.
    """
    do: Tensor | None = None
    dp = _dp(at, _ds(at, d), d)
    if dp is not None:
        do = _over_keys(at.dropped(dp), at.x["v"])
    if "v" in d:
        do = _sum(do, _over_keys(at.dropped(at.p), d["v"]))
    return torch.zeros_like(output(at)) if do is None else do


def adjoint(at: Weights, u: Tensor, which: Sequence[str]) -> dict[str, Tensor]:
    """Return the cotangents of the arguments of attention that ``which`` names, for a cotangent ``u`` of the
    attention outputs of one block.
    """
    found: dict[str, Tensor] = {}
    if "v" in which:
        found["v"] = _over_rows(at.dropped(at.p), u)
    # The cotangent of the values needs P only.
    if set(which) <= {"v"}:
        return found
    a = at.dropped(_products(u, at.x["v"]))
    if at.sink is not None and "sinks" in which:
        found["sinks"] = -at.sink * (at.p * a).sum(dim=-1, keepdim=True)
    g = _of_softmax(a, at.p)
    found.update((name, g) for name in _ADDED if name in which)
    slope = at.slope
    if slope is not None:
        g = g * slope
    if "q" in which:
        found["q"] = at.scale * _over_keys(g, at.x["k"])
    if "k" in which:
        found["k"] = _over_rows(g, at.scale * at.x["q"])
    return found


def second(
    at: Weights, u: Tensor, d: Mapping[str, Tensor], du: Tensor | None, which: Sequence[str]
) -> dict[str, Tensor]:
    """Return the tangents of the results of :func:`adjoint`, for tangents of the arguments of attention and
    of the cotangent ``u`` of its outputs.

    The tensors ``at.x`` have the tangents ``d``, and ``u`` has the tangent ``du``; None stands for zero.
    """
    x, p, found = at.x, at.p, dict[str, Tensor]()
    # The tangent of s is needed before the cap too, because the derivative of the cap changes with s.
    ds_raw = _products_tangent(at, d)
    slope = at.slope
    dp = _dp(at, _ds(at, d, ds_raw), d)
    a = at.dropped(_products(u, x["v"]))
    r = (p * a).sum(dim=-1, keepdim=True)
    da: Tensor | None = None
    if du is not None:
        da = at.dropped(_products(du, x["v"]))
    if "v" in d:
        da = _sum(da, at.dropped(_products(u, d["v"])))
    # dr = rowsum(dP∘A + P∘dA) and dG = dP∘(A − r) + P∘(dA − dr), without the terms that are zero.
    dr, dg = torch.zeros_like(r), torch.zeros_like(p)
    if dp is not None:
        dr, dg = dr + (dp * a).sum(dim=-1, keepdim=True), dg + dp * (a - r)
    if da is not None:
        dr, dg = dr + (p * da).sum(dim=-1, keepdim=True), dg + p * da
    dg = dg - p * dr
    if "v" in which:
        dv = torch.zeros_like(x["v"])
        if dp is not None:
            dv = dv + _over_rows(at.dropped(dp), u)
        found["v"] = dv if du is None else dv + _over_rows(at.dropped(p), du)
    if at.sink is not None and "sinks" in which:
        found["sinks"] = -at.sink * dr
        if dp is not None:
            # P and the sink's probability sum to one in each row, so the sink's tangent is −rowsum(dP).
            found["sinks"] = found["sinks"] + dp.sum(dim=-1, keepdim=True) * r
    found.update((name, dg) for name in _ADDED if name in which)
    g = p * (a - r)
    if slope is not None and at.tanh is not None and at.softcap is not None:
        dg = dg * slope
        g = g * slope
        # dD = −(2/c) tanh(s/c) D ds, times G; g has the factor D already.
        if ds_raw is not None:
            dg = dg - (2 / at.softcap) * at.tanh * ds_raw * g
    if "q" in which:
        found["q"] = at.scale * _over_keys(dg, x["k"])
        if "k" in d:
            found["q"] = found["q"] + at.scale * _over_keys(g, d["k"])
    if "k" in which:
        found["k"] = at.scale * _over_rows(dg, x["q"])
        if "q" in d:
            found["k"] = found["k"] + at.scale * _over_rows(g, d["q"])
    return found


def _products_tangent(at: Weights, d: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tangent of the matrix scale · q kᵀ, or None if it is zero."""
    ds: Tensor | None = None
    if "q" in d:
        ds = _products(at.scale * d["q"], at.x["k"])
    return _sum(ds, _products(at.scale * at.x["q"], d["k"])) if "k" in d else ds


def _ds(at: Weights, d: Mapping[str, Tensor], raw: Tensor | None = None) -> Tensor | None:
    """Return the tangent of the attention scores of a block, or None if it is zero.

    If the tangent of s = scale · q kᵀ is known, it is given as ``raw``.
    """
    ds = _products_tangent(at, d) if raw is None else raw
    slope = at.slope
    if ds is not None and slope is not None:
        ds = ds * slope
    for name in _ADDED:
        if name in d:
            ds = _sum(ds, d[name])
    return ds


def _dp(at: Weights, ds: Tensor | None, d: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tangent of the attention probabilities P of a block, or None if it is zero."""
    dp = None if ds is None else _of_softmax(ds, at.p)
    if at.sink is not None and "sinks" in d:
        dp = _sum(dp, -at.p * (at.sink * d["sinks"]))
    return dp


def _of_softmax(ds: Tensor, p: Tensor) -> Tensor:
    """Multiply a tangent ``ds`` of the attention scores by the derivative of the row-wise softmax.

    The result is P∘(dS − rowsum(P∘dS)). This linear map of dS is self-adjoint.
    """
    # PyTorch's own kernel for the backward pass of a softmax needs equal shapes.
    if ds.shape == p.shape:
        fused: Tensor = torch._softmax_backward_data(ds, p, -1, p.dtype)
        return fused
    return p * (ds - (p * ds).sum(dim=-1, keepdim=True))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of all rows of ``a`` with all rows of ``b``, in the shape of the scores."""
    # The rows of all query heads of a group form one matrix, so that heads with one key head share a product.
    s: Tensor = (a.flatten(-3, -2) @ b.squeeze(-3).mT).unflatten(-2, a.shape[-3:-1])
    return s


def _over_keys(p: Tensor, v: Tensor) -> Tensor:
    """Return the sums Σ_j P_ij v_j over all keys j, for each query i."""
    o: Tensor = (p.flatten(-3, -2) @ v.squeeze(-3)).unflatten(-2, p.shape[-3:-1])
    return o


def _over_rows(p: Tensor, u: Tensor) -> Tensor:
    """Return the sums Σ_i P_ij u_i over all queries i of the heads that share a key head, for each key j."""
    return (p.flatten(-3, -2).mT @ u.flatten(-3, -2)).unsqueeze(-3)


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b
