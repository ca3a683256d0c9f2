"""Time and memory of ``hs.influence`` for one layer, and beside the dense Jacobian where that fits.

    python benchmarks/influence.py                # 256 tokens of dimension 768, 12 heads; about a minute
    python benchmarks/influence.py --n 64 --causal

Measures all blocks of an untrained layer in float32, then compares with ``torch.func.jacrev`` and the norms
of its blocks, in the same dtype, at a size where the n² d² numbers fit. Processor seconds are what other work
on the machine disturbs least; with ``--threads 1`` they are the time on a quiet core.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.profiling import Influence


def layer(d: int, heads: int, *, causal: bool) -> hs.SelfAttention:
    """An untrained layer with scores of order one on standard Gaussian tokens."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, d, d, generator=generator) / d**0.5
    query, key, value = (w.unflatten(0, (heads, -1)) for w in weights[:3])
    return hs.SelfAttention(query, key, value, weights[3], causal=causal)


def timed(work: Callable[[], object]) -> tuple[object, float, float]:
    """Return the result of some work, its seconds on the clock and its processor seconds."""
    began, used = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - began, time.process_time() - used


def dense_norms(f: hs.SelfAttention, x: Tensor) -> Tensor:
    """The norms of the blocks of the dense Jacobian (n, d_out, n, d)."""
    return torch.linalg.matrix_norm(torch.func.jacrev(f)(x).transpose(1, 2), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rtol", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dense", default="32,128,4", help="n, d and heads of the comparison")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    print(f"{options.threads} threads; torch {torch.__version__}")

    f = layer(options.d, options.heads, causal=options.causal)
    x = torch.randn(options.n, options.d, generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, clock, used = timed(lambda: hs.influence(f, x, rtol=options.rtol))
    assert isinstance(found, Influence)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = found.iterations[found.iterations > 0].double()
    print(
        f"n = {options.n}, d = {options.d}, {options.heads} heads: {clock:.1f} s, {used:.1f} processor "
        f"seconds, {peak / 2**20:.2f} GiB at its peak ({before / 2**20:.2f} before); "
        f"{float(steps.mean()):.1f} steps on average, at most {int(steps.max())}; "
        f"{100 * float(found.converged.double().mean()):.4g} % converged to {options.rtol:g}"
    )
    print(f"token-wise constant: {found.token_wise}")

    n, d, heads = (int(number) for number in options.dense.split(","))
    f, x = layer(d, heads, causal=options.causal), torch.randn(n, d, generator=generator)
    ours, clock, used = timed(lambda: hs.influence(f, x, rtol=options.rtol))
    dense, dense_clock, dense_used = timed(lambda: dense_norms(f, x))
    assert isinstance(ours, Influence)
    assert isinstance(dense, Tensor)
    off = ((ours.value - dense).abs() / dense.clamp_min(1e-30))[dense > 0].max()
    print(
        f"n = {n}, d = {d}, {heads} heads: influence {clock:.2f} s ({used:.2f} processor seconds), dense "
        f"Jacobian and its norms {dense_clock:.2f} s ({dense_used:.2f}); dense / influence "
        f"{dense_used / used:.1f}; values differ by at most {float(off):.1e}"
    )


if __name__ == "__main__":
    main()
