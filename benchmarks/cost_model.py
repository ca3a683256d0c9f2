"""What ``--dry-run`` predicts, beside what then happens.

    python benchmarks/cost_model.py            # the built-in models at the default lengths, some minutes
    OMP_NUM_THREADS=1 python benchmarks/cost_model.py --processor --models builtin-encoder --lengths 4:40:12

Calibrates the machine, predicts each study, carries it out in a temporary folder, and prints predicted
over actual: in all, and length by length for what was measured. With ``--processor`` times are of the
processor and not of the clock on the wall, for machines that are busy with other work; use one thread then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from howsmooth.study.calibration import measure_rates
from howsmooth.study.forecast import Forecast, forecast
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.progress import Progress
from howsmooth.study.publish import publish
from howsmooth.study.ranges import Ranges
from howsmooth.study.run import run
from howsmooth.study.tools import default_tools


def peak() -> float:
    """Bytes that the process has held at most since the last call of ``forget_peak``."""
    words = Path("/proc/self/status").read_text("ascii").split("VmHWM:")[1].split()
    return float(words[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def actual(plan: Plan, clock: Callable[[], float]) -> tuple[dict[int, float], dict[int, float], float]:
    """Carry a plan out; return seconds and peak memory of each length, and seconds in all."""
    spent: dict[int, float] = defaultdict(float)
    memory: dict[int, float] = defaultdict(float)
    last = began = clock()

    def heard(progress: Progress) -> None:
        nonlocal last
        now = clock()
        if progress.bounding:
            last = now
            return
        if progress.layer >= 0:
            spent[progress.n] += now - last
            memory[progress.n] = max(memory[progress.n], peak())
            forget_peak()
        last = now

    with tempfile.TemporaryDirectory() as folder:
        run(plan, Path(folder), default_tools(), on_progress=heard)
        publish(Path(folder))
    return spent, memory, clock() - began


def compare(plan: Plan, said: Forecast, clock: Callable[[], float]) -> list[float]:
    """Carry a plan out and print predicted over actual; return these ratios."""
    spent, memory, total = actual(plan, clock)
    ratios = []
    print("     n  predicted s   actual s  ratio  predicted MB  actual MB")
    for n in sorted(spent):
        here = [part for part in said.parts if part.n == n]
        seconds, held = sum(part.seconds for part in here), max(part.memory for part in here)
        ratios.append(seconds / spent[n])
        print(
            f"{n:6d} {seconds:12.2f} {spent[n]:10.2f} {ratios[-1]:6.2f} {held / 1e6:13.0f} "
            f"{memory[n] / 1e6:10.0f}"
        )
    ratios.append(said.seconds / total)
    print(
        f"   all {said.seconds:12.2f} {total:10.2f} {ratios[-1]:6.2f}   of it, predicted: measuring "
        f"{sum(part.seconds for part in said.parts):.1f}, bounds {said.bounds:.1f}, reading and loading "
        f"{said.preparing:.1f}, report {said.drawing:.1f}; range {said.low:.1f} to {said.high:.1f}"
    )
    for name, steps in said.steps.items():
        print(
            f"       {', '.join(name)}: {steps.low:.0f} to {steps.high:.0f} steps, likely {steps.likely:.0f} "
            f"({steps.source})"
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["builtin-encoder", "builtin-decoder"])
    parser.add_argument("--random-init", action="store_true")
    parser.add_argument("--lengths", default="2:100:2")
    parser.add_argument("--layers", default="all")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--scopes", nargs="+", default=["attention"])
    parser.add_argument("--no-bounds", action="store_true")
    parser.add_argument("--processor", action="store_true", help="times of the processor, with one thread")
    options = parser.parse_args()
    clock = time.process_time if options.processor else time.perf_counter
    began = clock()
    rates = measure_rates("cpu", clock)
    with_what = f"{torch.get_num_threads()} threads; torch {torch.__version__}"
    print(f"calibrated in {clock() - began:.1f} s; {with_what}")
    worst = []
    for name in options.models:
        plan = Plan(
            models=(ModelSpec(name, random_init=options.random_init),),
            lengths=Ranges.parse(options.lengths, "lengths").values(),
            layers=Ranges.parse(options.layers, "layers"),
            samples=options.samples,
            scopes=tuple(options.scopes),
            bounds=not options.no_bounds,
        )
        began = clock()
        with tempfile.TemporaryDirectory() as folder:
            said = forecast(plan, Path(folder), default_tools(), rates, clock=clock)
        print(f"\n{name}: predicted in {clock() - began:.1f} s")
        worst += compare(plan, said, clock)
    print(f"\npredicted over actual: {min(worst):.2f} to {max(worst):.2f}")


if __name__ == "__main__":
    main()
