"""Tiles of the kernels of hs.functional.attention: what they need of a CUDA device, and how fast they are.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --capability 80 --dtypes bf16 --widths 64 --rules causal
    python benchmarks/kernels.py --run --dtypes bf16,fp32 --widths 64,128 --rules causal

Without a device, each kernel is compiled in each of the sizes of tiles that are tried on a device, in that
order. Registers are those of a thread; the bytes on its stack are what did not fit into these, and are slow;
shared memory is that of a block of threads.

``--run`` needs a CUDA device. It runs each kernel in many sizes of tiles, in causal order or without a mask,
and prints the fastest: milliseconds, operations a second, and the largest relative error of its results
against attention in float64, which is how a table of tiles for a device is made and checked. The ratio is to
the error of PyTorch's math backend in the same dtype.
"""

from __future__ import annotations

import argparse
import inspect
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import torch
import triton
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from howsmooth.functional import attention, fused_attention, fused_kernels
from howsmooth.triton_launch import TileSize

NAMES = fused_kernels.__all__
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RULES: dict[str, dict[str, bool]] = {
    "plain": {},
    "causal": {"CAUSAL": True},
    "all": dict.fromkeys(("CAUSAL", "WINDOWED", "SEEN", "BIAS", "CAPPED", "SINKS"), True),
}
FLAGS = RULES["all"]
SINGLE = ("lse", "mean", "mu", "common", "moved", "out", "out_k", "out_v")
NUMBERS = {"scale": "fp32", "cap": "fp32"}
POINTERS = ("q", "k", "v", "u", "dq", "dk", "dv", "du", "bias", "sinks", "dsinks")
# For --run: the matrix products of each kernel, its results among those of :func:`results`, and the tiles.
PRODUCTS = {
    "value": 2, "tangent": 5, "adjoint_queries": 3, "adjoint_keys": 4, "second_queries": 8, "second_keys": 10,
}  # fmt: skip
RESULTS = {
    "value": (0,), "tangent": (1,), "adjoint_queries": (2,), "adjoint_keys": (3, 4), "second_queries": (5,),
    "second_keys": (6, 7),
}  # fmt: skip
SIDES, WARPS_AND_STAGES = (16, 32, 64, 128), ((4, 2), (4, 3), (8, 2), (8, 3))


def compiled(name: str, dtype: str, width: int, rule: str, tile: TileSize, capability: int) -> object:
    """Compile one kernel for operands of this many entries."""
    kernel = getattr(fused_kernels, name)
    values = {**dict.fromkeys(FLAGS, False), **RULES[rule]}
    values |= {"KEY": width, "VALUE": width, "WIDTH": width, "ROWS": tile.rows, "KEYS": tile.keys}
    values["PRECISION"] = fused_attention.input_precision(DTYPES[dtype])
    signature = {}
    for argument in inspect.signature(kernel.fn).parameters:
        if argument in values:
            signature[argument] = "constexpr"
        elif argument in SINGLE:
            signature[argument] = "*fp32"
        elif argument in POINTERS:
            signature[argument] = f"*{dtype}"
        elif argument == "seen":
            signature[argument] = "*u8"
        else:
            signature[argument] = NUMBERS.get(argument, "i32")
    # What Triton finds out at a call: pointers, and the numbers that usually are, multiples of 16.
    whole = [i for i, (_, kind) in enumerate(signature.items()) if kind.startswith("*")]
    whole += [i for i, argument in enumerate(signature) if argument in ("m", "n")]
    source = ASTSource(
        kernel,
        signature,
        {(list(signature).index(key),): value for key, value in values.items()},
        {(i,): [["tt.divisibility", 16]] for i in whole},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(binary: bytes) -> tuple[int, int]:
    """Registers and bytes on the stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)


def results(f: Callable[..., Tensor], x: list[Tensor], d: list[Tensor], u: Tensor) -> list[Tensor]:
    """Value, tangent, cotangents of q, k and v, and the tangents of these."""

    def pulled(*y: Tensor) -> tuple[Tensor, ...]:
        cotangents: tuple[Tensor, ...] = vjp(f, *y)[1](u)
        return cotangents

    return [*jvp(f, tuple(x), tuple(d)), *(t for pair in jvp(pulled, tuple(x), tuple(d)) for t in pair)]


@contextmanager
def one_tile(name: str, tile: TileSize) -> Iterator[list[float]]:
    """Have one kernel run in this tile alone; yields the list of its times in milliseconds."""
    tiles, launch, times = fused_attention.tiles, fused_attention.launch, list[float]()

    def chosen(of: str, dtype: torch.dtype, width: int) -> tuple[TileSize, ...]:
        return (tile,) if of == name else tiles(of, dtype, width)

    def timed(kernel: object, *rest: object) -> None:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        launch(kernel, *rest)
        ended.record()
        ended.synchronize()
        if kernel is getattr(fused_kernels, name):
            times.append(began.elapsed_time(ended))

    fused_attention.tiles, fused_attention.launch = chosen, timed
    try:
        yield times
    finally:
        fused_attention.tiles, fused_attention.launch = tiles, launch


def run(names: list[str], dtype: str, width: int, *, causal: bool, n: int, heads: int, best: int) -> None:
    """Print the fastest tiles of each kernel."""
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = torch.randn(7, 1, heads, n, width, generator=generator, device="cuda").to(DTYPES[dtype])
    x, d, u = list(drawn[:3]), list(drawn[3:6]), drawn[6]

    def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=causal, kernels=True)

    exact = results(math, [t.double() for t in x], [t.double() for t in d], u.double())

    def errors(found: list[Tensor]) -> list[float]:
        return [float((t.double() - e).norm() / e.norm()) for t, e in zip(found, exact, strict=True)]

    usual = errors(results(math, x, d, u))
    for name in names:
        rows = []
        for rows_, keys, (warps, stages) in product(SIDES, SIDES, WARPS_AND_STAGES):
            if rows_ * keys * width > 128 * 128 * 128 or (rows_ * keys <= 1024 and warps > 4):
                continue
            with one_tile(name, TileSize(rows_, keys, warps, stages)) as times:
                try:
                    off_by = [errors(results(fused, x, d, u)) for _ in range(4)][-1]
                except triton.runtime.errors.OutOfResources:
                    continue
            ms = statistics.median(times[len(times) // 4 :])
            off, ratio = max((off_by[i], off_by[i] / usual[i]) for i in RESULTS[name])
            rows.append((ms, rows_, keys, warps, stages, off, ratio))
        for ms, rows_, keys, warps, stages, off, ratio in sorted(rows)[:best]:
            operations = PRODUCTS[name] * 2 * n * n * width * heads / (1 + causal)
            rate = operations / ms / 1e9
            tile = f"{rows_:4} {keys:4} {warps:5} {stages:6}"
            found = f"{ms:8.2f} ms {rate:5.0f} TFLOP/s {off:.1e} {ratio:5.2f}"
            print(f"{name:16} {dtype:5} {width:5} {tile} {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--kernels", default=",".join(NAMES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--first", action="store_true", help="only in the tiles that are tried first")
    parser.add_argument("--run", action="store_true", help="on a CUDA device, time and check many tiles")
    parser.add_argument("--tokens", type=int, default=4096, help="of --run")
    parser.add_argument("--heads", type=int, default=8, help="of --run")
    parser.add_argument("--best", type=int, default=4, help="how many tiles --run prints of each kernel")
    options = parser.parse_args()
    if options.run:
        print("kernel           dtype width rows keys warps stages      time        rate   error  over math")
        for dtype, width in product(options.dtypes.split(","), map(int, options.widths.split(","))):
            run(
                options.kernels.split(","), dtype, width, causal=options.rules == "causal", n=options.tokens,
                heads=options.heads, best=options.best,
            )  # fmt: skip
        return
    print("kernel           dtype width rule    rows keys warps stages  registers  stack  shared")
    for name in options.kernels.split(","):
        for dtype in options.dtypes.split(","):
            for width in map(int, options.widths.split(",")):
                for rule in options.rules.split(","):
                    tiles = fused_attention.tiles(name, DTYPES[dtype], width)
                    for tile in tiles[:1] if options.first else tiles:
                        made = compiled(name, dtype, width, rule, tile, options.capability)
                        registers, stack = resources(made.asm["cubin"])
                        sizes = f"{tile.rows:4} {tile.keys:4} {tile.warps:5} {tile.stages:6}"
                        needs = f"{registers:10} {stack:6} {made.metadata.shared:7}"
                        print(f"{name:16} {dtype:5} {width:5} {rule:7} {sizes} {needs}", flush=True)


if __name__ == "__main__":
    main()
