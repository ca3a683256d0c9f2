"""Distances between measures, beside POT called directly and NumPy as one would write it.

    OMP_NUM_THREADS=1 python benchmarks/transport.py     # some minutes
    OMP_NUM_THREADS=1 python benchmarks/transport.py --sizes 300,1000

The same two measures, in turns. Each row: processor seconds of howsmooth and of the alternative, their ratio,
how far the two values are apart and how wide howsmooth's interval is, both relative. The alternatives give no
interval.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import ot
import torch
from scipy.optimize import linear_sum_assignment
from turns import medians, options, show

from howsmooth.measures import DiscreteMeasure, Gaussian, Transport, conditional_wasserstein, wasserstein

DIMENSION = 16
TOKENS = 16  # a position

Case = tuple[str, str, Callable[[], Transport], Callable[[], float]]


def measure(generator: torch.Generator, n: int, d: int, *, equal: bool = False) -> DiscreteMeasure:
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    return DiscreteMeasure(x, None if equal else weights / weights.sum())


def pot(mu: DiscreteMeasure, nu: DiscreteMeasure) -> float:
    costs = ot.dist(mu.points.numpy(), nu.points.numpy())
    return math.sqrt(ot.emd2(mu.weights.numpy(), nu.weights.numpy(), costs, numItermax=10**8))


def assignment(mu: DiscreteMeasure, nu: DiscreteMeasure) -> float:
    costs = ot.dist(mu.points.numpy(), nu.points.numpy())
    return math.sqrt(costs[linear_sum_assignment(costs)].mean())


def quantiles(mu: DiscreteMeasure, nu: DiscreteMeasure) -> float:
    """∫ |F⁻¹ − G⁻¹|² from sorted atoms and cumulated weights, in plain NumPy."""
    sides = []
    for one in (mu, nu):
        x, weights = one.points[:, 0].numpy(), one.weights.numpy()
        order = np.argsort(x)
        sides.append((x[order], np.cumsum(weights[order])))
    levels = np.unique(np.concatenate([ends for _, ends in sides]))
    here, there = (x[np.minimum(np.searchsorted(ends, levels), len(x) - 1)] for x, ends in sides)
    return math.sqrt(np.diff(levels, prepend=0.0) @ (here - there) ** 2)


def by_position(mu: DiscreteMeasure, nu: DiscreteMeasure) -> float:
    """One call of POT for each position, its atoms found by comparison."""
    assert mu.positions is not None
    assert nu.positions is not None
    a, b, s, t = (v.numpy() for v in (mu.weights, nu.weights, mu.positions, nu.positions))
    x, y = mu.points.numpy(), nu.points.numpy()
    total = 0.0
    for place in np.unique(s):
        here, there = s == place, t == place
        mass = a[here].sum()
        total += mass * ot.emd2(a[here] / mass, b[there] / b[there].sum(), ot.dist(x[here], y[there]))
    return math.sqrt(total)


def cases(n: int) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    mu, nu = (measure(generator, n, DIMENSION) for _ in range(2))
    even = [measure(generator, n, DIMENSION, equal=True) for _ in range(2)]
    moved = DiscreteMeasure(
        mu.points + 1e-3 * torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64), mu.weights
    )
    lines = [measure(generator, n, 1) for _ in range(2)]
    places = (torch.arange(n) // TOKENS).double() / n
    placed = [DiscreteMeasure(one.points, positions=places) for one in even]
    factors = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64)
    laws = [Gaussian(factor[0], factor @ factor.T) for factor in factors]

    def bures() -> float:
        found = ot.gaussian.bures_wasserstein_distance(
            *(law.mean.numpy() for law in laws), *(law.covariance.numpy() for law in laws)
        )
        return float(found)

    return [
        ("any weights", "POT", lambda: wasserstein(mu, nu), lambda: pot(mu, nu)),
        ("equal weights", "SciPy assignment", lambda: wasserstein(*even), lambda: assignment(*even)),
        ("small displacement", "POT", lambda: wasserstein(mu, moved), lambda: pot(mu, moved)),
        ("one dimension", "NumPy quantiles", lambda: wasserstein(*lines), lambda: quantiles(*lines)),
        (
            f"{TOKENS} atoms a position",
            "POT in a loop",
            lambda: conditional_wasserstein(*placed),
            lambda: by_position(*placed),
        ),
        ("Gaussians, d = 64", "POT", lambda: wasserstein(*laws), bures),
    ]


def main() -> int:
    arguments = options(__doc__.splitlines()[0], "300,1000,3000,5000").parse_args()
    rows: list[dict[str, object]] = []
    for n in (int(size) for size in arguments.sizes.split(",")):
        for name, other, ours, theirs in cases(n):
            seconds = medians({"howsmooth": ours, "other": theirs}, arguments.repeats)
            found, value = ours(), theirs()
            rows.append(
                {
                    "n": n,
                    "problem": name,
                    "beside": other,
                    "howsmooth s": seconds["howsmooth"],
                    "other s": seconds["other"],
                    "ratio": seconds["howsmooth"] / seconds["other"],
                    "apart": abs(value / float(found.value) - 1),
                    "interval": found.upper / found.lower - 1,
                    "converged": found.converged,
                }
            )
    show(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
