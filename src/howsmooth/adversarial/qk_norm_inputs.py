"""Construct inputs in which one token has a query or key of zero, for attention that normalises queries or
keys.

A norm layer of queries or keys with D entries, N(y) = √D γ∘y / √(|y|² + Dε), has its largest derivative γ/√ε
at y = 0. One token therefore has a query or key of zero. The other tokens are placed so that a small move of
this token changes the outputs as much as possible. The derivation is in the documentation page "Worst inputs,
and lower bounds", section "A short token".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.rounding import LEAST_DIVISOR

__all__ = ["zero_query_or_key_inputs"]

# The argument of a norm is made this many times as long as √(Dε), so that the norm forgets its length.
_LONG = 30.0


def zero_query_or_key_inputs(
    f: SelfAttention, length: int, radius: float
) -> list[tuple[str, Float64[Tensor, "n d"]]]:
    """Return named inputs of n >= 2 tokens in the ball in which one token has a query or key of zero. The
    list is empty if the attention does not normalise queries or keys. Masks, biases, caps and sinks of its
    scores are ignored.
    """
    if f.query_norm is None and f.key_norm is None:
        return []
    f = f.to(dtype=torch.float64, device="cpu")
    found = []
    for h in range(f.heads):
        group = h // (f.heads // f.kv_heads)
        query = _Side.of(f.query, f.query_bias, f.query_norm, h, radius)
        key = _Side.of(f.key, f.key_bias, f.key_norm, group, radius)
        if f.query_norm is not None:
            found.append((f"zero query, head {h}", _zero_query(f, group, query, key, length, radius)))
        if f.key_norm is not None:
            found += [
                (f"zero key {i}, head {h}", x)
                for i, x in enumerate(_zero_key(f, group, query, key, length, radius))
            ]
    return found


@dataclass(frozen=True, eq=False)
class _Side:
    """The map from a token x to the query or key of one head, up to a positive factor: x ↦ γ∘(W x + b). Here
    W and b are the projection matrix and its bias, and γ is the gain of the norm layer.

    ``zero`` is the shortest token at which the derivative of the norm layer is largest, scaled down to the
    radius if it is longer. ``long`` is the length of W x + b that the other tokens should have.
    """

    W: Float64[Tensor, "dim d"]
    b: Float64[Tensor, " dim"]
    gain: Float64[Tensor, " dim"]
    zero: Float64[Tensor, " d"]
    long: float

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, norm: LayerNorm | RMSNorm | None, h: int, radius: float
    ) -> _Side:
        heads, dim, d = weight.shape
        biases = torch.zeros(heads, dim, dtype=torch.float64) if bias is None else bias
        mine, W, b = slice(0, dim), weight[h], biases[h]
        if norm is not None and norm.d != dim:  # one norm of all heads
            mine, W, b = slice(h * dim, (h + 1) * dim), weight.flatten(0, 1), biases.flatten()
        if norm is None:
            long = 0.5 * float(torch.linalg.matrix_norm(W, 2)) * radius
            return cls(W, b, torch.ones(dim, dtype=torch.float64), torch.zeros(d, dtype=torch.float64), long)
        if norm.centred:
            W, b = W - W.mean(dim=0), b - b.mean()
        zero = -torch.linalg.pinv(W) @ b
        zero = zero * min(1.0, radius / max(float(zero.norm()), LEAST_DIVISOR))
        long = max(_LONG * math.sqrt(norm.d * norm.eps), 3.0 * float(b.norm()))
        return cls(W[mine], b[mine], norm.weight[mine], zero, long)

    def directions(self) -> Float64[Tensor, "dim two"]:
        """Return the direction in which it changes most with its token, and one orthogonal to it."""
        u: Tensor = torch.linalg.svd(self.gain[:, None] * self.W).U
        return torch.nn.functional.pad(u, (0, 1))[:, :2]

    def before(self, wanted: Float64[Tensor, "n dim"]) -> Float64[Tensor, "n dim"]:
        """Return W x for a token x whose query or key reaches farthest along each row of ``wanted``."""
        y = self.gain * wanted
        images: Tensor = self.long * y / y.norm(dim=-1, keepdim=True).clamp_min(LEAST_DIVISOR) - self.b
        return images


def _zero_query(
    f: SelfAttention, group: int, query: _Side, key: _Side, n: int, radius: float
) -> Float64[Tensor, "n d"]:
    """Return a sequence in which the query of the last token is zero and the other tokens form two opposite
    clusters.

    The last token gives the same attention weight to all keys. The keys of the two clusters point along and
    against the direction in which a change of the last token changes its query most. So such a change raises
    the weights of one cluster and lowers the weights of the other cluster.
    """
    signs = torch.ones(n, 1, dtype=torch.float64)
    signs[1::2] = -1.0
    towards = _turned(f, query.directions()[:, 0], n, n - 1)
    x = _with_images(key.W, key.before(signs * towards), f.value[group], signs, radius)
    x[-1] = query.zero
    return x


def _zero_key(
    f: SelfAttention, group: int, query: _Side, key: _Side, n: int, radius: float
) -> list[Float64[Tensor, "n d"]]:
    """Return one or two inputs in which the key of the first token is zero. All queries point in the
    direction in which a change of this token changes its key most.

    In the first input the other keys point in the opposite direction. In the second input they are turned so
    that together they have half of the attention weight.
    """
    both = torch.cat((query.W, key.W))
    first, second = key.directions().unbind(dim=1)
    towards, aside = _turned(f, first, n, 0), _turned(f, second, n, 0)
    others = (n - 1) / 2 if f.causal else n - 1
    others = max(1.0, others if f.window is None else min(others, f.window - 1))
    found: list[Tensor] = []
    cosine = 1.0
    for _ in range(2):
        away = -cosine * towards + math.sqrt(1 - cosine**2) * aside
        images = torch.cat((query.before(towards), key.before(away)), dim=-1)
        x = _with_images(both, images, f.value[group], torch.ones(n, 1, dtype=torch.float64), radius)
        x[0] = key.zero
        found.append(x)
        q, k = f.queries_and_keys(x)
        below = -f.scale * float(q[group * (f.heads // f.kv_heads), -1] @ k[group, -1])
        if not below > math.log(others):  # even the farthest keys have half of the weight
            break
        cosine = math.log(others) / below
    return found


def _turned(f: SelfAttention, direction: Tensor, n: int, place: int) -> Float64[Tensor, "n dim"]:
    """Return vectors that all point as ``direction`` at position ``place`` does, after their rotations."""
    same = direction.expand(1, n, -1)
    if f.rotary is None:
        return same[0]
    return f.rotary.rotate_adjoint(f.rotary.rotate(same)[:, place : place + 1].expand(1, n, -1))[0]


def _with_images(
    W: Float64[Tensor, "rows d"],
    images: Float64[Tensor, "n rows"],
    value: Float64[Tensor, "value_dim d"],
    signs: Float64[Tensor, "n 1"],
    radius: float,
) -> Float64[Tensor, "n d"]:
    """Return tokens x of norm ``radius`` for which each product W x with the matrix W is the given vector, or
    a multiple of it.

    An image is multiplied by a factor if its token would be longer than the radius, or if W maps no nonzero
    token to zero. Otherwise a token that W maps to zero is added, such that the value of the sum is as long
    as possible.
    """
    x: Tensor = images @ torch.linalg.pinv(W).mT
    length: Tensor = x.norm(dim=-1, keepdim=True)
    _, sizes, rows = torch.linalg.svd(W)
    free = rows[int((sizes > 1e-9 * sizes[0]).sum()) :].mT  # the tokens that W maps to zero
    if free.shape[1] == 0:
        return x * radius / length.clamp_min(LEAST_DIVISOR)
    z: Tensor = free @ torch.linalg.svd(value @ free).Vh[0]
    x = x * torch.clamp(radius / length.clamp_min(LEAST_DIVISOR), max=1.0)
    left: Tensor = (radius**2 - x.square().sum(dim=-1, keepdim=True)).clamp_min(0.0).sqrt()
    return x + signs * left * z
