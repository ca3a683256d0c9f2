"""hs.functional.attention beside PyTorch's scaled_dot_product_attention: time and memory of each derivative.

    python benchmarks/functional.py                        # some minutes
    python benchmarks/functional.py --lengths 512,2048 --memory-lengths 2048

Times are processor seconds, medians of rounds in turns, at batch 1, 12 heads of 64 entries, float32, one
thread; memory is what each adds to the size of a process of its own, at most, on Linux. The math backend is
the only one of PyTorch's that has forward mode and second derivatives; the flash backend has values and
gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from howsmooth.functional import attention

HEADS, SIZE = 12, 64
METHODS = ("howsmooth", "math", "flash")
DERIVATIVES = ("value", "forward", "reverse", "forward over reverse", "reverse over reverse")


def attended(method: str, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return one of the three as a function of queries, keys and values."""
    if method == "howsmooth":
        return lambda q, k, v: attention(q, k, v, causal=causal)
    backend = SDPBackend.MATH if method == "math" else SDPBackend.FLASH_ATTENTION

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return f


def work(derivative: str, method: str, causal: bool, n: int) -> Callable[[], Any]:
    """Return the computation of a derivative at n tokens."""
    generator = torch.Generator().manual_seed(0)
    x = tuple(torch.randn(3, 1, HEADS, n, SIZE, generator=generator))
    d = tuple(torch.randn(3, 1, HEADS, n, SIZE, generator=generator))
    f = attended(method, causal)

    def reverse(*y: Tensor) -> tuple[Tensor, ...]:
        return vjp(f, *y)[1](d[0])

    return {
        "value": lambda: f(*x),
        "forward": lambda: jvp(f, x, d),
        "reverse": lambda: reverse(*x),
        "forward over reverse": lambda: jvp(reverse, x, d),
        "reverse over reverse": lambda: vjp(reverse, *x)[1](d),
    }[derivative]


def able(derivative: str, method: str) -> bool:
    return method != "flash" or derivative in ("value", "reverse")


def seconds(derivative: str, causal: bool, n: int, rounds: int) -> dict[str, float]:
    """Median time of each method, in turns."""
    runs = {method: work(derivative, method, causal, n) for method in METHODS if able(derivative, method)}
    times: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            began = time.process_time()
            run()
            times[method].append(time.process_time() - began)
    return {method: statistics.median(t) for method, t in times.items()}


def added(derivative: str, method: str, causal: bool, n: int) -> float:
    """MiB that a derivative adds to the largest size of a process."""
    command = [sys.executable, __file__, "--one", json.dumps([derivative, method, causal, n])]
    command += ["--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(derivative: str, method: str, causal: bool, n: int) -> None:
    """Print those MiB: of this process."""
    work(derivative, method, causal, 64)()
    run = work(derivative, method, causal, n)
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    before = resident("VmRSS")
    run()
    print((resident("VmHWM") - before) / 1024)


def resident(name: str) -> int:
    """Return a size of this process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def shown(found: dict[str, float], method: str, form: str) -> str:
    if method not in found:
        return "-"
    ratio = "" if method == "howsmooth" else f"  ({found[method] / found['howsmooth']:.2f})"
    return f"{found[method]:{form}}{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="256,1024,4096", help="token counts for times")
    parser.add_argument("--memory-lengths", default="1024,2048", help="token counts for memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        one(*json.loads(options.one))
        return
    console = Console()
    for what, lengths, form in (("seconds", options.lengths, ".3f"), ("MiB", options.memory_lengths, ".0f")):
        table = Table("n", "mask", "derivative", *METHODS, title=f"{what} (over howsmooth)")
        cases = [(int(n), causal) for n in lengths.split(",") for causal in (False, True)]
        every = [(n, causal, derivative) for n, causal in cases for derivative in DERIVATIVES]
        for n, causal, derivative in track(every, description=what, console=Console(stderr=True)):
            if what == "seconds":
                found = seconds(derivative, causal, n, options.rounds)
            else:
                found = {m: added(derivative, m, causal, n) for m in METHODS if able(derivative, m)}
            cells = (shown(found, method, form) for method in METHODS)
            table.add_row(str(n), "causal" if causal else "none", derivative, *cells)
        console.print(table)


if __name__ == "__main__":
    main()
