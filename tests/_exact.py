"""The Jacobian of attention in 40-digit arithmetic, from its definition, for tests of what is proved."""

from __future__ import annotations

import mpmath
import torch
from torch import Tensor

import howsmooth as hs

DIGITS = 40


def _exact(t: Tensor) -> list[list[mpmath.mpf]]:
    return [[mpmath.mpf(float(entry)) for entry in row] for row in t.double()]


def _times(matrix: list[list[mpmath.mpf]], vector: list[mpmath.mpf]) -> list[mpmath.mpf]:
    return [mpmath.fdot(row, vector) for row in matrix]


def exact_jacobian(f: hs.SelfAttention, x: Tensor) -> mpmath.matrix:
    """D_X f, (n d_out, n d), of the map with exactly the parameters and tokens given."""
    with mpmath.workdps(DIGITS):
        n, d = x.shape
        tokens = _exact(x)
        group = f.heads // f.kv_heads
        seen = f.visible_keys(n)
        output = torch.eye(f.heads * f.value_dim) if f.output is None else f.output
        W = _exact(output)
        J = mpmath.zeros(n * len(W), n * d)
        for h in range(f.heads):
            g = h // group
            queries, keys = _exact(f.query[h]), _exact(f.key[g])
            V = _exact(f.value[g])
            turned_q = [_turned(f, queries, i) for i in range(n)]
            turned_k = [_turned(f, keys, i) for i in range(n)]
            q = [_projected(f, queries, f.query_bias, h, tokens[i], i) for i in range(n)]
            k = [_projected(f, keys, f.key_bias, g, tokens[i], i) for i in range(n)]
            v = [_times(V, t) for t in tokens]
            Wh = [row[h * f.value_dim : (h + 1) * f.value_dim] for row in W]
            for i in range(n):
                visible = [j for j in range(n) if seen is None or bool(seen[i, j])]
                e = {j: mpmath.exp(mpmath.mpf(f.scale) * mpmath.fdot(q[i], k[j])) for j in visible}
                total = mpmath.fsum(e.values())
                p = {j: e[j] / total for j in visible}
                o = [mpmath.fsum(p[j] * v[j][a] for j in visible) for a in range(len(V))]
                for j in visible:
                    w = [v[j][a] - o[a] for a in range(len(V))]
                    # ∂S_ij/∂x_j and ∂S_ij/∂x_i
                    by_key = [f.scale * mpmath.fdot(q[i], [row[c] for row in turned_k[j]]) for c in range(d)]
                    by_query = [
                        f.scale * mpmath.fdot(k[j], [row[c] for row in turned_q[i]]) for c in range(d)
                    ]
                    out_w, out_V = (
                        _times(Wh, w),
                        [[mpmath.fdot(r, col) for col in zip(*V, strict=True)] for r in Wh],
                    )
                    for a in range(len(W)):
                        for c in range(d):
                            J[i * len(W) + a, j * d + c] += p[j] * (out_V[a][c] + out_w[a] * by_key[c])
                            J[i * len(W) + a, i * d + c] += p[j] * out_w[a] * by_query[c]
        return J


def _turned(f: hs.SelfAttention, matrix: list[list[mpmath.mpf]], position: int) -> list[list[mpmath.mpf]]:
    """R_i times a matrix, from the tables of the rotary positions."""
    if f.rotary is None:
        return matrix
    cos, sin = (_exact(t[position : position + 1])[0] for t in (f.rotary.cos, f.rotary.sin))
    half = len(cos) // 2
    rows = []
    for a, row in enumerate(matrix):
        if a >= 2 * half:
            rows.append(row)
            continue
        other = [-t for t in matrix[a + half]] if a < half else matrix[a - half]
        rows.append([r * cos[a] + o * sin[a] for r, o in zip(row, other, strict=True)])
    return rows


def _projected(
    f: hs.SelfAttention,
    matrix: list[list[mpmath.mpf]],
    bias: Tensor | None,
    h: int,
    token: list[mpmath.mpf],
    position: int,
) -> list[mpmath.mpf]:
    rows = _times(matrix, token)
    if bias is not None:
        rows = [r + mpmath.mpf(float(b)) for r, b in zip(rows, bias[h], strict=True)]
    return [row[0] for row in _turned(f, [[r] for r in rows], position)]


def exact_norm(matrix: mpmath.matrix) -> mpmath.mpf:
    """Spectral norm, in 40-digit arithmetic."""
    with mpmath.workdps(DIGITS):
        small = matrix * matrix.T if matrix.rows <= matrix.cols else matrix.T * matrix
        return mpmath.sqrt(max(mpmath.eigsy(small, eigvals_only=True)))
