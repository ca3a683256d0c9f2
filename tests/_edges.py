"""A search for wrong intervals: small maps at the edges of floating point, measured and in many digits.

``python -m tests._edges 20000`` looks at so many cases and prints what was found; the tests look at a few.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mpmath import mpf
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.errors import HowsmoothError
from tests._exact import exact_constant


@dataclass(frozen=True)
class Case:
    kind: str
    f: TokenMap
    x: Tensor


class Draw:
    """Random parameters of one seed."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def among(self, *values: float) -> float:
        return self.choice.choice(values)

    def sizes(self) -> tuple[int, int, int, int]:
        """n, d, heads, key_dim."""
        pick = self.choice.choice
        return pick((1, 2, 2, 3)), pick((1, 2, 3)), pick((1, 2)), pick((1, 2))

    def attention(self, n: int, d: int, heads: int, dim: int, **given: object) -> hs.SelfAttention:
        hot = self.among(0.3, 1, 1, 3, 30)
        arguments: dict[str, object] = {
            "query": self.normal(heads, dim, d, size=hot),
            "key": self.normal(heads, dim, d),
            "value": self.normal(heads, self.choice.choice((1, 2)), d),
        }
        arguments |= given
        value = arguments["value"]
        assert isinstance(value, Tensor)
        if "output" not in given and self.choice.random() < 0.5:
            arguments["output"] = self.normal(d, heads * value.shape[1])
        if self.choice.random() < 0.3:
            arguments["causal"] = True
        for name, rows in (("query_bias", dim), ("key_bias", dim), ("value_bias", value.shape[1])):
            if self.choice.random() < 0.3 and name not in given:
                arguments[name] = self.normal(heads, rows, size=self.among(0.1, 1, 100))
        return hs.SelfAttention(**arguments)  # type: ignore[arg-type]


def _plain(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    return Case("plain", draw.attention(n, d, heads, dim), draw.normal(n, d, size=draw.among(0.1, 1, 10)))


def _hot(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    f = draw.attention(n, d, heads, dim)
    return Case("scores up to 10⁶", f, draw.normal(n, d, size=draw.among(10, 30, 100, 1000)))


def _sinks(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    sinks = torch.tensor([draw.choice.uniform(-100, 100) for _ in range(heads)]).double()
    return Case("sinks", draw.attention(n, d, heads, dim, sinks=sinks), draw.normal(n, d))


def _biased(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    size = 10.0 ** draw.choice.uniform(-20, 0)
    value = draw.normal(heads, 2, d, size=size * draw.among(0, 1, 1, 1))
    f = draw.attention(n, d, heads, dim, value=value, value_bias=draw.normal(heads, 2))
    return Case("value bias", f, draw.normal(n, d))


def _extreme(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    value = draw.normal(heads, 2, d, size=10.0 ** draw.choice.uniform(-150, 150))
    f = draw.attention(n, d, heads, dim, value=value, value_bias=draw.normal(heads, 2))
    return Case("values of 10^±150", f, draw.normal(n, d))


def _cancelling(draw: Draw) -> Case:
    n, d, _, dim = draw.sizes()
    one = draw.normal(1, dim, d, size=2.0)
    query = torch.cat((one, one * (1 + 10.0 ** draw.choice.uniform(-15, -1))))
    key, value = (draw.normal(1, dim, d).expand(2, -1, -1).contiguous() for _ in range(2))
    output = torch.cat((draw.normal(d, dim),) * 2, dim=1)
    output[:, dim:] *= -1
    biases = {"query_bias": None, "key_bias": None, "value_bias": None}
    f = draw.attention(n, d, 2, dim, query=query, key=key, value=value, output=output, **biases)
    return Case("heads that cancel", f, draw.normal(n, d))


def _residual(draw: Draw) -> Case:
    n, d, _, dim = draw.sizes()
    value = -(1 - 10.0 ** draw.choice.uniform(-15, 0)) * torch.eye(d, dtype=torch.float64)[None]
    f = draw.attention(n, d, 1, dim, value=value, output=None)
    return Case("residual that cancels", hs.Residual(f), draw.normal(n, d))


def _norms(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    eps = draw.among(0.0, 1e-12, 1e-6, 1e-5, 1e-2)
    norm: TokenMap = hs.RMSNorm(draw.normal(d), eps)
    if draw.choice.random() < 0.5 and (d > 1 or eps > 0):
        norm = hs.LayerNorm(draw.normal(d), draw.normal(d), eps)
    x = draw.normal(n, d, size=10.0 ** draw.choice.uniform(-3, 3)) + draw.among(0, 0, 10)
    attention = draw.attention(n, d, heads, dim, output=draw.normal(d, heads), value=draw.normal(heads, 1, d))
    ways = (norm, hs.Compose(attention, norm), hs.Compose(norm, hs.Residual(attention)))
    return Case("norms", draw.choice.choice(ways), x)


def _features(draw: Draw) -> Case:
    n, d, heads, _ = draw.sizes()
    dim = draw.choice.choice((1, 2))
    given: dict[str, object] = {}
    if draw.choice.random() < 0.5:
        given["softcap"] = draw.among(0.3, 1.0, 20.0, 50.0)
    if draw.choice.random() < 0.4:
        given["score_bias"] = draw.normal(heads, n, n, size=draw.among(1, 30, 1e4))
    if draw.choice.random() < 0.3:
        given["sinks"] = draw.normal(heads, size=10)
    if draw.choice.random() < 0.4:
        given["query_norm"] = hs.RMSNorm(draw.normal(dim), draw.among(1e-6, 1e-2))
        given["key_norm"] = hs.RMSNorm(draw.normal(dim), 1e-6)
    if dim == 2 and draw.choice.random() < 0.5:
        angle = draw.normal(n, 1).repeat(1, 2)
        given["rotary"] = hs.Rotary(angle.cos(), angle.sin())
    return Case(
        "features", draw.attention(n, d, heads, dim, **given), draw.normal(n, d, size=draw.among(1, 5))
    )


def _degenerate(draw: Draw) -> Case:
    n, d, heads, dim = draw.sizes()
    x = draw.normal(n, d)
    match draw.choice.randrange(4):
        case 0:
            x = x[:1].expand(n, -1).contiguous()
        case 1:
            x = torch.outer(draw.normal(n), draw.normal(d))
        case 2:
            x = x + 10.0 ** draw.choice.uniform(1, 8)
        case _:
            x = torch.zeros_like(x)
    return Case("repeated, rank one, far, zero", draw.attention(n, d, heads, dim), x)


KINDS: tuple[Callable[[Draw], Case], ...] = (
    _plain,
    _hot,
    _sinks,
    _biased,
    _extreme,
    _cancelling,
    _residual,
    _norms,
    _features,
    _degenerate,
)


def case(seed: int) -> Case:
    """The case of a seed, in float64."""
    return KINDS[seed % len(KINDS)](Draw(seed))


@dataclass(frozen=True)
class Found:
    """What came of a case: a miss is by how much, relatively, the interval does not hold the truth."""

    kind: str
    status: str  # "converged", "wide" or "refused"
    miss: float = 0.0
    error: float = 0.0
    width: float = 0.0


def look(seed: int) -> Found:
    """Measure the case of a seed, in one of the precisions, and compare with the truth."""
    at, draw = case(seed), random.Random(seed)
    dtype = torch.float32 if draw.random() < 0.25 and "150" not in at.kind else torch.float64
    f, x = at.f.to(dtype=dtype), at.x.to(dtype)
    rtol = draw.choice((1e-2, 1e-4, 1e-4) if dtype == torch.float32 else (1e-2, 1e-4, 1e-6, 1e-9))
    kind = f"{at.kind}, {str(dtype).removeprefix('torch.')}"
    try:
        found = hs.local_lipschitz(f, x, rtol=rtol, seed=seed)
    except HowsmoothError:
        return Found(kind, "refused")
    truth = exact_constant(f, x)
    if truth < mpf(10) ** -50:  # what cancels may be far larger
        truth = exact_constant(f, x, 800)
    value, lower, upper = (mpf(float(t)) for t in (found.value, found.lower, found.upper))
    size = truth if truth > 0 else max(upper, mpf(10) ** -300)
    miss = max(lower - truth, truth - upper, mpf(0)) / size
    status = "converged" if bool(found.converged) else "wide"
    return Found(kind, status, float(miss), float(abs(value - truth) / size), float((upper - lower) / size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    worst: dict[str, tuple[float, int]] = {}
    for seed in range(options.first, options.first + options.cases):
        found = look(seed)
        counts[found.kind, found.status] += 1
        if found.miss > 0:
            counts[found.kind, "missed"] += 1
            print(f"seed {seed}: {found}", flush=True)
        if found.status == "converged":
            worst[found.kind] = max(worst.get(found.kind, (0.0, 0)), (found.error, seed))
    for kind in sorted({kind for kind, _ in counts}):
        words = ", ".join(f"{status} {count}" for (k, status), count in sorted(counts.items()) if k == kind)
        error, seed = worst.get(kind, (0.0, 0))
        print(f"{kind}: {words}; largest relative error where converged {error:.1e} (seed {seed})")


if __name__ == "__main__":
    main()
