"""Flows beside plain RK4 loops in PyTorch and NumPy, their memory, and growth beside dense derivatives.

    python benchmarks/flow.py
    python benchmarks/flow.py --sizes 100,1000 --growth-sizes 8,16 --memory-tokens 5000

All take the same steps of the 3/8 rule, in turns. "autograd loop" is attention as a PyTorch module whose
parameters ask for gradients, called in a loop; "no_grad loop" the same under ``torch.no_grad``. Memory is
what a flow adds to the resident size of its process, at the most. Growth is measured at rtol 1e-6, with the
constants of the steps, against reverse-mode autodiff of the whole loop, one product a row, and the singular
values of what that gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn
from turns import medians, options, show

import howsmooth as hs
from howsmooth.dynamics import flow, growth

Array = TypeVar("Array", Tensor, ndarray)

HEADS, DIMENSION, STEPS, STEP = 4, 64, 10, 0.1


def problem(n: int, d: int = DIMENSION, heads: int = HEADS) -> tuple[hs.SelfAttention, Tensor]:
    """Gaussian heads and tokens, float64."""
    generator = torch.Generator().manual_seed(0)
    width = d // heads
    query, key, value = torch.randn(3, heads, width, d, generator=generator, dtype=torch.float64) / d**0.5
    output = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return hs.SelfAttention(query, key, value, output), x


class Plain(nn.Module):
    """Multi-head attention as one writes it."""

    def __init__(self, f: hs.SelfAttention) -> None:
        super().__init__()
        assert f.output is not None
        self.query, self.key, self.value, self.output = (
            nn.Parameter(t.clone()) for t in (f.query, f.key, f.value, f.output)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("hkd,nd->hnk", w, x) for w in (self.query, self.key, self.value))
        p = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        return (p @ v).transpose(0, 1).flatten(1) @ self.output.mT


def numpy_attention(f: hs.SelfAttention) -> Callable[[ndarray], ndarray]:
    """Multi-head attention in NumPy, head by head."""
    assert f.output is not None
    output = f.output.numpy()
    weights = list(zip(f.query.numpy(), f.key.numpy(), f.value.numpy(), strict=True))

    def attention(x: ndarray) -> ndarray:
        heads = []
        for Q, K, V in weights:
            scores = (x @ Q.T) @ (x @ K.T).T / np.sqrt(len(Q))
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(p / p.sum(axis=1, keepdims=True) @ (x @ V.T))
        return np.concatenate(heads, axis=1) @ output.T

    return attention


def loop(f: Callable[[Array], Array], x: Array) -> Array:
    """STEPS steps of the 3/8 rule."""
    h = STEP
    for _ in range(STEPS):
        a = f(x)
        b = f(x + h * a / 3)
        c = f(x + h * (b - a / 3))
        d = f(x + h * (a - b + c))
        x = x + h * (a + 3 * (b + c) + d) / 8
    return x


def without_gradients(f: Plain, x: Tensor) -> Tensor:
    """Return the loop under no_grad."""
    with torch.no_grad():
        return loop(f, x)


def ours(f: hs.SelfAttention, x: Tensor) -> Tensor:
    """Return what howsmooth flows to."""
    reached: Tensor = flow(f, x, [0.0, STEPS * STEP], method="rk4", step=STEP).points[-1]
    return reached


def speed(sizes: list[int], repeats: int) -> list[dict[str, object]]:
    """Part 1: the loops in turns."""
    rows: list[dict[str, object]] = []
    for n in sizes:
        f, x = problem(n)
        module, attention = Plain(f), numpy_attention(f)
        calls = {
            "howsmooth": partial(ours, f, x),
            "autograd loop": partial(loop, module, x),
            "no_grad loop": partial(without_gradients, module, x),
            "NumPy": partial(loop, attention, x.numpy()),
        }
        seconds = medians(calls, repeats)
        apart = float((ours(f, x) - without_gradients(module, x)).abs().max())
        times = {
            f"{name} / howsmooth": s / seconds["howsmooth"]
            for name, s in seconds.items()
            if name != "howsmooth"
        }
        rows.append({"n": n, "howsmooth s": seconds["howsmooth"], **times, "apart": apart})
    return rows


def peak(n: int) -> float:
    """Megabytes that one Euler step of n tokens adds to the resident size of its process (Linux)."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); from flow import *; "
        f"f, x = problem({n}, 8, 2); f(x[:10]); before = resident('VmRSS'); "
        "open('/proc/self/clear_refs', 'w').write('5'); "
        "flow(f, x, [0.0, 0.1], method='euler', step=0.1); print(resident('VmHWM') - before)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return int(said) / 1024


def resident(which: str) -> int:
    """Return the resident size of this process in kilobytes: VmRSS now, VmHWM its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1])


def memory(n: int) -> list[dict[str, object]]:
    """Part 2: one Euler step of n tokens, d = 8, two heads."""
    return [{"tokens": n, "added MB": peak(n), "one n × n matrix MB": n * n * 8 / 2**20}]


def dense(f: hs.SelfAttention, x: Tensor) -> float:
    """Return the norm of the dense derivative of the whole loop."""
    jacobian = torch.autograd.functional.jacobian(partial(loop, Plain(f).requires_grad_(False)), x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(x.numel(), -1), 2))


def spread(f: hs.SelfAttention, x: Tensor) -> float:
    """Return the growth as howsmooth measures it."""
    found = growth(f, x, [0.0, STEPS * STEP], step=STEP, rtol=1e-6, estimate_error=False)
    return float(found.value[-1])


def growths(sizes: list[int], repeats: int) -> list[dict[str, object]]:
    """Part 3: growth beside the dense derivative."""
    rows: list[dict[str, object]] = []
    for n in sizes:
        f, x = problem(n, 32, 2)
        seconds = medians({"howsmooth": partial(spread, f, x), "dense": partial(dense, f, x)}, repeats)
        truth = dense(f, x)
        rows.append(
            {
                "n": n,
                "howsmooth s": seconds["howsmooth"],
                "dense / howsmooth": seconds["dense"] / seconds["howsmooth"],
                "relative error": abs(spread(f, x) - truth) / truth,
            }
        )
    return rows


def main() -> int:
    """Run all three parts and print them."""
    parser = options(__doc__.splitlines()[0], "50,200,1000")
    parser.add_argument("--growth-sizes", default="8,32,64")
    parser.add_argument("--memory-tokens", type=int, default=20_000)
    arguments = parser.parse_args()
    sizes, growth_sizes = (
        [int(n) for n in given.split(",")] for given in (arguments.sizes, arguments.growth_sizes)
    )
    parts = {
        "speed": speed(sizes, arguments.repeats),
        "memory": memory(arguments.memory_tokens),
        "growth": growths(growth_sizes, arguments.repeats),
    }
    for rows in parts.values():
        show(rows, None)
    if arguments.json:
        arguments.json.write_text(json.dumps(parts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
