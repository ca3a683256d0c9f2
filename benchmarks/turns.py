"""Candidates timed in turns on the same input, so that what else the machine does falls on all alike."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd


def medians(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each candidate, the median over rounds in which each is called once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def options(description: str, sizes: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", default=sizes, help="numbers of atoms, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is taken")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--json", type=Path, help="write the table here, too")
    return parser


def show(rows: list[dict[str, object]], target: Path | None) -> None:
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    if target:
        target.write_text(json.dumps(rows, indent=1))
