"""How often intervals hold the truth, by simulation; docs/theory/statistics.md shows a part of it.

    python scripts/interval_coverage.py                 # about two minutes on one core
    python scripts/interval_coverage.py --trials 200    # a quick look

Slopes: the textbook interval, the one of howsmooth (HC3), and a bootstrap over the points (BCa), at a true
exponent of 1/4. Correlations: Fisher's interval and the one of howsmooth, at a true correlation of 0.3.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from howsmooth.study.exponents import LEVEL, fit_exponent, radius_correlation

Noise = Callable[[np.ndarray, np.random.Generator], np.ndarray]

DESIGNS = {
    "2:100:2, ten each": np.repeat(np.arange(2, 101, 2), 10),
    "5:100:5, three each": np.repeat(np.arange(5, 101, 5), 3),
    "2, 4, 8, 16, 32, four each": np.repeat([2, 4, 8, 16, 32], 4),
    "12:392:76, one each": np.arange(12, 393, 76),
}
NOISES: dict[str, Noise] = {
    "same": lambda x, draw: 0.1 * draw.standard_normal(len(x)),
    "short more": lambda x, draw: 0.3 * np.exp(0.5 * (x.min() - x)) * draw.standard_normal(len(x)),
    "long more": lambda x, draw: 0.05 * np.exp(0.5 * (x - x.min())) * draw.standard_normal(len(x)),
    "heavy tails": lambda x, draw: 0.1 * draw.standard_t(3, len(x)),
    "skewed": lambda x, draw: 0.1 * (draw.exponential(size=len(x)) - 1),
    "skewed, short more": lambda x, draw: (
        0.3 * np.exp(0.5 * (x.min() - x)) * (draw.exponential(size=len(x)) - 1)
    ),
}
SLOPE = 0.25
CORRELATION = 0.3
FEWEST_TO_RESAMPLE = 20


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--resampled", type=int, default=300, help="trials of the bootstrap, which is slow")
    options = parser.parse_args()
    slopes(options.trials, min(options.trials, options.resampled))
    correlations(options.trials)


def slopes(trials: int, resampled: int) -> None:
    """Print how often the intervals of slopes hold."""
    print("| lengths | spread | textbook | HC3 | bootstrap |\n|---|---|---:|---:|---:|")
    for design, n in DESIGNS.items():
        x = np.log(n)
        for name, noise in NOISES.items():
            draw = np.random.default_rng(1)
            held = np.zeros(3)
            for trial in range(trials):
                y = SLOPE * x + noise(x, draw)
                fit = fit_exponent(n, np.exp(y), np.ones(len(n), dtype=bool))
                line = stats.linregress(x, y)
                half = stats.t.ppf((1 + LEVEL) / 2, len(x) - 2) * line.stderr
                held[:2] += abs(line.slope - SLOPE) <= half, fit.low <= SLOPE <= fit.high
                if trial < resampled and len(x) >= FEWEST_TO_RESAMPLE:
                    held[2] += bootstrap_holds(x, y)
            last = f"{held[2] / resampled:.2f}" if len(x) >= FEWEST_TO_RESAMPLE else ""
            print(
                f"| {design} | {name} | {held[0] / trials:.2f} | {held[1] / trials:.2f} | {last} |",
                flush=True,
            )


def bootstrap_holds(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether the BCa interval over the points holds the slope."""

    def slope(x: np.ndarray, y: np.ndarray, axis: int = -1) -> Any:
        centred = x - x.mean(axis, keepdims=True)
        return (centred * y).sum(axis) / (centred * centred).sum(axis)

    found = stats.bootstrap(
        (x, y), slope, paired=True, vectorized=True, n_resamples=999, rng=np.random.default_rng(0)
    ).confidence_interval
    return bool(found.low <= SLOPE <= found.high)


def correlations(trials: int) -> None:
    """Print how often the intervals of correlations hold."""
    print("\n| lengths | spread | Fisher | jackknife |\n|---|---|---:|---:|")
    for design, n in DESIGNS.items():
        x = np.log(n)
        for name, noise in NOISES.items():
            draw = np.random.default_rng(1)
            spread = np.sqrt(np.mean([(noise(x, draw) ** 2).mean() for _ in range(4000)]))
            slope = CORRELATION / math.sqrt(1 - CORRELATION**2) * spread / x.std()
            fisher = jackknife = 0
            for _ in range(trials):
                found = radius_correlation(n, np.exp(slope * x + noise(x, draw)), LEVEL)
                jackknife += found.low <= CORRELATION <= found.high
                off = math.atanh(found.value) - math.atanh(CORRELATION)
                fisher += abs(off) <= stats.norm.ppf((1 + LEVEL) / 2) / math.sqrt(len(x) - 3)
            print(f"| {design} | {name} | {fisher / trials:.2f} | {jackknife / trials:.2f} |", flush=True)


if __name__ == "__main__":
    main()
