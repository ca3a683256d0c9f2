"""Triton kernels for attention and its first and second derivatives that never write attention scores to
global memory.

With s = scale · q kᵀ, S = c tanh(s/c) + bias, D = 1 − tanh², P the row softmax, O = P v, and for each row
μ = rowsum(P∘dS) and r = ⟨U, O⟩, as in :mod:`howsmooth.jacobian.softmax_tile`, the kernels compute:

- ``value``: O and the logarithm of the softmax denominator, over tiles of keys, with a running maximum;
- ``tangent``: dO = (P∘(dS − μ)) v + P dv, and μ;
- ``adjoint_queries``, ``adjoint_keys``: with G = P∘(U vᵀ − r), scale · (D∘G) k, scale · (D∘G)ᵀ q and Pᵀ U;
- ``second_queries``, ``second_keys``: the tangents of these, with dP = P∘(dS − μ), dr = ⟨dU, O⟩ + ⟨U, dO⟩
  and dG = dP∘(U vᵀ − r) + P∘(dU vᵀ + U dvᵀ − dr).

Products are summed in float32. Operands in half precision are multiplied in that precision, and P, G and
their tangents are rounded to it first. ``PRECISION`` says how float32 operands are multiplied.

The grid has one axis: all blocks of rows (or of keys) of the first head, then of the next. Queries are
(head, row, entry), keys and values (key head, row, entry), with entries padded to ``WIDTH`` on the chip. Row
vectors and results are float32. Logarithms are to base 2. ``seen`` and ``bias`` have strides for members,
heads, rows and keys.
"""

# Triton compiles its functions without annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["adjoint_keys", "adjoint_queries", "second_keys", "second_queries", "tangent", "value"]

_LOG2E = tl.constexpr(1.4426950408889634)


def _jit(function: Callable[..., object]) -> Any:
    """Compile a function with Triton, after removing the type checks that wrap it in the tests."""
    return triton.jit(inspect.unwrap(function))


@_jit
def _load(p, start, end, LENGTH: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile of LENGTH rows of a matrix, starting at row ``start``, padded with zeros.

    Rows from ``end`` on and columns from ENTRIES on are zero.
    """
    i = (start + tl.arange(0, LENGTH))[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    inside = i < end
    if ENTRIES != WIDTH:
        inside = inside & (j < ENTRIES)
    return tl.load(p + i.to(tl.int64) * ENTRIES + j, mask=inside, other=0.0)


@_jit
def _store(p, tile, start, end, LENGTH: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """Write a tile to LENGTH rows of a matrix, starting at row ``start``."""
    i = (start + tl.arange(0, LENGTH))[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    tl.store(p + i.to(tl.int64) * ENTRIES + j, tile, mask=(i < end) & (j < ENTRIES))


@_jit
def _plus_dot(acc, a, b, PRECISION: tl.constexpr):
    if a.dtype == tl.float32:
        acc = tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@_jit
def _tanh(x):
    """Return tanh(x) to full float32 accuracy, also for small x."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * _LOG2E))
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    return tl.where(size < 0.25, x * series, tl.where(x < 0.0, -t, t))


@_jit
def _scores(
    products, first_row, first_key, seen, seen_m, seen_n, bias, bias_m, bias_n, scale, cap, m, n, window,
    BY_KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr,
    BIAS: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the attention scores of one tile, and the derivative of the soft cap that is applied to them.

    The scores are in units of log 2, and −∞ where the query does not see the key. The other results are the
    derivative D = 1 − tanh²(s/c) of the cap and tanh(s/c).
    """
    rows = first_row + tl.arange(0, ROWS)
    keys = first_key + tl.arange(0, KEYS)
    if BY_KEYS:
        rows, keys = rows[None, :], keys[:, None]
    else:
        rows, keys = rows[:, None], keys[None, :]
    tanh, slope = products, products
    if CAPPED:
        tanh = _tanh(products * (scale / cap))
        slope = (1.0 - tanh) * (1.0 + tanh)
        s = tanh * (cap * _LOG2E)
    else:
        s = products * (scale * _LOG2E)
    if BIAS:
        place = bias + rows.to(tl.int64) * bias_m + keys.to(tl.int64) * bias_n
        s += tl.load(place, mask=(rows < m) & (keys < n), other=0.0).to(tl.float32) * _LOG2E
    if SEEN:
        place = seen + rows.to(tl.int64) * seen_m + keys.to(tl.int64) * seen_n
        s = tl.where(tl.load(place, mask=(rows < m) & (keys < n), other=0) != 0, s, float("-inf"))
    # Order, window and the end of the keys matter only for tiles at an edge; others skip the masks.
    edge = first_key + KEYS > n
    if CAUSAL:
        edge = edge | (first_key + KEYS - 1 > first_row)
    if WINDOWED:
        edge = edge | (window > 0)
    if edge:
        visible = keys < n
        if CAUSAL:
            visible = visible & (keys <= rows)
        if WINDOWED:
            visible = visible & (rows - keys < window) & (keys - rows < window)
        s = tl.where(visible, s, float("-inf"))
    return s, slope, tanh


@_jit
def _start(length, LENGTH: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return the head, and the first row (or key) of the block, that this Triton program computes.

    With LAST_FIRST, blocks are taken from the last on, because in causal order the last rows take longest.
    """
    blocks = tl.cdiv(length, LENGTH)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return head.to(tl.int64), block * LENGTH


@_jit
def _keys_of(
    start, m, n, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the range of keys that at least one row of a block of query rows sees.

    The range begins at a multiple of KEYS.
    """
    low, high = 0, n
    last = min(start + ROWS, m)
    if CAUSAL:
        high = min(high, last)
    if WINDOWED:
        low = max(0, start - window + 1) // KEYS * KEYS
        high = min(high, last + window - 1)
    return low, high


@_jit
def _rows_of(
    start, m, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the range of query rows that see at least one key of a block of keys.

    The range begins at a multiple of ROWS.
    """
    low, high = 0, m
    if CAUSAL:
        low = start // ROWS * ROWS
    if WINDOWED:
        high = min(high, start + KEYS + window - 1)
        if not CAUSAL:
            low = max(0, start - window + 1) // ROWS * ROWS
    return low, high


@_jit
def value(
    q, k, v, lse, out,
    seen, seen_z, seen_h, seen_m, seen_n, bias, bias_z, bias_h, bias_m, bias_n, sinks,
    scale, cap, m, n, heads, group, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the attention outputs and the logarithms of the softmax denominators for one block of query
    rows, and write them to memory.
    """
    head, start = _start(m, ROWS, True)
    k += head // group * n * KEY
    v += head // group * n * VALUE
    seen += head // heads * seen_z + head % heads * seen_h
    bias += head // heads * bias_z + head % heads * bias_h
    qs = _load(q + head * m * KEY, start, m, ROWS, KEY, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        top = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2E
        total += 1.0
    low, high = _keys_of(start, m, n, window, CAUSAL, WINDOWED, ROWS, KEYS)
    for j in range(low, high, KEYS):
        s = tl.dot(qs, tl.trans(_load(k, j, n, KEYS, KEY, WIDTH)), input_precision=PRECISION)
        s, _, _ = _scores(
            s, start, j, seen, seen_m, seen_n, bias, bias_m, bias_n, scale, cap, m, n, window,
            False, CAUSAL, WINDOWED, SEEN, BIAS, CAPPED, ROWS, KEYS,
        )  # fmt: skip
        # The largest score so far: sums of earlier tiles are scaled when a larger one comes.
        higher = tl.maximum(top, tl.max(s, 1))
        # A row that has seen no key yet has no maximum: with level 0 all its exponentials are zero.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk = tl.exp2(top - level)
        p = tl.exp2(s - level[:, None])
        total = total * shrunk + tl.sum(p, 1)
        vs = _load(v, j, n, KEYS, VALUE, WIDTH)
        acc = _plus_dot(acc * shrunk[:, None], p.to(vs.dtype), vs, PRECISION)
        top = higher
    # A row that sees no key has P = 0 for any finite logarithm; 0 is written.
    alive = total > 0.0
    acc = acc / tl.where(alive, total, 1.0)[:, None]
    _store(out + head * m * VALUE, acc, start, m, ROWS, VALUE, WIDTH)
    rows = start + tl.arange(0, ROWS)
    logarithm = tl.where(alive, top + tl.log2(tl.where(alive, total, 1.0)), 0.0)
    tl.store(lse + head * m + rows, logarithm, mask=rows < m)


@_jit
def tangent(
    q, dq, k, dk, v, dv, lse, mean, dsinks, mu, out,
    seen, seen_z, seen_h, seen_m, seen_n, bias, bias_z, bias_h, bias_m, bias_n, sinks,
    scale, cap, m, n, heads, group, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the tangent of the attention outputs for one block of query rows, and write it to memory.

    The mean tangent of the scores in each row, μ = rowsum(P∘dS), is written too.
    """
    head, start = _start(m, ROWS, True)
    k += head // group * n * KEY
    dk += head // group * n * KEY
    v += head // group * n * VALUE
    dv += head // group * n * VALUE
    seen += head // heads * seen_z + head % heads * seen_h
    bias += head // heads * bias_z + head % heads * bias_h
    rows = start + tl.arange(0, ROWS)
    qs = _load(q + head * m * KEY, start, m, ROWS, KEY, WIDTH)
    dqs = _load(dq + head * m * KEY, start, m, ROWS, KEY, WIDTH)
    row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)
    low, high = _keys_of(start, m, n, window, CAUSAL, WINDOWED, ROWS, KEYS)
    # A constant in each row of dS cancels in dS − μ. So the mean over the first tile of keys, which is close
    # to the mean over all keys, is subtracted from dS before it is rounded.
    ks = tl.trans(_load(k, low, n, KEYS, KEY, WIDTH))
    raw = tl.dot(dqs, ks, input_precision=PRECISION)
    ks = tl.trans(_load(dk, low, n, KEYS, KEY, WIDTH))
    raw = tl.dot(qs, ks, raw, input_precision=PRECISION)
    shift = tl.sum(raw, 1) * (scale / KEYS)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for j in range(low, high, KEYS):
        ks = tl.trans(_load(k, j, n, KEYS, KEY, WIDTH))
        s = tl.dot(qs, ks, input_precision=PRECISION)
        ds = tl.dot(dqs, ks, input_precision=PRECISION)
        ks = tl.trans(_load(dk, j, n, KEYS, KEY, WIDTH))
        ds = tl.dot(qs, ks, ds, input_precision=PRECISION) * scale
        s, slope, _ = _scores(
            s, start, j, seen, seen_m, seen_n, bias, bias_m, bias_n, scale, cap, m, n, window,
            False, CAUSAL, WINDOWED, SEEN, BIAS, CAPPED, ROWS, KEYS,
        )  # fmt: skip
        p = tl.exp2(s - row_lse[:, None])
        if CAPPED:
            ds = ds * slope
        ds = p * (ds - shift[:, None])
        total += tl.sum(ds, 1)
        vs = _load(v, j, n, KEYS, VALUE, WIDTH)
        acc = _plus_dot(acc, ds.to(vs.dtype), vs, PRECISION)
        vs = _load(dv, j, n, KEYS, VALUE, WIDTH)
        acc = _plus_dot(acc, p.to(vs.dtype), vs, PRECISION)
    # μ = rowsum(P∘dS) = rowsum(P∘(dS − shift)) + shift. With a sink, P sums to 1 − share, and μ includes the
    # sink's own share times its tangent.
    row_mu = total + shift
    if SINKS:
        share = tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2E - row_lse)
        row_mu += share * (tl.load(dsinks + head).to(tl.float32) - shift)
    means = _load(mean + head * m * VALUE, start, m, ROWS, VALUE, WIDTH)
    _store(out + head * m * VALUE, acc + (shift - row_mu)[:, None] * means, start, m, ROWS, VALUE, WIDTH)
    tl.store(mu + head * m + rows, row_mu, mask=rows < m)


@_jit
def _rest(g, dtype: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr):
    """Return the errors in the row sums of a tile that arise when its entries are rounded to ``dtype``.

    The tile ``g`` holds D∘G, the cotangents of the products scale · q kᵀ.

    Without a cap and sinks the exact row sums are zero. Multiplied by the common part of all keys, which may
    be far larger than their differences, the error would be a large part of the cotangents of the queries.
    """
    rounded = g.to(dtype).to(tl.float32)
    if CAPPED or SINKS:
        rounded -= g
    return tl.sum(rounded, 1)


@_jit
def _mean_of_first(k, low, n, KEYS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mean (1, WIDTH) of the keys in the first tile, as an estimate of the mean of all keys."""
    ks = _load(k, low, n, KEYS, KEY, WIDTH).to(tl.float32)
    return (tl.sum(ks, 0) / tl.minimum(KEYS, n - low))[None, :]


@_jit
def adjoint_queries(
    q, u, k, v, lse, common, out,
    seen, seen_z, seen_h, seen_m, seen_n, bias, bias_z, bias_h, bias_m, bias_n, sinks,
    scale, cap, m, n, heads, group, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the cotangents of the queries for one block of query rows, and write them to memory.

    The argument ``common`` holds the inner product ⟨u, O⟩ of each row.
    """
    head, start = _start(m, ROWS, True)
    k += head // group * n * KEY
    v += head // group * n * VALUE
    seen += head // heads * seen_z + head % heads * seen_h
    bias += head // heads * bias_z + head % heads * bias_h
    rows = start + tl.arange(0, ROWS)
    qs = _load(q + head * m * KEY, start, m, ROWS, KEY, WIDTH)
    us = _load(u + head * m * VALUE, start, m, ROWS, VALUE, WIDTH)
    row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[:, None]
    row_common = tl.load(common + head * m + rows, mask=rows < m, other=0.0)[:, None]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    rest = tl.zeros((ROWS,), tl.float32)
    low, high = _keys_of(start, m, n, window, CAUSAL, WINDOWED, ROWS, KEYS)
    for j in range(low, high, KEYS):
        ks = _load(k, j, n, KEYS, KEY, WIDTH)
        # Products of queries and keys, and U vᵀ.
        s = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
        vs = _load(v, j, n, KEYS, VALUE, WIDTH)
        g = tl.dot(us, tl.trans(vs), input_precision=PRECISION)
        s, slope, _ = _scores(
            s, start, j, seen, seen_m, seen_n, bias, bias_m, bias_n, scale, cap, m, n, window,
            False, CAUSAL, WINDOWED, SEEN, BIAS, CAPPED, ROWS, KEYS,
        )  # fmt: skip
        # G = P∘(U vᵀ − r), then D∘G.
        g = tl.exp2(s - row_lse) * (g - row_common)
        if CAPPED:
            g = g * slope
        rest += _rest(g, ks.dtype, CAPPED, SINKS)
        acc = _plus_dot(acc, g.to(ks.dtype), ks, PRECISION)
    # The error of the row sums, times the common part of the keys, is taken off.
    acc -= rest[:, None] * _mean_of_first(k, low, n, KEYS, KEY, WIDTH)
    _store(out + head * m * KEY, acc * scale, start, m, ROWS, KEY, WIDTH)


@_jit
def adjoint_keys(
    q, u, k, v, lse, common, out_k, out_v,
    seen, seen_z, seen_h, seen_m, seen_n, bias, bias_z, bias_h, bias_m, bias_n, sinks,
    scale, cap, m, n, heads, group, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the cotangents of one block of keys and values, and write them to memory.

    They are summed over all query rows, and over the query heads that share the key head.
    """
    key_head, start = _start(n, KEYS, False)
    ks = _load(k + key_head * n * KEY, start, n, KEYS, KEY, WIDTH)
    vs = _load(v + key_head * n * VALUE, start, n, KEYS, VALUE, WIDTH)
    acc_k = tl.zeros((KEYS, WIDTH), tl.float32)
    acc_v = tl.zeros((KEYS, WIDTH), tl.float32)
    low, high = _rows_of(start, m, window, CAUSAL, WINDOWED, ROWS, KEYS)
    for one in range(group):
        head = key_head * group + one
        seen_at = seen + head // heads * seen_z + head % heads * seen_h
        bias_at = bias + head // heads * bias_z + head % heads * bias_h
        for i in range(low, high, ROWS):
            rows = i + tl.arange(0, ROWS)
            row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[None, :]
            row_common = tl.load(common + head * m + rows, mask=rows < m, other=0.0)[None, :]
            qs = _load(q + head * m * KEY, i, m, ROWS, KEY, WIDTH)
            s = tl.dot(ks, tl.trans(qs), input_precision=PRECISION)
            s, slope, _ = _scores(
                s, i, start, seen_at, seen_m, seen_n, bias_at, bias_m, bias_n, scale, cap, m, n, window,
                True, CAUSAL, WINDOWED, SEEN, BIAS, CAPPED, ROWS, KEYS,
            )  # fmt: skip
            p = tl.exp2(s - row_lse)
            us = _load(u + head * m * VALUE, i, m, ROWS, VALUE, WIDTH)
            acc_v = _plus_dot(acc_v, p.to(us.dtype), us, PRECISION)
            # G = P∘(U vᵀ − r), transposed: rows are keys here.
            g = p * (tl.dot(vs, tl.trans(us), input_precision=PRECISION) - row_common)
            if CAPPED:
                g = g * slope
            acc_k = _plus_dot(acc_k, g.to(qs.dtype), qs, PRECISION)
    _store(out_k + key_head * n * KEY, acc_k * scale, start, n, KEYS, KEY, WIDTH)
    _store(out_v + key_head * n * VALUE, acc_v, start, n, KEYS, VALUE, WIDTH)


@_jit
def _moved(s, raw, a, da, row_lse, row_mu, row_common, row_moved, slope, tanh, cap, CAPPED: tl.constexpr):
    """Return the attention probabilities of one tile and the cotangents of its inner products of queries and
    keys, each with its tangent.

    The results are P, its tangent dP, the cotangent D∘G of the products scale · q kᵀ, and the tangent of D∘G.
    The arguments ``s`` are scores, ``raw`` their tangents before the cap, ``a`` is U vᵀ and ``da`` its
    tangent.
    """
    p = tl.exp2(s - row_lse)
    ds = raw
    if CAPPED:
        ds = ds * slope
    dp = p * (ds - row_mu)
    g = p * (a - row_common)
    dg = dp * (a - row_common) + p * (da - row_moved)
    if CAPPED:
        g = g * slope
        dg = dg * slope - (2.0 / cap) * tanh * raw * g
    return p, dp, g, dg


@_jit
def second_queries(
    q, dq, u, du, k, dk, v, dv, lse, mu, common, moved, out,
    seen, seen_z, seen_h, seen_m, seen_n, bias, bias_z, bias_h, bias_m, bias_n, sinks,
    scale, cap, m, n, heads, group, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the tangents of the cotangents of the queries for one block of query rows, and write them to
    memory.

    The cotangents are what :func:`adjoint_queries` writes. The argument ``moved`` holds the tangent of ⟨u, O⟩
    of each row.
    """
    head, start = _start(m, ROWS, True)
    k += head // group * n * KEY
    dk += head // group * n * KEY
    v += head // group * n * VALUE
    dv += head // group * n * VALUE
    seen += head // heads * seen_z + head % heads * seen_h
    bias += head // heads * bias_z + head % heads * bias_h
    rows = start + tl.arange(0, ROWS)
    qs = _load(q + head * m * KEY, start, m, ROWS, KEY, WIDTH)
    dqs = _load(dq + head * m * KEY, start, m, ROWS, KEY, WIDTH)
    us = _load(u + head * m * VALUE, start, m, ROWS, VALUE, WIDTH)
    dus = _load(du + head * m * VALUE, start, m, ROWS, VALUE, WIDTH)
    row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[:, None]
    row_mu = tl.load(mu + head * m + rows, mask=rows < m, other=0.0)[:, None]
    row_common = tl.load(common + head * m + rows, mask=rows < m, other=0.0)[:, None]
    row_moved = tl.load(moved + head * m + rows, mask=rows < m, other=0.0)[:, None]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    rest = tl.zeros((ROWS,), tl.float32)
    low, high = _keys_of(start, m, n, window, CAUSAL, WINDOWED, ROWS, KEYS)
    for j in range(low, high, KEYS):
        ks = _load(k, j, n, KEYS, KEY, WIDTH)
        dks = _load(dk, j, n, KEYS, KEY, WIDTH)
        vs = tl.trans(_load(v, j, n, KEYS, VALUE, WIDTH))
        s = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
        raw = tl.dot(dqs, tl.trans(ks), input_precision=PRECISION)
        raw = tl.dot(qs, tl.trans(dks), raw, input_precision=PRECISION) * scale
        # A = U vᵀ, and dA = dU vᵀ + U dvᵀ.
        a = tl.dot(us, vs, input_precision=PRECISION)
        da = tl.dot(dus, vs, input_precision=PRECISION)
        vs = tl.trans(_load(dv, j, n, KEYS, VALUE, WIDTH))
        da = tl.dot(us, vs, da, input_precision=PRECISION)
        s, slope, tanh = _scores(
            s, start, j, seen, seen_m, seen_n, bias, bias_m, bias_n, scale, cap, m, n, window,
            False, CAUSAL, WINDOWED, SEEN, BIAS, CAPPED, ROWS, KEYS,
        )  # fmt: skip
        _, _, g, dg = _moved(
            s, raw, a, da, row_lse, row_mu, row_common, row_moved, slope, tanh, cap, CAPPED
        )  # fmt: skip
        # Cotangents move by d(D∘G) k + (D∘G) dk.
        rest += _rest(dg, ks.dtype, CAPPED, SINKS)
        acc = _plus_dot(acc, dg.to(ks.dtype), ks, PRECISION)
        acc = _plus_dot(acc, g.to(ks.dtype), dks, PRECISION)
    acc -= rest[:, None] * _mean_of_first(k, low, n, KEYS, KEY, WIDTH)
    _store(out + head * m * KEY, acc * scale, start, m, ROWS, KEY, WIDTH)


@_jit
def second_keys(
    q, dq, u, du, k, dk, v, dv, lse, mu, common, moved, out_k, out_v,
    seen, seen_z, seen_h, seen_m, seen_n, bias, bias_z, bias_h, bias_m, bias_n, sinks,
    scale, cap, m, n, heads, group, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SEEN: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the tangents of the cotangents of keys and values for one block of keys, and write them to
    memory.

    The cotangents are what :func:`adjoint_keys` writes. The argument ``moved`` holds the tangent of ⟨u, O⟩ of
    each row.
    """
    key_head, start = _start(n, KEYS, False)
    ks = _load(k + key_head * n * KEY, start, n, KEYS, KEY, WIDTH)
    dks = _load(dk + key_head * n * KEY, start, n, KEYS, KEY, WIDTH)
    vs = _load(v + key_head * n * VALUE, start, n, KEYS, VALUE, WIDTH)
    dvs = _load(dv + key_head * n * VALUE, start, n, KEYS, VALUE, WIDTH)
    acc_k = tl.zeros((KEYS, WIDTH), tl.float32)
    acc_v = tl.zeros((KEYS, WIDTH), tl.float32)
    low, high = _rows_of(start, m, window, CAUSAL, WINDOWED, ROWS, KEYS)
    for one in range(group):
        head = key_head * group + one
        seen_at = seen + head // heads * seen_z + head % heads * seen_h
        bias_at = bias + head // heads * bias_z + head % heads * bias_h
        for i in range(low, high, ROWS):
            rows = i + tl.arange(0, ROWS)
            row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[None, :]
            row_mu = tl.load(mu + head * m + rows, mask=rows < m, other=0.0)[None, :]
            row_common = tl.load(common + head * m + rows, mask=rows < m, other=0.0)[None, :]
            row_moved = tl.load(moved + head * m + rows, mask=rows < m, other=0.0)[None, :]
            qs = _load(q + head * m * KEY, i, m, ROWS, KEY, WIDTH)
            dqs = _load(dq + head * m * KEY, i, m, ROWS, KEY, WIDTH)
            us = _load(u + head * m * VALUE, i, m, ROWS, VALUE, WIDTH)
            dus = _load(du + head * m * VALUE, i, m, ROWS, VALUE, WIDTH)
            s = tl.dot(ks, tl.trans(qs), input_precision=PRECISION)
            raw = tl.dot(ks, tl.trans(dqs), input_precision=PRECISION)
            raw = tl.dot(dks, tl.trans(qs), raw, input_precision=PRECISION) * scale
            # A = U vᵀ, and dA = dU vᵀ + U dvᵀ, transposed.
            a = tl.dot(vs, tl.trans(us), input_precision=PRECISION)
            da = tl.dot(vs, tl.trans(dus), input_precision=PRECISION)
            da = tl.dot(dvs, tl.trans(us), da, input_precision=PRECISION)
            s, slope, tanh = _scores(
                s, i, start, seen_at, seen_m, seen_n, bias_at, bias_m, bias_n, scale, cap, m, n, window,
                True, CAUSAL, WINDOWED, SEEN, BIAS, CAPPED, ROWS, KEYS,
            )  # fmt: skip
            p, dp, g, dg = _moved(
                s, raw, a, da, row_lse, row_mu, row_common, row_moved, slope, tanh, cap, CAPPED
            )  # fmt: skip
            # Cotangents of values move by dPᵀ U + Pᵀ dU, those of keys by d(D∘G)ᵀ q + (D∘G)ᵀ dq.
            acc_v = _plus_dot(acc_v, dp.to(us.dtype), us, PRECISION)
            acc_v = _plus_dot(acc_v, p.to(us.dtype), dus, PRECISION)
            acc_k = _plus_dot(acc_k, dg.to(qs.dtype), qs, PRECISION)
            acc_k = _plus_dot(acc_k, g.to(qs.dtype), dqs, PRECISION)
    _store(out_k + key_head * n * KEY, acc_k * scale, start, n, KEYS, KEY, WIDTH)
    _store(out_v + key_head * n * VALUE, acc_v, start, n, KEYS, VALUE, WIDTH)
