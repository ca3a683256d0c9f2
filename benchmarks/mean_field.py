"""Attention on a measure, beside NumPy as one would write it: P ∝ a e^S as n × n matrices, head by head.

    OMP_NUM_THREADS=1 python benchmarks/mean_field.py
    OMP_NUM_THREADS=1 python benchmarks/mean_field.py --sizes 500,2000

The same measure, in turns. Each row: processor seconds of howsmooth and of NumPy, their ratio, how far the
images are apart, the peak of memory that one push-forward adds in a process of its own, and what one n × n
matrix takes.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import torch
from numpy import ndarray
from turns import medians, options, show

import howsmooth as hs
from howsmooth.measures import DiscreteMeasure

HEADS, DIMENSION = 4, 64


def problem(n: int, *, causal: bool = False) -> tuple[hs.SelfAttention, DiscreteMeasure]:
    generator = torch.Generator().manual_seed(0)
    width = DIMENSION // HEADS
    query, key, value = torch.randn(3, HEADS, width, DIMENSION, generator=generator, dtype=torch.float64) / 8
    output = torch.randn(DIMENSION, DIMENSION, generator=generator, dtype=torch.float64) / 8
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    x = torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64)
    positions = torch.arange(1, n + 1, dtype=torch.float64) / n
    measure = DiscreteMeasure(x, weights / weights.sum(), positions=positions)
    return hs.SelfAttention(query, key, value, output, causal=causal), measure


def plain(f: hs.SelfAttention, measure: DiscreteMeasure, *, causal: bool) -> ndarray:
    x, a = measure.points.numpy(), measure.weights.numpy()
    heads = []
    for Q, K, V in zip(f.query.numpy(), f.key.numpy(), f.value.numpy(), strict=True):
        scores = (x @ Q.T) @ (x @ K.T).T / np.sqrt(len(Q))
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = a * np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(shares / shares.sum(axis=1, keepdims=True) @ (x @ V.T))
    assert f.output is not None
    return np.concatenate(heads, axis=1) @ f.output.numpy().T


def peak(n: int, *, push: bool) -> float:
    """Largest resident size in megabytes of a process that makes the measure, and pushes it or not."""
    code = (
        "import resource, sys; sys.path.insert(0, 'benchmarks'); from mean_field import problem; "
        f"f, mu = problem({n}); {'f(mu); ' if push else ''}"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return int(said) / 1024


def main() -> int:
    arguments = options(__doc__.splitlines()[0], "300,1000,3000").parse_args()
    rows: list[dict[str, object]] = []
    for n in (int(size) for size in arguments.sizes.split(",")):
        for causal in (False, True):
            f, measure = problem(n, causal=causal)
            calls = {"howsmooth": partial(f, measure), "NumPy": partial(plain, f, measure, causal=causal)}
            seconds = medians(calls, arguments.repeats)
            apart = f(measure).points.numpy() - plain(f, measure, causal=causal)
            rows.append(
                {
                    "n": n,
                    "map": f"{HEADS} heads, {'causal' if causal else 'no mask'}",
                    "howsmooth s": seconds["howsmooth"],
                    "NumPy s": seconds["NumPy"],
                    "ratio": seconds["howsmooth"] / seconds["NumPy"],
                    "apart": float(np.abs(apart).max()),
                    "peak MB": peak(n, push=True) - peak(n, push=False) if not causal else float("nan"),
                    "n × n matrix MB": n * n * 8 / 2**20,
                }
            )
    show(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
