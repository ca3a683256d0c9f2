"""One attention layer at a length whose probabilities fit nowhere: peak of memory, time a product, the whole.

    python benchmarks/long_sequence.py                                   # seconds: n = 4096
    python benchmarks/long_sequence.py --n 131072 --causal --memory 16GiB --products 1
    python benchmarks/long_sequence.py --n 32768 --one-head --converge --rtol 1e-3

A layer of random parameters (queries and keys of scores of standard deviation ``--temperature``), float32. By
default some steps of Lanczos are made, each a product with JᵀJ, while as much memory is held as a basis of
``--steps`` vectors takes; what all steps would take is extrapolated from the time of a product. With
``--converge`` it is ``howsmooth.local_lipschitz`` from beginning to end. The peak is that of the whole
process (Linux); the program ends with an error if it is above ``--memory``. Rates count nine matrix products
a pair of a query and a key that it sees, beside the rate of a 2048 × 2048 product in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.closed_form import in_double
from howsmooth.jacobian.tiling import Tiling
from howsmooth.spectral import LinearOperator, lanczos

UNITS = {"MiB": 2**20, "GiB": 2**30}


def layer(arguments: argparse.Namespace) -> hs.SelfAttention:
    generator = torch.Generator().manual_seed(0)
    d, heads, width = arguments.d, arguments.heads, arguments.d // arguments.heads
    query, key, value = torch.randn(3, heads, width, d, generator=generator) / d**0.5
    output = torch.randn(d, d, generator=generator) / d**0.5
    f = hs.SelfAttention(
        arguments.temperature * query,
        key,
        value,
        output,
        causal=arguments.causal,
        window=arguments.window,
    )
    return f.head(0) if arguments.one_head else f


def tokens(n: int, d: int) -> Tensor:
    """Gaussian tokens, of norm √d."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(1))
    return x.mul_(d**0.5 / x.norm(dim=1, keepdim=True))


def pairs(n: int, f: hs.SelfAttention) -> int:
    """Pairs of a query and a key that it sees."""
    window = n if f.window is None else min(n, f.window)
    one_side = window * (window + 1) // 2 + (n - window) * window
    return one_side if f.causal else n * n if f.window is None else 2 * one_side - n


def operations(n: int, f: hs.SelfAttention) -> float:
    """Float operations of a product with JᵀJ: nine matrix products a tile, and the projections."""
    core = 2.0 * pairs(n, f) * f.heads * (5 * f.key_dim + 4 * f.value_dim)
    projections = 2.0 * n * f.d * 2 * (f.heads * f.key_dim + f.kv_heads * (f.key_dim + f.value_dim))
    output = 0.0 if f.output is None else 4.0 * n * f.output.numel()
    return core + projections + output


def machine_rate() -> float:
    """Operations a second of a 2048 × 2048 float32 product, the median of some."""
    a, seconds = torch.randn(2048, 2048), []
    for _ in range(9):
        began = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - began)
    return 2.0 * 2048**3 / statistics.median(seconds)


def resident(which: str) -> int:
    """Resident size of this process in bytes: VmRSS now, VmHWM its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


@contextmanager
def progress() -> Iterator[None]:
    """Say on standard error how far the walk over blocks of query rows is, twice a minute."""
    blocks, said = Tiling.blocks, time.monotonic()

    def walked(cut: Tiling) -> Iterator[object]:
        nonlocal said
        began, rows = time.monotonic(), cut.m
        for block in blocks(cut):
            yield block
            if time.monotonic() - said > 30:
                said = time.monotonic()
                print(
                    f"  {block.rows.stop} of {rows} rows, {said - began:.0f} s", file=sys.stderr, flush=True
                )

    with mock.patch.object(Tiling, "blocks", walked):
        yield


class Timed(LinearOperator):
    """An operator whose products with JᵀJ are timed and told."""

    def __init__(self, whole: LinearOperator) -> None:
        super().__init__(
            whole.batch, whole.in_shape, whole.out_shape, whole.dtype, whole.device, whole.rounding
        )
        self.whole = whole
        self.seconds: list[float] = []

    def _product(self, e: Tensor) -> Tensor:
        return self.whole.product(e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.whole.adjoint_product(u)

    def _timed(self, what: str, e: Tensor) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        pair: tuple[Tensor, Tensor] = getattr(self.whole, what)(e)
        self.seconds.append(time.perf_counter() - began)
        print(
            f"product {len(self.seconds)}: {self.seconds[-1]:.2f} s, peak {gib(resident('VmHWM'))}",
            flush=True,
        )
        return pair

    def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return self._timed("gram_product", e)

    def _energy_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return self._timed("energy_product", e)


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def some_products(f: hs.SelfAttention, x: Tensor, arguments: argparse.Namespace) -> dict[str, object]:
    """Linearise, and make some steps of Lanczos beside the memory of all of them."""
    began = time.perf_counter()
    operator = Timed(
        closed_form_jacobian(
            in_double(f), x.double()[None], dtype=torch.float32, streamed=True
        )  # as the library does
    )
    linearised = time.perf_counter() - began
    print(f"linearised: {linearised:.2f} s, peak {gib(resident('VmHWM'))}", flush=True)
    rest = torch.ones(max(0, arguments.steps - arguments.products), x.numel(), dtype=torch.float16)
    start = torch.randn(1, *x.shape, generator=torch.Generator().manual_seed(2))
    found = lanczos(
        operator,
        start,
        rtol=arguments.rtol,
        confidence=0.999,
        max_iterations=arguments.products,
        basis_dtype=torch.float16,
    )
    product, held = statistics.median(operator.seconds), rest.numel() * rest.itemsize
    rate = operations(len(x), f) / product
    # One more product for the left direction. For the verdict one in float32, and a linearisation and one in
    # float64, which takes twice as long.
    whole = 2 * linearised + (arguments.steps + 1 + 1 + 2) * product
    row: dict[str, object] = {
        "linearised s": linearised,
        "product s": product,
        "operations a product": operations(len(x), f),
        "GFLOP/s": rate / 1e9,
        "held for the basis": gib(held),
        "steps assumed": arguments.steps,
        "whole h, extrapolated": whole / 3600,
        "lower limit so far": float(found.lower),
    }
    if arguments.verdict:
        right = found.right.double()
        del operator, rest, found
        began = time.perf_counter()
        exact = closed_form_jacobian(in_double(f), x.double()[None], dtype=torch.float64, streamed=True)
        image, _ = exact.gram_product(right)
        row |= {"verdict s": time.perf_counter() - began, "in float64 along it": float(image.norm())}
    return row


def to_convergence(f: hs.SelfAttention, x: Tensor, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure it as a user does."""
    began = time.perf_counter()
    found = hs.local_lipschitz(f, x, rtol=arguments.rtol, memory=arguments.memory - resident("VmRSS"))
    return {
        "estimate": repr(found),
        "value": float(found.value),
        "lower": float(found.lower),
        "upper": float(found.upper),
        "converged": bool(found.converged),
        "iterations": int(found.iterations),
        "s": time.perf_counter() - began,
    }


def size_in_bytes(text: str) -> int:
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--one-head", action="store_true", help="the first head alone")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--memory", type=size_in_bytes, default="16GiB", help="as 16GiB, 512MiB or in bytes")
    parser.add_argument("--products", type=int, default=2, help="products with JᵀJ to make")
    parser.add_argument(
        "--steps", type=int, default=32, help="steps assumed for the whole, and their basis held"
    )
    parser.add_argument("--verdict", action="store_true", help="after the products one in float64")
    parser.add_argument("--converge", action="store_true", help="measure to the end instead")
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rate = machine_rate()
    f, x = layer(arguments), tokens(arguments.n, arguments.d)
    row: dict[str, object] = {
        "map": f.describe(),
        "n": arguments.n,
        "threads": torch.get_num_threads(),
        "resident before": gib(resident("VmRSS")),
        "one matrix of n × n a head": gib(4.0 * arguments.n**2 * f.heads),
    }
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with progress():
        row |= (to_convergence if arguments.converge else some_products)(f, x, arguments)
    peak = resident("VmHWM")
    row |= {"matrix product GFLOP/s": rate / 1e9, "peak": gib(peak), "allowed": gib(arguments.memory)}
    if isinstance(row.get("GFLOP/s"), float):
        row["share of the rate"] = 1e9 * float(str(row["GFLOP/s"])) / rate
    for name, value in row.items():
        print(f"{name:>28}  {value:.4g}" if isinstance(value, float) else f"{name:>28}  {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1))
    return 0 if peak <= arguments.memory else 1


if __name__ == "__main__":
    sys.exit(main())
