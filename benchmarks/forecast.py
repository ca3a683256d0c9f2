"""What ``--dry-run`` predicts, beside what then happens.

    python benchmarks/forecast.py            # the built-in models at the default lengths, some minutes
    python benchmarks/forecast.py --models builtin-encoder --lengths 4:40:12

Predicts each study, carries it out in a temporary folder, and prints predicted over actual seconds: length by
length for what was measured, and in all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import Plan
from howsmooth.study.records import Measurement
from howsmooth.study.resource_forecast import forecast
from howsmooth.study.store import Store


def compare(plan: Plan) -> list[float]:
    """Predict a plan and carry it out; print predicted over actual, and return these ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = forecast(plan, folder)
        began = time.monotonic()
        run(plan, folder)
        write_outputs(folder)
        total = time.monotonic() - began
        with Store.open(folder, write=False) as store:
            estimates = store.table(Measurement).groupby("n")["seconds"].sum()
    print("     n  predicted s   estimates s")
    for n, seconds in estimates.items():
        expected = sum(part.seconds for part in said.parts if part.n == n)
        print(f"{n:6d} {expected:12.2f} {seconds:13.2f}")
    print(
        f"   all {said.seconds:12.2f} {total:13.2f}   predicted over actual {said.seconds / total:.2f}; of "
        f"it measuring {sum(part.seconds for part in said.parts):.1f}, bounds {said.bounds:.1f}, reading "
        f"{said.preparing:.1f}, report {said.drawing:.1f}"
    )
    return [said.seconds / total]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["builtin-encoder", "builtin-decoder"])
    parser.add_argument("--random-init", action="store_true")
    parser.add_argument("--lengths", default="2:100:2")
    parser.add_argument("--layers", default="all")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--scopes", nargs="+", default=["attention"])
    parser.add_argument("--bounds", default="auto")
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads; torch {torch.__version__}")
    ratios = []
    for name in options.models:
        plan = Plan(
            models=name,
            random_init=options.random_init,
            lengths=options.lengths,
            layers=options.layers,
            samples=options.samples,
            scopes=tuple(options.scopes),
            bounds=options.bounds,
        )
        print(f"\n{name}")
        ratios += compare(plan)
    print(f"\npredicted over actual: {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
