"""Triton kernels that multiply vectors by the derivative of softmax attention and never write probabilities
to global memory.

The matrix units multiply bfloat16 numbers. A float32 operand is the sum of ``PARTS`` bfloat16 numbers, and a
product is the sum of the products of the parts, without the products that are below the last digit: two parts
have 16 bits and take three products, three parts have the 24 bits of float32 and take six. The units truncate
their sums instead of rounding them, and a sum over all tiles would drift, by 1e-4 at 16,384 keys. So the sum
of each tile begins at zero on the units, and is added to the total outside of them.

The first axis of the grid is the block of rows (or of keys), the second the head b · group + g (or the key
head b). Queries, keys, values and tangents are (part, head, row, column), with columns padded to ``WIDTH``.
Means, results and row vectors are float32. ``lse`` is in units of log 2.
"""

# Triton compiles its functions without annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["adjoint_keys", "adjoint_queries", "image"]

_LOG2E = tl.constexpr(1.4426950408889634)


def _jit(function: Callable[..., object]) -> Any:
    return triton.jit(inspect.unwrap(function))


@_jit
def _split(x, PARTS: tl.constexpr):
    """Return tiles whose sum is nearly x; if ``PARTS`` is 2, the third is not used."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    if PARTS == 3:  # noqa: SIM108
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    else:
        third = second
    return first, second, third


@_jit
def _load(p, part, start, end, LENGTH: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Load LENGTH rows from row ``start`` of a sum of bfloat16 tensors; rows from ``end`` on are zero."""
    i = start + tl.arange(0, LENGTH)
    place = p + i[:, None].to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = i[:, None] < end
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + part, mask=inside, other=0.0)
    if PARTS == 3:  # noqa: SIM108
        third = tl.load(place + 2 * part, mask=inside, other=0.0)
    else:
        third = second
    return first, second, third


@_jit
def _dot(a0, a1, a2, b0, b1, b2, acc, PARTS: tl.constexpr):
    """Return acc + a b, approximately, for matrices a = a0 + a1 + a2 and b = b0 + b1 + b2 that are given as
    bfloat16 parts.

    Products of parts below the last digit are left out. If ``PARTS`` is 2, so are a2 and b2.
    """
    if PARTS == 3:
        acc = tl.dot(a2, b0, acc)
        acc = tl.dot(a0, b2, acc)
        acc = tl.dot(a1, b1, acc)
    acc = tl.dot(a1, b0, acc)
    acc = tl.dot(a0, b1, acc)
    return tl.dot(a0, b0, acc)


@_jit
def _seen(i, j, n, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Query i sees key j; the positions i and j broadcast to the shape of the tile."""
    seen = (j < n) & (i >= 0)
    if CAUSAL:
        seen = seen & (j <= i)
    if WINDOWED:
        seen = seen & (i - j < window) & (j - i < window)
    return seen


@_jit
def _keys_of(first, last, n, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, KEYS: tl.constexpr):
    """Return the keys that queries ``first`` to ``last`` − 1 see, from a multiple of KEYS on."""
    low = 0
    high = n
    if CAUSAL:
        high = min(n, last)
    if WINDOWED:
        low = max(0, first - window + 1) // KEYS * KEYS
        high = min(high, last + window - 1)
    return low, high


@_jit
def image(
    q, dq, k, dk, v, dv, lse, mean, out,
    q_part, k_part, m, n, group, first_row, window, value_dim,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the tangent of the attention outputs for one block of query rows, and write it to ``out``."""
    # Blocks are taken from the last on: in causal order the last rows see most keys and take longest.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1).to(tl.int64)
    keys_at = head // group * n * WIDTH
    rows = start + tl.arange(0, ROWS)
    q0, q1, q2 = _load(q + head * m * WIDTH, q_part, start, m, ROWS, WIDTH, PARTS)
    dq0, dq1, dq2 = _load(dq + head * m * WIDTH, q_part, start, m, ROWS, WIDTH, PARTS)
    row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[:, None]
    position = (first_row + rows)[:, None]
    last = first_row + min(start + ROWS, m)
    low, high = _keys_of(first_row + start, last, n, window, CAUSAL, WINDOWED, KEYS)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for j in range(low, high, KEYS):
        nothing = tl.zeros((ROWS, KEYS), tl.float32)
        k0, k1, k2 = _load(k + keys_at, k_part, j, n, KEYS, WIDTH, PARTS)
        k0, k1, k2 = tl.trans(k0), tl.trans(k1), tl.trans(k2)
        s = _dot(q0, q1, q2, k0, k1, k2, nothing, PARTS)
        ds = _dot(dq0, dq1, dq2, k0, k1, k2, nothing, PARTS)
        k0, k1, k2 = _load(dk + keys_at, k_part, j, n, KEYS, WIDTH, PARTS)
        ds = _dot(q0, q1, q2, tl.trans(k0), tl.trans(k1), tl.trans(k2), ds, PARTS)
        # P is formed from the scores and the denominators of the rows; dS = P∘(dq kᵀ + q dkᵀ).
        seen = _seen(position, (j + tl.arange(0, KEYS))[None, :], n, window, CAUSAL, WINDOWED)
        p = tl.where(seen, tl.exp2(s * _LOG2E - row_lse), 0.0)
        ds = ds * p
        total += tl.sum(ds, 1)
        s0, s1, s2 = _split(ds, PARTS)
        v0, v1, v2 = _load(v + keys_at, k_part, j, n, KEYS, WIDTH, PARTS)
        part = _dot(s0, s1, s2, v0, v1, v2, tl.zeros((ROWS, WIDTH), tl.float32), PARTS)
        p0, p1, p2 = _split(p, PARTS)
        v0, v1, v2 = _load(dv + keys_at, k_part, j, n, KEYS, WIDTH, PARTS)
        acc += _dot(p0, p1, p2, v0, v1, v2, part, PARTS)
    columns = tl.arange(0, WIDTH)
    place = (head * m + rows)[:, None] * value_dim + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < value_dim)
    # The row sums of dS times O, subtracted once for all keys.
    acc -= total[:, None] * tl.load(mean + place, mask=inside, other=0.0)
    tl.store(out + place, acc, mask=inside)


@_jit
def adjoint_queries(
    q, do, k, v, lse, common, out,
    q_part, k_part, m, n, group, first_row, window, key_dim,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the cotangents of the queries for one block of query rows, and write them to ``out``.

    The argument ``common`` holds the inner product ⟨do, O⟩ of each row.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1).to(tl.int64)
    keys_at = head // group * n * WIDTH
    rows = start + tl.arange(0, ROWS)
    q0, q1, q2 = _load(q + head * m * WIDTH, q_part, start, m, ROWS, WIDTH, PARTS)
    do0, do1, do2 = _load(do + head * m * WIDTH, q_part, start, m, ROWS, WIDTH, PARTS)
    row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[:, None]
    row_common = tl.load(common + head * m + rows, mask=rows < m, other=0.0)[:, None]
    position = (first_row + rows)[:, None]
    last = first_row + min(start + ROWS, m)
    low, high = _keys_of(first_row + start, last, n, window, CAUSAL, WINDOWED, KEYS)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for j in range(low, high, KEYS):
        nothing = tl.zeros((ROWS, KEYS), tl.float32)
        k0, k1, k2 = _load(k + keys_at, k_part, j, n, KEYS, WIDTH, PARTS)
        s = _dot(q0, q1, q2, tl.trans(k0), tl.trans(k1), tl.trans(k2), nothing, PARTS)
        v0, v1, v2 = _load(v + keys_at, k_part, j, n, KEYS, WIDTH, PARTS)
        ds = _dot(do0, do1, do2, tl.trans(v0), tl.trans(v1), tl.trans(v2), nothing, PARTS)
        seen = _seen(position, (j + tl.arange(0, KEYS))[None, :], n, window, CAUSAL, WINDOWED)
        p = tl.where(seen, tl.exp2(s * _LOG2E - row_lse), 0.0)
        s0, s1, s2 = _split(p * (ds - row_common), PARTS)
        acc += _dot(s0, s1, s2, k0, k1, k2, tl.zeros((ROWS, WIDTH), tl.float32), PARTS)
    columns = tl.arange(0, WIDTH)
    place = (head * m + rows)[:, None] * key_dim + columns[None, :]
    tl.store(out + place, acc, mask=(rows[:, None] < m) & (columns[None, :] < key_dim))


@_jit
def adjoint_keys(
    q, do, k, v, lse, common, out_k, out_v,
    q_part, k_part, m, n, group, first_row, window, key_dim, value_dim,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the cotangents of one block of keys and values, and write them to memory.

    They are summed over all query rows, and over the query heads that share the key head.
    """
    start = tl.program_id(0) * KEYS
    key_head = tl.program_id(1).to(tl.int64)
    keys = start + tl.arange(0, KEYS)
    k0, k1, k2 = _load(k + key_head * n * WIDTH, k_part, start, n, KEYS, WIDTH, PARTS)
    v0, v1, v2 = _load(v + key_head * n * WIDTH, k_part, start, n, KEYS, WIDTH, PARTS)
    low = 0
    high = m
    # The rows that see some of these keys; with a window, the last key's window ends the range.
    if CAUSAL:
        low = max(0, start - first_row) // ROWS * ROWS
    if WINDOWED:
        high = max(0, min(m, start + KEYS + window - 1 - first_row))
        if not CAUSAL:
            low = max(0, start - window + 1 - first_row) // ROWS * ROWS
    acc_k = tl.zeros((KEYS, WIDTH), tl.float32)
    acc_v = tl.zeros((KEYS, WIDTH), tl.float32)
    for g in range(group):
        head = key_head * group + g
        for i in range(low, high, ROWS):
            nothing = tl.zeros((KEYS, ROWS), tl.float32)
            rows = i + tl.arange(0, ROWS)
            row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=0.0)[None, :]
            row_common = tl.load(common + head * m + rows, mask=rows < m, other=0.0)[None, :]
            q0, q1, q2 = _load(q + head * m * WIDTH, q_part, i, m, ROWS, WIDTH, PARTS)
            s = _dot(k0, k1, k2, tl.trans(q0), tl.trans(q1), tl.trans(q2), nothing, PARTS)
            seen = _seen((first_row + rows)[None, :], keys[:, None], n, window, CAUSAL, WINDOWED)
            p = tl.where(seen & (rows[None, :] < m), tl.exp2(s * _LOG2E - row_lse), 0.0)
            do0, do1, do2 = _load(do + head * m * WIDTH, q_part, i, m, ROWS, WIDTH, PARTS)
            p0, p1, p2 = _split(p, PARTS)
            acc_v += _dot(p0, p1, p2, do0, do1, do2, tl.zeros((KEYS, WIDTH), tl.float32), PARTS)
            ds = _dot(v0, v1, v2, tl.trans(do0), tl.trans(do1), tl.trans(do2), nothing, PARTS)
            s0, s1, s2 = _split(p * (ds - row_common), PARTS)
            acc_k += _dot(s0, s1, s2, q0, q1, q2, tl.zeros((KEYS, WIDTH), tl.float32), PARTS)
    columns = tl.arange(0, WIDTH)
    place = (key_head * n + keys)[:, None] * key_dim + columns[None, :]
    tl.store(out_k + place, acc_k, mask=(keys[:, None] < n) & (columns[None, :] < key_dim))
    columns = tl.arange(0, WIDTH)
    place = (key_head * n + keys)[:, None] * value_dim + columns[None, :]
    tl.store(out_v + place, acc_v, mask=(keys[:, None] < n) & (columns[None, :] < value_dim))
