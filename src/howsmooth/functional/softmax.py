"""Softmax attention of one block of queries, its derivative, the adjoint, and the derivative of the adjoint.

With S = c tanh(s/c) + mask + bias, s = scale · q kᵀ, D the derivative of the cap, P the row softmax, O = P v:

- tangent: dS = D∘(dq kᵀ + q dkᵀ)·scale + dmask + dbias, dP = P∘(dS − rowsum(P∘dS)), dO = dP v + P dv;
- adjoint: G = P∘(A − r), A = U vᵀ, r = rowsum(P∘A); what belongs to mask and bias is G, to q scale · (D∘G) k,
  to k scale · (D∘G)ᵀ q, to v Pᵀ U.

The gradient of ⟨U, tangent⟩ = ⟨adjoint, dx⟩ in x is the derivative of the adjoint along dx. Every second
derivative but that of forward over forward is therefore made of these three (docs/theory/jacobian.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention.visibility import Visibility
from howsmooth.functional.blocks import Block, Grid, Part, kept_whole

__all__ = ["PARTS", "Scores", "Weights", "adjoint", "over_keys", "second", "tangent", "weights"]

PARTS: Mapping[str, Part] = {
    "q": "queries",
    "k": "keys",
    "v": "keys",
    "seen": "scores",
    "mask": "scores",
    "bias": "scores",
    "sinks": "scores",
}
_ADDED = ("mask", "bias")


@dataclass(frozen=True, eq=False)
class Scores:
    """What scores are made of: S = c tanh(s/c) + mask + bias with s = scale · q kᵀ, over visible keys.

    Parameters
    ----------
    grid
        The axes, and which keys order and window leave.
    scale
        Factor of the products of queries and keys.
    softcap
        c; None for S = s.
    names
        Which tensors there are: ``q``, ``k``, ``v``, and any of ``seen`` (True where a key is seen), ``mask``
        and ``bias`` (numbers that are added), and ``sinks`` (the score of one more key without value).

    """

    grid: Grid
    scale: float
    softcap: float | None
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Weights:
    """The point of linearisation in one block.

    Parameters
    ----------
    x
        The tensors by name.
    scale
        As in :class:`Scores`.
    p
        P, zero in rows that see no key.
    tanh
        tanh(s/c), with ``softcap`` c; None without a cap.
    sink
        Share of the sink in each row, (..., rows, 1); None without sinks.

    """

    x: Mapping[str, Tensor]
    scale: float
    p: Tensor
    softcap: float | None
    tanh: Tensor | None
    sink: Tensor | None

    @property
    def slope(self) -> Tensor | None:
        """D, the derivative of the cap; None for 1."""
        return None if self.tanh is None else (1 - self.tanh) * (1 + self.tanh)


def weights(scores: Scores, block: Block, x: Mapping[str, Tensor]) -> Weights:
    """Return P of a block, from its parts of the tensors."""
    s = _products(scores.scale * x["q"], x["k"])
    tanh = None
    if scores.softcap is not None:
        tanh = torch.tanh(s / scores.softcap)
        s = scores.softcap * tanh
    added = [name for name in _ADDED if name in x]
    alive = None
    if "seen" not in x and not added:
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
        # A row that sees nothing sees everything for a moment, so that no number becomes NaN. Where the
        # mask is one column, it stands for all.
        alive = ~hidden.all(dim=-1, keepdim=True)
        s = s.masked_fill(hidden & alive, float("-inf"))
    sink = None
    if "sinks" in x:
        rows = torch.broadcast_shapes(x["sinks"].shape, (*s.shape[:-1], 1))
        s = torch.cat((s.expand(*rows[:-1], s.shape[-1]), x["sinks"].expand(rows)), dim=-1)
        p = torch.softmax(s, dim=-1)
        p, sink = p[..., :-1], p[..., -1:]
    else:
        p = torch.softmax(s, dim=-1)
    return Weights(x, scores.scale, p if alive is None else p * alive, scores.softcap, tanh, sink)


def _ordered(s: Tensor, visible: Visibility, block: Block) -> Tensor:
    """Return scores with −∞ where order and window hide a key; ``s`` is changed, where it may be."""
    first = block.keys.start
    if visible.triangle:
        # Keys before the first row of the block are seen by all of it.
        first = max(first, block.rows.start)
    seen = visible.block(block.rows, slice(first, block.keys.stop), s.device)
    if seen is None:
        return s
    before = first - block.keys.start
    if kept_whole(s):
        return torch.cat((s[..., :before], s[..., before:].masked_fill(~seen, float("-inf"))), dim=-1)
    s[..., before:].masked_fill_(~seen, float("-inf"))
    return s


def tangent(at: Weights, d: Mapping[str, Tensor]) -> Tensor:
    """Return dO for the tangents ``d``, zero where none is given."""
    do: Tensor | None = None
    dp = _dp(at, _ds(at, d), d)
    if dp is not None:
        do = over_keys(dp, at.x["v"])
    if "v" in d:
        do = _sum(do, over_keys(at.p, d["v"]))
    return torch.zeros_like(over_keys(at.p, at.x["v"])) if do is None else do


def adjoint(at: Weights, u: Tensor, which: Sequence[str]) -> dict[str, Tensor]:
    """Return the cotangents of the tensors ``which`` for a cotangent U of the output."""
    found: dict[str, Tensor] = {}
    if "v" in which:
        found["v"] = _over_rows(at.p, u)
    if set(which) <= {"v"}:
        return found
    a = _products(u, at.x["v"])
    if at.sink is not None and "sinks" in which:
        found["sinks"] = -at.sink * (at.p * a).sum(dim=-1, keepdim=True)
    g = _of_softmax(a, at.p)
    found.update((name, g) for name in _ADDED if name in which)
    slope = at.slope
    if slope is not None:
        g = g * slope
    if "q" in which:
        found["q"] = at.scale * over_keys(g, at.x["k"])
    if "k" in which:
        found["k"] = _over_rows(g, at.scale * at.x["q"])
    return found


def second(
    at: Weights, u: Tensor, d: Mapping[str, Tensor], du: Tensor | None, which: Sequence[str]
) -> dict[str, Tensor]:
    """Return the tangents of :func:`adjoint` for tangents ``d`` of the tensors and ``du`` of U."""
    x, p, found = at.x, at.p, dict[str, Tensor]()
    ds_raw = _products_moved(at, d)
    slope = at.slope
    dp = _dp(at, _ds(at, d, ds_raw), d)
    a = _products(u, x["v"])
    r = (p * a).sum(dim=-1, keepdim=True)
    da: Tensor | None = None
    if du is not None:
        da = _products(du, x["v"])
    if "v" in d:
        da = _sum(da, _products(u, d["v"]))
    dr, dg = torch.zeros_like(r), torch.zeros_like(p)
    if dp is not None:
        dr, dg = dr + (dp * a).sum(dim=-1, keepdim=True), dg + dp * (a - r)
    if da is not None:
        dr, dg = dr + (p * da).sum(dim=-1, keepdim=True), dg + p * da
    dg = dg - p * dr
    if "v" in which:
        dv = torch.zeros_like(x["v"])
        if dp is not None:
            dv = dv + _over_rows(dp, u)
        found["v"] = dv if du is None else dv + _over_rows(p, du)
    if at.sink is not None and "sinks" in which:
        found["sinks"] = -at.sink * dr
        if dp is not None:
            # The shares of a row sum to one.
            found["sinks"] = found["sinks"] + dp.sum(dim=-1, keepdim=True) * r
    found.update((name, dg) for name in _ADDED if name in which)
    g = p * (a - r)
    if slope is not None and at.tanh is not None and at.softcap is not None:
        dg = dg * slope
        g = g * slope
        if ds_raw is not None:
            dg = dg - (2 / at.softcap) * at.tanh * ds_raw * g
    if "q" in which:
        found["q"] = at.scale * over_keys(dg, x["k"])
        if "k" in d:
            found["q"] = found["q"] + at.scale * over_keys(g, d["k"])
    if "k" in which:
        found["k"] = at.scale * _over_rows(dg, x["q"])
        if "q" in d:
            found["k"] = found["k"] + at.scale * _over_rows(g, d["q"])
    return found


def _products_moved(at: Weights, d: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tangent of s = scale · q kᵀ; None for zero."""
    ds: Tensor | None = None
    if "q" in d:
        ds = _products(at.scale * d["q"], at.x["k"])
    return _sum(ds, _products(at.scale * at.x["q"], d["k"])) if "k" in d else ds


def _ds(at: Weights, d: Mapping[str, Tensor], raw: Tensor | None = None) -> Tensor | None:
    """Return the tangent of S; None for zero."""
    ds = _products_moved(at, d) if raw is None else raw
    slope = at.slope
    if ds is not None and slope is not None:
        ds = ds * slope
    for name in _ADDED:
        if name in d:
            ds = _sum(ds, d[name])
    return ds


def _dp(at: Weights, ds: Tensor | None, d: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tangent of P; None for zero."""
    dp = None if ds is None else _of_softmax(ds, at.p)
    if at.sink is not None and "sinks" in d:
        dp = _sum(dp, -at.p * (at.sink * d["sinks"]))
    return dp


def _of_softmax(ds: Tensor, p: Tensor) -> Tensor:
    """P∘(dS − rowsum(P∘dS)): the derivative of the softmax, which is its own adjoint."""
    if ds.shape == p.shape:
        fused: Tensor = torch._softmax_backward_data(ds, p, -1, p.dtype)
        return fused
    return p * (ds - (p * ds).sum(dim=-1, keepdim=True))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """⟨a_i, b_j⟩ of queries (..., group, rows, d) and keys (..., 1, keys, d), as scores."""
    s: Tensor = (a.flatten(-3, -2) @ b.squeeze(-3).mT).unflatten(-2, a.shape[-3:-1])
    return s


def over_keys(p: Tensor, v: Tensor) -> Tensor:
    """Σ_j P_ij v_j: queries, of scores and keys."""
    o: Tensor = (p.flatten(-3, -2) @ v.squeeze(-3)).unflatten(-2, p.shape[-3:-1])
    return o


def _over_rows(p: Tensor, u: Tensor) -> Tensor:
    """Σ_i P_ij u_i over the rows of all queries of a group: keys, of scores and queries."""
    return (p.flatten(-3, -2).mT @ u.flatten(-3, -2)).unsqueeze(-3)


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b
