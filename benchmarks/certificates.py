"""Cost and tightness of the certificate and the local bounds, beside the measured constant.

    python benchmarks/certificates.py                # all of it: some minutes on two cores
    python benchmarks/certificates.py --lengths 10,30 --samples 1 --skip-large

Part 1: one head and four heads with Gaussian parameters, tokens of norm √d, at several lengths and
temperatures. Part 2: heads and layers of the built-in models on their text of the library. Part 3: a layer of
BERT-base size (12 heads, d = 768, random parameters). Each ratio is bound over ``local_lipschitz(...).lower``
at rtol 1e-6, so it is an upper limit of the looseness; times are the fastest of the samples' calls.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.local_upper_bounds import (
    diameter_upper_bound,
    theorem_c_3,
    yudin_theorem_3,
)
from howsmooth.texts import load_text

ONE_HEAD: dict[str, Callable[[hs.SelfAttention, Tensor], float]] = {
    "certificate": lambda f, x: float(hs.bounds.certificate(f, x).value),
    "Yudin": lambda f, x: yudin_theorem_3(f, x).value,
    "C.3 sharp": lambda f, x: diameter_upper_bound(f, x).value,
    "C.3": lambda f, x: theorem_c_3(f, x).value,
}
SEVERAL: dict[str, Callable[[hs.SelfAttention, Tensor], float]] = {
    "certificate": lambda f, x: float(hs.bounds.certificate(f, x).value)
}


@dataclass
class Line:
    """Ratios and times of all bounds on one group of inputs."""

    group: str
    ratios: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, f: hs.SelfAttention, x: Tensor) -> None:
        began = time.perf_counter()
        measured = hs.local_lipschitz(f, x, rtol=1e-6)
        self.note("measure", float(measured.lower), float(measured.upper), time.perf_counter() - began)
        for name, bound in (ONE_HEAD if f.heads == 1 else SEVERAL).items():
            began = time.perf_counter()
            value = bound(f, x)
            self.note(name, float(measured.lower), value, time.perf_counter() - began)

    def note(self, name: str, lower: float, value: float, seconds: float) -> None:
        if value < lower:
            raise AssertionError(f"{name} is below a lower limit: {value} < {lower}, {self.group}")
        self.ratios.setdefault(name, []).append(value / lower)
        self.seconds.setdefault(name, []).append(seconds)

    def __str__(self) -> str:
        cells = []
        for name, ratios in self.ratios.items():
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            spread = f"{middle:.4g} ({low:.4g}–{high:.4g})" if len(ratios) > 1 else f"{middle:.4g}"
            cells.append(f"{name} {spread} in {min(self.seconds[name]):.3g} s")
        return f"{self.group}: " + " | ".join(cells)


def gaussian(
    n: int, d: int, k: int, heads: int, temperature: float, causal: bool, seed: int
) -> tuple[hs.SelfAttention, Tensor]:
    """Gaussian heads with scores of order ``temperature`` at Gaussian tokens of norm √d."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(n, d)
    x *= math.sqrt(d) / x.norm(dim=1, keepdim=True)
    output = None if heads == 1 else draw(d, heads * k) / math.sqrt(heads * k)
    query, key, value = (draw(heads, k, d) / math.sqrt(d) for _ in range(3))
    return hs.SelfAttention(temperature * query, key, value, output, causal=causal), x


def synthetic(lengths: list[int], samples: int) -> Iterator[Line]:
    for heads in (1, 4):
        for n in lengths:
            for temperature in (1.0, 4.0, 16.0, 32.0):
                line = Line(f"{heads} heads, n = {n}, temperature {temperature:g}")
                for seed in range(samples):
                    line.add(*gaussian(n, 64, 64 // heads, heads, temperature, bool(seed % 2), seed))
                yield line


def builtin(n: int, heads: int) -> Iterator[Line]:
    for name in ("builtin-encoder", "builtin-decoder"):
        model = hs.load_model(name)
        text = load_text("alice").content
        tokens = torch.tensor([model.tokenizer.encode(text)[:n]])
        for scope in ("head", "attention"):
            line = Line(f"{name}, scope {scope}, n = {n}")
            for site in hs.capture(model, tokens, scope="attention"):
                f = site.map
                assert isinstance(f, hs.SelfAttention)
                f = f.to(dtype=torch.float64)
                for h in range(min(heads, f.heads)) if scope == "head" else [0]:
                    line.add(f.head(h) if scope == "head" else f, site.x[0].double())
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="10,30,100")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--large", default="64,128", help="lengths at BERT-base size")
    parser.add_argument("--skip-large", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for line in synthetic([int(n) for n in arguments.lengths.split(",")], arguments.samples):
        print(line, flush=True)
    for line in builtin(64, arguments.samples):
        print(line, flush=True)
    if not arguments.skip_large:
        for n in arguments.large.split(","):
            line = Line(f"12 heads, d = 768, n = {n}, temperature 4")
            line.add(*gaussian(int(n), 768, 64, 12, 4.0, False, 0))
            print(line, flush=True)


if __name__ == "__main__":
    main()
