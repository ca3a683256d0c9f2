"""Growth laws: how time and memory of a product with JᵀJ grow, as slopes with intervals beside theory.

    python benchmarks/growth.py                      # all laws, some minutes on two cores
    python benchmarks/growth.py --only memory --rounds 3
    python benchmarks/growth.py --json growth.json

Times are of one product with JᵀJ (float32) after linearisation, in rounds over all sizes in a random order;
each timing is a point of the fit log time = c + slope · log size, with the interval for slopes that the
library gives its exponents (HC3, 95 %). Memory is what the peak of a process of its own rises above what it
held before linearisation (Linux). "Core" is softmax attention alone, given queries, keys and values: there
the part in n² is alone; "layer" has the projections of the tokens as well.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import howsmooth as hs
from howsmooth.attention.masks import Visibility
from howsmooth.attention.scaled_dot_product import NO_FEATURES
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.streamed_softmax import streamed_derivative
from howsmooth.study.exponents import fit_exponent

WIDTH = 64  # of a head

Run = Callable[[], object]


@dataclass(frozen=True)
class Law:
    """What is measured, against what, and the slope that theory gives."""

    measured: str
    against: str
    theory: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Run] | None = None  # None: memory, in a process of its own


def core(n: int, heads: int, width: int = WIDTH, *, causal: bool = False, window: int | None = None) -> Run:
    """JᵀJ of softmax attention in the streamed form, nothing before or after it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, n, width, generator=generator, dtype=torch.float64)
    visibility = Visibility(n, causal, window)
    operands = Operands.of_heads(q[:, :, None], k, v, width**-0.5, NO_FEATURES)
    at = streamed_derivative(operands, visibility, torch.float32)
    dq, dk, dv = torch.randn(3, heads, n, width, generator=generator)
    return lambda: at.gram(dq, dk, dv, lambda member, rows, do: do)


def layer(
    n: int, d: int, batch: int = 1, *, streamed: bool, causal: bool = False, window: int | None = None
) -> Run:
    """JᵀJ of a whole layer, linearised here."""
    generator = torch.Generator().manual_seed(0)
    heads = d // WIDTH
    query, key, value = torch.randn(3, heads, WIDTH, d, generator=generator) / d**0.5
    output = torch.randn(d, d, generator=generator) / d**0.5
    f = hs.SelfAttention(query, key, value, output, causal=causal, window=window)
    x, e = torch.randn(2, batch, n, d, generator=generator)
    operator = closed_form_jacobian(f, x, streamed=streamed)
    return lambda: operator.gram_product(e)


#: What a process of its own measures, by the name of the law.
MEMORY: dict[str, Callable[[int], Run]] = {
    "memory, streamed layer, causal": lambda n: layer(n, 256, streamed=True, causal=True),
    "memory, streamed layer, causal window 256": lambda n: layer(
        n, 256, streamed=True, causal=True, window=256
    ),
    "memory, cached layer": lambda n: layer(n, 256, streamed=False),
    "memory, cached layer, n = 128": lambda batch: layer(128, 256, batch, streamed=False),
}

LAWS = (
    Law("time, streamed core, 4 heads", "n", "2", (1024, 1536, 2048, 3072, 4096, 6144), lambda n: core(n, 4)),
    Law(
        "time, streamed core, 4 heads, causal",
        "n",
        "2",
        (1536, 2048, 3072, 4096, 6144, 8192),
        lambda n: core(n, 4, causal=True),
    ),
    Law(
        "time, streamed core, 4 heads, causal window 256",
        "n",
        "1",
        (4096, 8192, 12288, 16384, 24576, 32768),
        lambda n: core(n, 4, causal=True, window=256),
    ),
    Law(
        "time, cached layer, d = 256",
        "n",
        "2 once n is over d",
        (768, 1024, 1536, 2048, 3072),
        lambda n: layer(n, 256, streamed=False),
    ),
    Law(
        f"time, streamed core, n = 2048, heads of {WIDTH}",
        "heads",
        "1",
        (1, 2, 3, 4, 6, 8, 12),
        lambda heads: core(2048, heads),
    ),
    Law(
        "time, streamed core, n = 2048, 4 heads",
        "head dimension",
        "1, less the exponentials",
        (64, 96, 128, 192, 256),
        lambda width: core(2048, 4, width),
    ),
    Law(
        "time, cached layer, n = 64",
        "d",
        "2, the projections",
        (384, 512, 768, 1024, 1536),
        lambda d: layer(64, d, streamed=False),
    ),
    Law(
        f"time, streamed layer, n = 2048, heads of {WIDTH}",
        "d",
        "1 to 2",
        (128, 192, 256, 384, 512, 768),
        lambda d: layer(2048, d, streamed=True),
    ),
    Law(
        "time, cached layer, d = 256, n = 128",
        "batch",
        "1",
        (4, 6, 8, 12, 16, 24, 32),
        lambda batch: layer(128, 256, batch, streamed=False),
    ),
    Law("memory, streamed layer, causal", "n", "1, beside 20 MiB", (6144, 8192, 12288, 16384)),
    Law("memory, streamed layer, causal window 256", "n", "1, beside 20 MiB", (16384, 24576, 32768, 49152)),
    Law("memory, cached layer", "n", "2", (2048, 3072, 4096, 5120)),
    Law("memory, cached layer, n = 128", "batch", "1", (64, 96, 128, 192)),
)


def times(law: Law, rounds: int) -> list[tuple[int, float]]:
    """Time every size once a round, in a random order."""
    assert law.prepare is not None
    order = random.Random(0)
    points: list[tuple[int, float]] = []
    prepared = {size: law.prepare(size) for size in law.sizes}
    for run in prepared.values():
        run()
    for _ in range(rounds):
        for size in order.sample(law.sizes, len(law.sizes)):
            began = time.perf_counter()
            prepared[size]()
            points.append((size, time.perf_counter() - began))
    return points


def memory(law: Law, threads: int) -> list[tuple[int, float]]:
    """Bytes that linearising and one product add to a process, for every size."""
    points = []
    for size in law.sizes:
        command = [sys.executable, __file__, "--probe", law.measured, str(size), "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        points.append((size, float(done.stdout)))
    return points


def resident(which: str) -> int:
    """Resident size of this process in bytes: VmRSS now, VmHWM its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


def probe(name: str, size: int) -> None:
    """Print by how much the peak rises."""
    MEMORY[name](1)()  # loads what a product needs of PyTorch
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    MEMORY[name](size)()
    print(resident("VmHWM") - before)


def fitted(law: Law, points: Sequence[tuple[int, float]]) -> dict[str, object]:
    sizes, values = np.array(points, dtype=float).T
    fit = fit_exponent(sizes, values, np.ones(len(sizes), dtype=bool))
    largest = statistics.median(value for size, value in points if size == max(law.sizes))
    return {
        "measured": law.measured,
        "against": law.against,
        "from": min(law.sizes),
        "to": max(law.sizes),
        "theory": law.theory,
        "slope": fit.slope,
        "low": fit.low,
        "high": fit.high,
        "largest": largest,
        "points": [list(point) for point in points],
    }


def in_words(row: dict[str, object]) -> str:
    """One row of a Markdown table."""
    largest = float(str(row["largest"]))
    size = f"{largest:.3g} s" if str(row["measured"]).startswith("time") else f"{largest / 2**20:.0f} MiB"
    slope = f"{row['slope']:.2f} | {row['low']:.2f} to {row['high']:.2f}"
    where = f"{row['against']} | {row['from']} to {row['to']}"
    return f"| {row['measured']} | {where} | {row['theory']} | {slope} | {size} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timings of each size")
    parser.add_argument("--only", default="", help="laws whose name holds these words")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--probe", nargs=2, metavar=("LAW", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.probe:
        probe(arguments.probe[0], int(arguments.probe[1]))
        return 0
    print("| | against | range | theory | slope | 95 % interval | at the largest |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for law in LAWS:
        if arguments.only not in law.measured:
            continue
        timed = law.prepare is not None
        rows.append(fitted(law, times(law, arguments.rounds) if timed else memory(law, arguments.threads)))
        print(in_words(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
