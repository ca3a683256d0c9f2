"""A registry of maps that every operator and estimate is tested on; a new map joins with one line."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap

D = 6


def parameters(f: hs.SelfAttention) -> dict[str, Tensor | None]:
    """The projections of an attention layer and their biases."""
    projections = ("query", "key", "value", "output")
    return {name: getattr(f, name) for name in (*projections, *(f"{name}_bias" for name in projections))}


def random_attention(
    seed: int,
    *,
    heads: int = 3,
    kv_heads: int | None = None,
    key_dim: int = 4,
    value_dim: int = 5,
    d: int = D,
    d_out: int | None = D,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
    biases: bool = True,
    **keywords: object,
) -> hs.SelfAttention:
    """Attention with Gaussian parameters, scores of order ``temperature`` on standard Gaussian tokens."""
    kv_heads = heads if kv_heads is None else kv_heads
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    root = math.sqrt(d)
    return hs.SelfAttention(
        draw(heads, key_dim, d) * (temperature / root),
        draw(kv_heads, key_dim, d) / root,
        draw(kv_heads, value_dim, d) / root,
        None if d_out is None else draw(d_out, heads * value_dim) / math.sqrt(heads * value_dim),
        query_bias=draw(heads, key_dim) if biases else None,
        key_bias=draw(kv_heads, key_dim) if biases else None,
        value_bias=draw(kv_heads, value_dim) if biases else None,
        output_bias=draw(d_out) if biases and d_out is not None else None,
        **keywords,
    )


def rotary(n: int, rot_dim: int, dtype: torch.dtype = torch.float64) -> hs.Rotary:
    """Rotary tables as Llama makes them."""
    frequencies = 10000.0 ** (-torch.arange(0, rot_dim, 2, dtype=torch.float64) / rot_dim)
    angles = torch.outer(torch.arange(n, dtype=torch.float64), frequencies).repeat(1, 2)
    return hs.Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def _window(n: int) -> Tensor:
    i = torch.arange(n)
    return (i[:, None] - i[None, :]).abs() <= 1


def _score_bias(heads: int, n: int) -> Tensor:
    return 2 * torch.randn(heads, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def _gain(seed: int) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _layer_norm() -> hs.LayerNorm:
    return hs.LayerNorm(_gain(5), _gain(6), 1e-5)


# name -> map of n tokens of dimension D, in float64
CASES: dict[str, Callable[[int], TokenMap]] = {
    "one head": lambda n: random_attention(0, heads=1),
    "multi-head": lambda n: random_attention(1),
    "no biases": lambda n: random_attention(2, biases=False),
    "grouped heads": lambda n: random_attention(3, heads=4, kv_heads=2),
    "multi-query": lambda n: random_attention(4, heads=4, kv_heads=1),
    "causal": lambda n: random_attention(5, causal=True),
    "causal grouped, hot": lambda n: random_attention(6, heads=4, kv_heads=2, causal=True, temperature=8.0),
    "masked": lambda n: random_attention(7, mask=_window(n)),
    "causal and masked": lambda n: random_attention(8, causal=True, mask=_window(n)),
    "causal window, grouped": lambda n: random_attention(29, heads=4, kv_heads=2, causal=True, window=2),
    "rotary": lambda n: random_attention(9, rotary=rotary(n + 2, 4)),
    "rotary, partial, grouped, causal": lambda n: random_attention(
        10, heads=4, kv_heads=2, causal=True, rotary=rotary(n, 2)
    ),
    "heads concatenated": lambda n: random_attention(11, d_out=None),
    "wide output": lambda n: random_attention(12, d_out=11),
    "rank one": lambda n: random_attention(13, heads=1, key_dim=1, value_dim=1),
    "own scale": lambda n: random_attention(14, scale=2.5),
    "negative scale": lambda n: random_attention(15, scale=-0.7),
    "softcap": lambda n: random_attention(19, softcap=0.7, temperature=2.0),
    "softcap, grouped, causal, rotary": lambda n: random_attention(
        20, heads=4, kv_heads=2, causal=True, softcap=1.5, rotary=rotary(n, 2), temperature=3.0
    ),
    "softcap, causal": lambda n: random_attention(21, causal=True, softcap=2.0, temperature=3.0),
    "score bias": lambda n: random_attention(22, heads=4, kv_heads=2, score_bias=_score_bias(4, n)),
    "score bias for all heads, masked": lambda n: random_attention(
        23, mask=_window(n), score_bias=_score_bias(1, n), softcap=1.0
    ),
    "sinks": lambda n: random_attention(24, sinks=_gain(24)[:3]),
    "sinks, grouped, causal": lambda n: random_attention(
        25, heads=4, kv_heads=2, causal=True, sinks=3 * _gain(25)[:4], temperature=3.0
    ),
    "sinks, softcap, score bias": lambda n: random_attention(
        26, heads=4, kv_heads=2, sinks=_gain(26)[:4], softcap=1.2, score_bias=_score_bias(4, n)
    ),
    "norms of queries and keys, rotary, causal": lambda n: random_attention(
        27,
        heads=4,
        kv_heads=2,
        causal=True,
        rotary=rotary(n, 2),
        query_norm=hs.RMSNorm(3 * _gain(27)[:4], 1e-3),
        key_norm=hs.RMSNorm(_gain(28)[:4], 1e-3),
    ),
    "norms of all queries, of all keys": lambda n: random_attention(
        28,
        heads=4,
        kv_heads=2,
        query_norm=hs.LayerNorm(tokens(28, 16), tokens(29, 16)),
        key_norm=hs.RMSNorm(tokens(30, 8)),
    ),
    "norms of one number": lambda n: random_attention(
        40,
        key_dim=1,
        heads=4,
        kv_heads=2,
        query_norm=hs.RMSNorm(_gain(40)[:1], 1.0),
        key_norm=hs.RMSNorm(_gain(41)[:1], 1.0),
    ),
    "a norm of keys": lambda n: random_attention(29, key_norm=hs.LayerNorm(_gain(29)[:4], _gain(30)[:4])),
    "LayerNorm": lambda n: _layer_norm(),
    "RMSNorm": lambda n: hs.RMSNorm(_gain(7), 1e-6),
    "layer scale": lambda n: hs.LayerScale(_gain(9)),
    "residual": lambda n: hs.Residual(random_attention(16)),
    "post-norm": lambda n: hs.Compose(_layer_norm(), hs.Residual(random_attention(17))),
    "pre-norm": lambda n: hs.Residual(hs.Compose(random_attention(18, causal=True), hs.RMSNorm(_gain(8)))),
    "scaled residual": lambda n: hs.Compose(
        hs.LayerScale(_gain(28)), hs.Residual(hs.Compose(hs.LayerScale(_gain(29)), random_attention(30)))
    ),
}

# Of these the maps that act on measures: what belongs to a list of tokens does not.
ACTING = [
    name
    for name in CASES
    if not any(word in name for word in ("masked", "window", "rotary", "score bias", "sinks"))
]


def tokens(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard Gaussian tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Dense float64 Jacobian (n d_out, n d) of f at x (n, d), by reverse-mode autodiff: the oracle.

    All rows in one batched pass: one pass each would take six times as long.
    """
    j = torch.autograd.functional.jacobian(f, x.double(), vectorize=True)
    return j.reshape(-1, x.numel())


def true_norm(f: TokenMap, x: Tensor) -> Tensor:
    """Spectral norms of the dense float64 Jacobians at x (batch, n, d)."""
    f64 = f.to(dtype=torch.float64)
    return torch.stack([torch.linalg.matrix_norm(dense_jacobian(f64, member), 2) for member in x])
