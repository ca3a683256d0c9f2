"""The Jacobian of a map in many digits, from its definition, for tests of what is proved.

Numbers carry their derivatives by all entries of X.
"""

from __future__ import annotations

from collections.abc import Sequence

import mpmath
from mpmath import mp, mpf
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap

DIGITS = 140


class Dual:
    """A number and its derivatives by all entries of X."""

    __slots__ = ("gradient", "value")

    def __init__(self, value: mpf, gradient: list[mpf]) -> None:
        self.value = value
        self.gradient = gradient

    def __add__(self, other: Dual | mpf) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value + other, self.gradient)
        pairs = zip(self.gradient, other.gradient, strict=True)
        return Dual(self.value + other.value, [a + b for a, b in pairs])

    def __sub__(self, other: Dual) -> Dual:
        pairs = zip(self.gradient, other.gradient, strict=True)
        return Dual(self.value - other.value, [a - b for a, b in pairs])

    def __mul__(self, other: Dual | mpf) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value * other, [a * other for a in self.gradient])
        x, y = self.value, other.value
        pairs = zip(self.gradient, other.gradient, strict=True)
        return Dual(x * y, [a * y + x * b for a, b in pairs])

    def of(self, value: mpf, slope: mpf) -> Dual:
        """A function of it, with that value and derivative."""
        return Dual(value, [slope * a for a in self.gradient])


Row = list[Dual]


def _sum(terms: Sequence[Dual]) -> Dual:
    gradient = [mpmath.fsum(parts) for parts in zip(*(t.gradient for t in terms), strict=True)]
    return Dual(mpmath.fsum(t.value for t in terms), gradient)


def _dot(a: Row, b: Row) -> Dual:
    return _sum([x * y for x, y in zip(a, b, strict=True)])


def _numbers(t: Tensor) -> list:
    return mpf(float(t)) if t.ndim == 0 else [_numbers(part) for part in t.double()]


def _linear(matrix: list[list[mpf]], row: Row, bias: list[mpf] | None) -> Row:
    out = [_sum([x * w for x, w in zip(row, weights, strict=True)]) for weights in matrix]
    return out if bias is None else [y + b for y, b in zip(out, bias, strict=True)]


def _norm(f: hs.LayerNorm | hs.RMSNorm, row: Row) -> Row:
    d = len(row)
    if f.centred:
        mean = _sum(row) * (mpf(1) / d)
        row = [x - mean for x in row]
    square = _dot(row, row) + mpf(f.eps) * d
    root = mpmath.sqrt(square.value)
    inverse = square.of(mpmath.sqrt(mpf(d)) / root, -mpmath.sqrt(mpf(d)) / (2 * root**3))
    out = [x * inverse * g for x, g in zip(row, _numbers(f.weight), strict=True)]
    return out if f.bias is None else [y + b for y, b in zip(out, _numbers(f.bias), strict=True)]


def _rotated(f: hs.SelfAttention, row: Row, position: int) -> Row:
    if f.rotary is None:
        return row
    cos, sin = _numbers(f.rotary.cos[position]), _numbers(f.rotary.sin[position])
    half = len(cos) // 2
    return [
        x if a >= 2 * half else x * cos[a] + (row[a + half] * -sin[a] if a < half else row[a - half] * sin[a])
        for a, x in enumerate(row)
    ]


def _attention(f: hs.SelfAttention, rows: list[Row]) -> list[Row]:
    n, group = len(rows), f.heads // f.kv_heads
    seen = f.visible_keys(n)

    def projected(weight: Tensor, bias: Tensor | None, h: int) -> list[Row]:
        numbers, beside = _numbers(weight[h]), None if bias is None else _numbers(bias[h])
        return [_linear(numbers, row, beside) for row in rows]

    heads: list[list[Row]] = []
    for h in range(f.heads):
        g = h // group
        q, k = projected(f.query, f.query_bias, h), projected(f.key, f.key_bias, g)
        v = projected(f.value, f.value_bias, g)
        q = q if f.query_norm is None else [_norm(f.query_norm, row) for row in q]
        k = k if f.key_norm is None else [_norm(f.key_norm, row) for row in k]
        q, k = ([_rotated(f, row, i) for i, row in enumerate(t)] for t in (q, k))
        out = []
        for i in range(n):
            visible = [j for j in range(n) if seen is None or bool(seen[i, j])]
            weights = []
            for j in visible:
                s = _dot(q[i], k[j]) * mpf(f.scale)
                if f.softcap is not None:
                    t = mpmath.tanh(s.value / mpf(f.softcap))
                    # 1 − t² without what cancels
                    slope = 1 / mpmath.cosh(s.value / mpf(f.softcap)) ** 2
                    s = s.of(mpf(f.softcap) * t, slope)
                if f.score_bias is not None:
                    s = s + mpf(float(f.score_bias[h if f.score_bias.shape[0] > 1 else 0, i, j]))
                e = mpmath.exp(s.value)
                weights.append(s.of(e, e))
            total = _sum(weights)
            if f.sinks is not None:
                total = total + mpmath.exp(mpf(float(f.sinks[h])))
            inverse = total.of(1 / total.value, -1 / total.value**2)
            p = [w * inverse for w in weights]
            out.append(
                [_sum([pj * v[j][a] for pj, j in zip(p, visible, strict=True)]) for a in range(f.value_dim)]
            )
        heads.append(out)
    joined = [[x for head in heads for x in head[i]] for i in range(n)]
    if f.output is None:
        return joined
    bias = None if f.output_bias is None else _numbers(f.output_bias)
    return [_linear(_numbers(f.output), row, bias) for row in joined]


def _image(f: TokenMap, rows: list[Row]) -> list[Row]:
    match f:
        case hs.SelfAttention():
            return _attention(f, rows)
        case hs.LayerNorm() | hs.RMSNorm():
            return [_norm(f, row) for row in rows]
        case hs.Residual():
            inner = _image(f.inner, rows)
            return [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(rows, inner, strict=True)]
        case hs.Compose():
            return _image(f.outer, _image(f.inner, rows))
    raise TypeError(type(f))


def exact_jacobian(
    f: TokenMap, x: Tensor, digits: int = DIGITS, *, at: hs.LayerNorm | hs.RMSNorm | None = None
) -> mp.matrix:
    """D_X f, (n d_out, n d), of the map with exactly these parameters, at exactly these tokens (n, d).

    With ``at`` it is taken at the outputs of that norm layer.
    """
    with mp.workdps(digits):
        size, d, numbers = x.numel(), x.shape[1], _numbers(x)
        if at is not None:
            numbers = [[y.value for y in _norm(at, [Dual(v, []) for v in row])] for row in numbers]
        unit = [[mpf(i == j) for i in range(size)] for j in range(size)]
        rows = [[Dual(v, unit[i * d + a]) for a, v in enumerate(row)] for i, row in enumerate(numbers)]
        return mp.matrix([y.gradient for row in _image(f, rows) for y in row])


def exact_norm(matrix: mp.matrix) -> mpf:
    """Spectral norm, in 40-digit arithmetic."""
    with mp.workdps(40):
        small = matrix * matrix.T if matrix.rows <= matrix.cols else matrix.T * matrix
        return mpmath.sqrt(max(mp.eigsy(small, eigvals_only=True)))


def exact_constant(f: TokenMap, x: Tensor, digits: int = DIGITS) -> mpf:
    """‖D_X f‖₂. Values beside a bias cancel here as anywhere: what is left below the digits is zero."""
    jacobian = exact_jacobian(f, x, digits)
    with mp.workdps(digits):
        gram = jacobian * jacobian.T if jacobian.rows <= jacobian.cols else jacobian.T * jacobian
        scale = max(abs(entry) for entry in gram)
        if scale < mpf(10) ** (80 - 2 * digits):
            return mpf(0)
        return mpmath.sqrt(max(mp.eigsy(gram / scale, eigvals_only=True)) * scale)
