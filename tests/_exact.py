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


def exact_jacobian(
    f: hs.SelfAttention, x: Tensor, norm: hs.LayerNorm | hs.RMSNorm | None = None
) -> mpmath.matrix:
    """D_X f, (n d_out, n d), of the map with exactly the parameters and tokens given, or at norm(X)."""
    with mpmath.workdps(DIGITS):
        n, d = x.shape
        tokens = [_normed(norm, token) for token in _exact(x)]
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


def exact_differences(
    f: hs.SelfAttention, x: Tensor, norm: hs.LayerNorm | hs.RMSNorm | None = None
) -> mpmath.matrix:
    """D_X f, (n d_out, n d), for scores of all kinds, or of f after a norm: differences of size 1e-30 in
    80-digit arithmetic.
    """
    with mpmath.workdps(80):
        step, tokens = mpmath.mpf(10) ** -30, _exact(x)
        n, d = x.shape
        columns = []
        for j in range(n):
            for c in range(d):
                ends = []
                for sign in (1, -1):
                    moved = [list(token) for token in tokens]
                    moved[j][c] += sign * step
                    ends.append(_image(f, [_normed(norm, token) for token in moved]))
                columns.append([(a - b) / (2 * step) for a, b in zip(*ends, strict=True)])
        return mpmath.matrix(columns).T


def _image(f: hs.SelfAttention, tokens: list[list[mpmath.mpf]]) -> list[mpmath.mpf]:
    """f(X) without its output bias, as one list."""
    n, group = len(tokens), f.heads // f.kv_heads
    seen = f.visible_keys(n)
    W = _exact(torch.eye(f.heads * f.value_dim) if f.output is None else f.output)
    heads: list[list[list[mpmath.mpf]]] = []
    for h in range(f.heads):
        g = h // group
        matrices = (f.query[h], f.query_bias, h, f.query_norm), (f.key[g], f.key_bias, g, f.key_norm)
        q, k = (
            [
                _turned_vector(f, _normed(layer, _affine(W, bias, at, token)), i)
                for i, token in enumerate(tokens)
            ]
            for W, bias, at, layer in ((_exact(m), *rest) for m, *rest in matrices)
        )
        v = [_affine(_exact(f.value[g]), f.value_bias, g, token) for token in tokens]
        outputs = []
        for i in range(n):
            weights, total = {}, mpmath.mpf(0) if f.sinks is None else mpmath.exp(_number(f.sinks[h]))
            for j in range(n):
                if seen is not None and not bool(seen[i, j]):
                    continue
                score = mpmath.mpf(f.scale) * mpmath.fdot(q[i], k[j])
                if f.softcap is not None:
                    score = f.softcap * mpmath.tanh(score / f.softcap)
                if f.score_bias is not None:
                    score += _number(f.score_bias[h % len(f.score_bias), i, j])
                weights[j] = mpmath.exp(score)
                total += weights[j]
            outputs.append(
                [mpmath.fsum(p * v[j][a] for j, p in weights.items()) / total for a in range(len(v[0]))]
            )
        heads.append(outputs)
    return [entry for i in range(n) for entry in _times(W, [a for outputs in heads for a in outputs[i]])]


def _number(t: Tensor) -> mpmath.mpf:
    return mpmath.mpf(float(t))


def _affine(
    matrix: list[list[mpmath.mpf]], bias: Tensor | None, at: int, token: list[mpmath.mpf]
) -> list[mpmath.mpf]:
    image = _times(matrix, token)
    return image if bias is None else [a + _number(b) for a, b in zip(image, bias[at], strict=True)]


def _turned_vector(f: hs.SelfAttention, vector: list[mpmath.mpf], position: int) -> list[mpmath.mpf]:
    return [row[0] for row in _turned(f, [[entry] for entry in vector], position)]


def _normed(layer: hs.LayerNorm | hs.RMSNorm | None, vector: list[mpmath.mpf]) -> list[mpmath.mpf]:
    if layer is None:
        return vector
    if layer.centred:
        mean = mpmath.fsum(vector) / len(vector)
        vector = [entry - mean for entry in vector]
    length = mpmath.sqrt(mpmath.fdot(vector, vector) / len(vector) + mpmath.mpf(layer.eps))
    gained = [_number(w) * entry / length for w, entry in zip(layer.weight, vector, strict=True)]
    return gained if layer.bias is None else [a + _number(b) for a, b in zip(gained, layer.bias, strict=True)]


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
