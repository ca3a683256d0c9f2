"""Constants of maps made by hand: every mask, score and norm, in float64 and float32, both schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from tests.keep.numbers import Interval, Number, case, digest_of, interval, numbers

D, N = 6, 7


def attention(
    seed: int,
    *,
    heads: int = 3,
    kv_heads: int | None = None,
    key_dim: int = 4,
    value_dim: int = 5,
    d: int = D,
    temperature: float = 1.0,
    biases: bool = True,
    output: bool = True,
    **keywords: Any,
) -> hs.SelfAttention:
    """Attention whose scores have the order ``temperature`` at tokens from ``numbers``."""
    kv = heads if kv_heads is None else kv_heads
    root = math.sqrt(d)

    def draw(k: int, *shape: int) -> Tensor:
        return numbers(100 * seed + k, *shape)

    return hs.SelfAttention(
        draw(0, heads, key_dim, d) * (temperature / root),
        draw(1, kv, key_dim, d) / root,
        draw(2, kv, value_dim, d) / root,
        draw(3, d, heads * value_dim) / math.sqrt(heads * value_dim) if output else None,
        query_bias=draw(4, heads, key_dim) if biases else None,
        key_bias=draw(5, kv, key_dim) if biases else None,
        value_bias=draw(6, kv, value_dim) if biases else None,
        output_bias=draw(7, d) if biases and output else None,
        **keywords,
    )


def rotary(n: int, rot_dim: int) -> hs.Rotary:
    frequencies = 10000.0 ** (-torch.arange(0, rot_dim, 2, dtype=torch.float64) / rot_dim)
    angles = torch.outer(torch.arange(n, dtype=torch.float64), frequencies).repeat(1, 2)
    return hs.Rotary(angles.cos(), angles.sin())


def band(n: int) -> Tensor:
    i = torch.arange(n)
    return (i[:, None] - i[None, :]).abs() <= 1


def rms(seed: int, d: int, eps: float = 1e-3) -> hs.RMSNorm:
    return hs.RMSNorm(1 + 0.5 * numbers(seed, d), eps)


def layer_norm(seed: int, d: int = D) -> hs.LayerNorm:
    return hs.LayerNorm(1 + 0.5 * numbers(seed, d), numbers(seed + 1, d), 1e-5)


MAPS: dict[str, Callable[[], Any]] = {
    "one head": lambda: attention(1, heads=1),
    "several heads": lambda: attention(2),
    "no biases": lambda: attention(3, biases=False),
    "grouped": lambda: attention(4, heads=4, kv_heads=2),
    "one key and value head": lambda: attention(5, heads=4, kv_heads=1),
    "causal": lambda: attention(6, causal=True),
    "causal, grouped, hot": lambda: attention(7, heads=4, kv_heads=2, causal=True, temperature=8.0),
    "masked": lambda: attention(8, mask=band(N)),
    "causal and masked": lambda: attention(9, causal=True, mask=band(N)),
    "causal window": lambda: attention(10, heads=4, kv_heads=2, causal=True, window=3),
    "rotary": lambda: attention(11, rotary=rotary(N, 4)),
    "rotary in part, causal": lambda: attention(12, heads=4, kv_heads=2, causal=True, rotary=rotary(N, 2)),
    "heads side by side": lambda: attention(13, output=False),
    "rank one": lambda: attention(14, heads=1, key_dim=1, value_dim=1),
    "own scale": lambda: attention(15, scale=-0.7),
    "soft cap": lambda: attention(16, softcap=0.7, temperature=2.0),
    "soft cap, causal, rotary": lambda: attention(
        17, causal=True, softcap=1.5, rotary=rotary(N, 2), temperature=3.0
    ),
    "score bias": lambda: attention(18, score_bias=2 * numbers(1801, 3, N, N)),
    "sinks": lambda: attention(19, sinks=numbers(1901, 3)),
    "sinks, soft cap, bias, causal": lambda: attention(
        20, sinks=numbers(2001, 3), softcap=1.2, score_bias=numbers(2002, 1, N, N), causal=True
    ),
    "norms of queries and keys": lambda: attention(
        21, causal=True, rotary=rotary(N, 2), query_norm=rms(2101, 4), key_norm=rms(2102, 4)
    ),
    "norms of all queries": lambda: attention(
        22, query_norm=hs.LayerNorm(numbers(2201, 12), numbers(2202, 12)), key_norm=rms(2203, 12)
    ),
    "L2 attention": lambda: hs.L2Attention(*(numbers(2300 + k, 2, 3, D) / 2 for k in range(3))),
    "Sinkhorn attention": lambda: hs.SinkhornAttention(
        *(numbers(2400 + k, 2, 3, D) / 2 for k in range(3)), tolerance=1e-12
    ),
    "LayerNorm": lambda: layer_norm(25),
    "RMSNorm": lambda: rms(26, D),
    "layer scale": lambda: hs.LayerScale(numbers(27, D)),
    "residual": lambda: hs.Residual(attention(28)),
    "post-norm": lambda: hs.Compose(layer_norm(29), hs.Residual(attention(30))),
    "pre-norm": lambda: hs.Residual(hs.Compose(attention(31, causal=True), rms(32, D))),
}


# Their largest singular value is repeated.
_WITHOUT_DIRECTION = ("layer scale",)


def _constant(name: str) -> Mapping[str, Number]:
    f, x = MAPS[name](), numbers(50, N, D)
    found = hs.local_lipschitz(f, x, rtol=1e-6)
    single = hs.local_lipschitz(f.to(dtype=torch.float32), x.float(), rtol=1e-3)
    given: dict[str, Number] = {
        "float64": interval(found),
        "float32": interval(single, None),
        "image": digest_of(f(x)),
    }
    if name not in _WITHOUT_DIRECTION:
        given["direction"] = digest_of(found.input_direction.square(), rtol=1e-5)
    return given


for _name in MAPS:
    case(f"maps/{_name}")(partial(_constant, _name))


@case("maps/schedules")
def _schedules() -> Mapping[str, Number]:
    """Probabilities that are kept, and streamed from 1,024 tokens on; several sequences at once."""
    found: dict[str, Number] = {}
    for causal in (False, True):
        f = attention(51, heads=2, causal=causal, temperature=2.0)
        words = "causal" if causal else "unmasked"
        for n in (300, 1030):
            x = numbers(52, n, D)
            found[f"{words}, {n} tokens"] = interval(hs.local_lipschitz(f, x, rtol=1e-6))
    single = hs.local_lipschitz(f.to(dtype=torch.float32), x.float(), rtol=1e-3)
    found["causal, 1030 tokens, float32"] = interval(single, None)
    together = hs.local_lipschitz(f, [numbers(53 + n, n, D) for n in (3, 7, 5)], rtol=1e-6)
    for k in range(3):
        ends = (float(getattr(together, name)[k]) for name in ("lower", "value", "upper"))
        found[f"sequence {k} of three"] = Interval(*ends)
    return found


@case("maps/by autodiff")
def _autodiff() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    for name in ("causal", "sinks", "pre-norm"):
        found[name] = interval(
            hs.local_lipschitz(MAPS[name](), numbers(50, N, D), rtol=1e-6, method="autodiff")
        )
    x = numbers(50, N, D)
    plain = hs.local_lipschitz(lambda x: torch.sin(x.roll(1, -2)) * x, x, rtol=1e-6, batch_dims=0)
    return {**found, "a function of PyTorch": interval(plain)}
