"""One product with JᵀJ of streamed attention, against the machine's float32 matrix-product rate.

    python benchmarks/streamed.py                       # a minute on two cores
    python benchmarks/streamed.py --lengths 2048,32768 --heads 1

A product needs nine matrix products a tile of probabilities (docs/theory/jacobian.md) and the projections
forth and back; their operations over the time it took are set against a 2048 × 2048 matrix product measured
in turns with it. Exponentials, sums and scores formed in float64 where they are large cost time and count for
nothing; "share" counts the pairs of a query and a key that it sees, "share of blocks" what is formed, with
what lies above the diagonal in causal tiles. Beside it, the product with probabilities kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pandas as pd
import torch

import howsmooth as hs
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.spectral import LinearOperator
from howsmooth.study.ranges import Ranges

KEY_DIM = 64


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def matrix_rate(size: int = 2048) -> float:
    """Float32 operations a second of one matrix product, as PyTorch makes it."""
    a, b = torch.randn(2, size, size)
    return 2 * size**3 / seconds(lambda: a @ b)


def operations(f: hs.SelfAttention, n: int, pairs: float) -> float:
    """Operations in the matrix products of one product with JᵀJ."""
    core = 9 * 2 * pairs * f.heads * KEY_DIM
    projections = 2 * 2 * n * f.d * 4 * f.heads * KEY_DIM
    return core + projections


def attention(heads: int, temperature: float, *, causal: bool) -> hs.SelfAttention:
    d = heads * KEY_DIM
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, heads, KEY_DIM, d, generator=draw) / d**0.5
    output = torch.randn(d, d, generator=draw) / d**0.5
    return hs.SelfAttention(temperature * query, key, value, output, causal=causal)


def gram(operator: LinearOperator, e: torch.Tensor) -> Callable[[], object]:
    return lambda: operator.gram_product(e)


def row(
    n: int, heads: int, temperature: float, rounds: int, *, causal: bool, cached: bool
) -> dict[str, object]:
    f = attention(heads, temperature, causal=causal)
    x = torch.randn(1, n, f.d, generator=torch.Generator().manual_seed(1))
    e = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    operator = closed_form_jacobian(f, x, streamed=True)
    ways = {"streamed": gram(operator, e)}
    if cached:
        ways["cached"] = gram(closed_form_jacobian(f, x), e)
    cut = operator.core.tiling
    formed = sum(piece.pairs for block in cut.blocks() for piece in cut.pieces(block))
    seen = n * (n + 1) / 2 if causal else n * n
    possible: list[float] = []  # operations of matrix products in the time of a product
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    for _ in range(rounds):
        for name, call in ways.items():
            before = matrix_rate()
            times[name].append(seconds(call))
            if name == "streamed":
                possible.append(times[name][-1] * statistics.mean((before, matrix_rate())))
    told = {
        "n": n,
        "heads": heads,
        "causal": causal,
        "scores": "float32" if operator.core.exact is None else "float64",
        "seconds": statistics.median(times["streamed"]),
        "share": operations(f, n, seen) / statistics.median(possible),
        "share of blocks": operations(f, n, formed) / statistics.median(possible),
    }
    if cached:
        told["streamed / cached"] = told["seconds"] / statistics.median(times["cached"])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--heads", default="1,12")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cached-up-to", type=int, default=4096, help="lengths also measured cached")
    options = parser.parse_args()
    matrix_rate()
    print(f"{torch.get_num_threads()} threads; torch {torch.__version__}; {matrix_rate() / 1e9:.0f} GFLOP/s")
    rows = [
        row(n, heads, temperature, options.rounds, causal=causal, cached=n <= options.cached_up_to)
        for n in Ranges.parse(options.lengths, "lengths").values()
        for heads in Ranges.parse(options.heads, "heads").values()
        for causal in (False, True)
        for temperature in (0.5, 8.0)
        if n <= 4096 or (causal and temperature == 8.0)
    ]
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda v: f"{v:.3g}"))


if __name__ == "__main__":
    main()
