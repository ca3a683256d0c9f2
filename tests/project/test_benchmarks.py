"""Benchmarks that look into the library run on small sizes: what they look into may move."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests._selection import others_slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


def failed_unless_zero(code: int = 0) -> None:
    assert code == 0


COMMANDS = {
    "streamed.py --lengths 32 --heads 1 --rounds 1 --cached-up-to 32": "share of blocks",
    "long_sequence.py --n 64 --d 16 --heads 2 --causal --products 1": "product 1:",
    "device.py --device cpu --d 8 --heads 2 --cached 8 --streamed 16 --samples 1 --layer 16": "goal for 490",
    "whole_model.py --lengths 4 --layers 1 --width 32": "power, math",
    "radius.py --only random --layers 1 --tokens 2": "largest loss",
    "whole_model.py --cost --lengths 4 --layers 1 --width 32 --rounds 1": "along the kept graph",
}
QUICK = [command for command in COMMANDS if "long_sequence" in command or "--cost" in command]


@pytest.mark.parametrize("command", others_slow(COMMANDS, QUICK))
def test_a_benchmark_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "exit", failed_unless_zero)
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert COMMANDS[command] in capsys.readouterr().out
