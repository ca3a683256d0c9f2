"""What the kernels of hs.functional.attention need of a CUDA device: read from the compiler, without one.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --capability 80 --dtypes bf16 --widths 64 --rules causal

Each kernel is compiled in each of the sizes of tiles that are tried on a device, in that order. Registers are
those of a thread; the bytes on its stack are what did not fit into these, and are slow; shared memory is that
of a block of threads.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from howsmooth.functional import fused_attention, fused_kernels
from howsmooth.triton_launch import Tile

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


def compiled(name: str, dtype: str, width: int, rule: str, tile: Tile, capability: int) -> object:
    """Compile one kernel for operands of this many entries."""
    kernel = getattr(fused_kernels, name)
    values = {**dict.fromkeys(FLAGS, False), **RULES[rule]}
    values |= {"KEY": width, "VALUE": width, "WIDTH": width, "ROWS": tile.rows, "KEYS": tile.keys}
    values["PRECISION"] = fused_attention.precision(DTYPES[dtype])
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
    options = parser.parse_args()
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
