"""hs.functional.attention beside PyTorch's scaled_dot_product_attention: time and memory of each derivative.

    python benchmarks/functional.py                        # some minutes
    python benchmarks/functional.py --lengths 512,2048 --memory-lengths 2048
    python benchmarks/functional.py --device cuda --dtype bfloat16 --lengths 2048,8192 --memory-lengths 8192

Times are processor seconds, medians of rounds in turns, at batch 1, 12 heads of 64 entries, one thread;
memory is what each adds to the size of a process of its own, at most, on Linux. On a CUDA device they are
seconds on the clock and what each adds to the memory that is allocated there. The math backend is the only
one of PyTorch's that has forward mode and second derivatives; the flash backend and FlexAttention, which is
for CUDA devices here, have values and gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from howsmooth.functional import attention

HEADS, SIZE = 12, 64
METHODS = ("howsmooth", "math", "flash")
ON_CUDA = ("kernels", *METHODS, "flex")
DERIVATIVES = ("value", "forward", "reverse", "forward over reverse", "reverse over reverse")


@dataclass(frozen=True)
class Case:
    """A derivative by one of the methods."""

    derivative: str
    method: str
    causal: bool
    n: int
    device: str
    dtype: str


def attended(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return one of the methods as a function of queries, keys and values."""
    causal = case.causal
    if case.method in ("howsmooth", "kernels"):
        return lambda q, k, v: attention(q, k, v, causal=causal, kernels=case.method == "kernels")
    if case.method == "flex":
        blocks = None
        if causal:
            blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, case.n, case.n, case.device)
        return partial(torch.compile(flex_attention), block_mask=blocks)
    backend = SDPBackend.MATH if case.method == "math" else SDPBackend.FLASH_ATTENTION

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return f


def work(case: Case) -> Callable[[], Any]:
    """Return the computation of a derivative."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 3, 1, HEADS, case.n, SIZE, generator=generator)
    x, d = drawn.to(device=case.device, dtype=getattr(torch, case.dtype)).unbind()
    f = attended(case)

    def reverse(*y: Tensor) -> tuple[Tensor, ...]:
        return vjp(f, *y)[1](d[0])

    def backward() -> tuple[Tensor, ...]:
        y = [t.detach().requires_grad_() for t in x]
        return torch.autograd.grad(f(*y), y, d[0])

    return {
        "value": lambda: f(*x),
        "forward": lambda: jvp(f, tuple(x), tuple(d)),
        # FlexAttention is not known to torch.func.
        "reverse": backward if case.method == "flex" else lambda: reverse(*x),
        "forward over reverse": lambda: jvp(reverse, tuple(x), tuple(d)),
        "reverse over reverse": lambda: vjp(reverse, *x)[1](tuple(d)),
    }[case.derivative]


def able(case: Case) -> bool:
    """Tell whether a method has a derivative; PyTorch's flash kernels for CUDA devices have no float32."""
    if case.method == "flash" and (case.device, case.dtype) == ("cuda", "float32"):
        return False
    return case.method not in ("flash", "flex") or case.derivative in ("value", "reverse")


def now(device: str) -> float:
    """Processor seconds; on another device seconds on the clock, once it has done what was asked of it."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """Median time of each method, in turns, after a round that is not counted."""
    runs = {method: work(case) for method, case in cases.items()}
    times: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds + 1):
        for method, run in runs.items():
            device = cases[method].device
            began = now(device)
            run()
            times[method].append(now(device) - began)
    return {method: statistics.median(t[1:]) for method, t in times.items()}


def added(case: Case) -> float:
    """MiB that a derivative adds, at most."""
    if case.device != "cpu":
        run = work(case)
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case))]
    command += ["--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(case: Case) -> None:
    """Print those MiB: of this process."""
    work(replace(case, n=64))()
    run = work(case)
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
    first = next(iter(found))
    ratio = "" if method == first else f"  ({found[method] / found[first]:.2f})"
    return f"{found[method]:{form}}{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="256,1024,4096", help="token counts for times")
    parser.add_argument("--memory-lengths", default="1024,2048", help="token counts for memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        one(Case(**json.loads(options.one)))
        return
    methods, console = ON_CUDA if options.device == "cuda" else METHODS, Console()
    for what, lengths, form in (("seconds", options.lengths, ".3g"), ("MiB", options.memory_lengths, ".0f")):
        table = Table("n", "mask", "derivative", *methods, title=f"{what} (over {methods[0]})")
        settings = [(int(n), causal) for n in lengths.split(",") for causal in (False, True)]
        every = [(n, causal, derivative) for n, causal in settings for derivative in DERIVATIVES]
        for n, causal, derivative in track(every, description=what, console=Console(stderr=True)):
            every_case = (Case(derivative, m, causal, n, options.device, options.dtype) for m in methods)
            cases = {case.method: case for case in every_case if able(case)}
            if what == "seconds":
                found = seconds(cases, options.rounds)
            else:
                found = {method: added(case) for method, case in cases.items()}
            cells = (shown(found, method, form) for method in methods)
            table.add_row(str(n), "causal" if causal else "none", derivative, *cells)
        console.print(table)


if __name__ == "__main__":
    main()
