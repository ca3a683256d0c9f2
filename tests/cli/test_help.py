"""The help of each command, and what a shell sees: examples to copy, pipes, tables and progress."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from howsmooth.cli import app, main
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import show_table
from howsmooth.words import duration
from tests._classifier import save_classifier

Capture = pytest.CaptureFixture[str]
PROGRAM: Any = typer.main.get_command(app)
COMMANDS = tuple(PROGRAM.commands)


def examples_of(command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The lines of the help that begin with the name of the program, as a shell splits them."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert not re.search("[\U0001f000-\U0001ffff]", said)  # an emoji for numbers between colons
    lines = [line.strip() for line in said.splitlines() if line.startswith(" howsmooth ")]
    return [line.partition(" > ")[0].split()[1:] for line in lines]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_of_the_help_is_a_whole_line_that_the_command_parses(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = examples_of(command, capsys, monkeypatch)
    assert len(examples) >= 4
    for name, *arguments in examples:
        assert name == command
        # Raises an error for an unknown option, a missing argument, or a word too many.
        PROGRAM.commands[name].make_context(name, arguments)
        assert len(" ".join(["howsmooth", name, *arguments])) <= 78


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_example_runs_as_printed(
    command: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text('models = ["builtin-encoder"]\nlengths = "4,8,12"\nsamples = 2\n')
    if command == "radius":
        save_classifier(Path("model"))
        Path("letter.txt").write_text("the cat sat")
    assert main(examples_of(command, capsys, monkeypatch)[0]) == 0


# ---- pipes


@pytest.mark.parametrize(
    "arguments", [["--help"], pytest.param(["reproduce", "--list"], marks=pytest.mark.slow)]
)
def test_a_reader_that_ends_early_ends_the_program_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "howsmooth.cli", *arguments]
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_under_the_output_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        program = [sys.executable, "-m", "howsmooth.cli", "--help"]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: The output cannot be written: the disk is full.")
    assert done.stderr.count("\n") == 1


def test_in_a_pipe_no_cell_is_cut_or_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    row = ["causal_two_heavy_tokens_lower_bound" * 2, "1.5", "a source " * 20 + "ends"]
    show_table(["bound", "value", "source"], [row], wrapped=["source"])
    assert all(cell in out.getvalue().splitlines()[1] for cell in row)


def test_no_number_is_cut_off_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    row = ["encoder.layers.0.block.attention.norm", "0.999525", "16 to 1", "1234567.25", "8593.111"]
    show_table(["module", "constant", "tokens", "radius in", "radius out"], [row], left=["module"])
    show_table(["n", "measurements", "time", "memory", "tried"], [[row[3]] * 5])
    out = capsys.readouterr().out
    assert all(cell in out for cell in row[1:])
    assert "radius out" in out
    assert out.count(row[3]) == 6
    assert row[0] in "".join(line.split()[0] for line in out.splitlines()[1:4])


def test_a_line_of_progress_says_that_something_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("howsmooth.cli.progress.time.monotonic", lambda: float(next(clock)))
    with shown_progress(quiet=False) as display:
        display.phase("Measuring")
        for done in range(5):
            display.advance(float(done), 4.0, f"layer {done}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[-1] for line in lines] == ["Measuring", " layer 1", " layer 2", " layer 3"]
    assert "75 %" in lines[-1]
    assert duration(-0.3) == duration(0.0) == "0 s"


def test_a_program_does_not_let_matplotlib_speak_of_its_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    logger = logging.getLogger("matplotlib")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr("howsmooth.cli.signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["howsmooth", "--version"])
    assert main() == 0
    logger.warning("it uses a temporary folder")
    assert capsys.readouterr().err == ""
    assert not logger.isEnabledFor(logging.WARNING)
