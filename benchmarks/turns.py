"""Candidates timed in turns on the same input, so that what else the machine does falls on all alike."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
import torch


def medians(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor seconds of each candidate, the median over rounds in which each is called once.

    PyTorch on one thread (OMP_NUM_THREADS=1 does the same for NumPy), so that what else runs does not count.
    """
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def options(description: str, sizes: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", default=sizes, help="numbers of atoms, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is taken")
    parser.add_argument("--json", type=Path, help="write the table here, too")
    return parser


def show(rows: list[dict[str, object]], target: Path | None) -> None:
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    if target:
        target.write_text(json.dumps(rows, indent=1))
