"""Benchmarks that look into the library run on small sizes: what they look into may move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("streamed.py --lengths 32 --heads 1,2 --rounds 1 --cached-up-to 32", "share of blocks"),
        ("long_sequence.py --n 64 --d 16 --heads 2 --causal --products 1", "product 1:"),
        (
            "device.py --device cpu --d 8 --heads 2 --cached 8 --streamed 16 --samples 1 --layer 16",
            "goal for 490",
        ),
        ("device.py --device cpu --d 8 --heads 2 --samples 1 --count", "times fewer"),
    ],
    ids=["streamed", "long sequence", "device", "operations"],
)
def test_a_benchmark_runs(command: str, said: str) -> None:
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
