"""Command lines that nobody would write: each ends in an exit code and one sentence.

Models and texts are stand-ins, so that many can be tried; plan files have a test like it.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from howsmooth.cli import app, main
from howsmooth.errors import ModelError
from howsmooth.models.loading.load import _device as check_device
from tests._sources import SmallModel, plain_table, small_tools
from tests._study import installed, make_tools, words

# Command lines that work.
USUAL = {
    "measure": ["small", "--text", "prose", "--lengths", "2,3", "--samples", "1"],
    "bound": ["small", "--text", "prose", "--lengths", "3", "--layers", "0"],
}


@contextlib.contextmanager
def workplace(command: str) -> Iterator[Path]:
    """A folder to work in, with files that commands can be given, and stand-ins for all that takes long."""
    with tempfile.TemporaryDirectory() as above, pytest.MonkeyPatch.context() as patch:
        root = Path(above, "root")
        (root / "folder").mkdir(parents=True)
        patch.chdir(root)
        np.save("start.npy", np.arange(6.0).reshape(3, 2))
        Path("prose.txt").write_text("The cat sat on a mat, and it was all that it had to do. " * 40)
        Path("plan.toml").write_text('models = ["small"]\ntexts = ["prose"]\nlengths = [2, 4]\nsamples = 1\n')
        tools = small_tools(count=400)
        if command == "measure":
            tools, _ = make_tools(models={"small": SmallModel()}, texts={"prose": words(400)})

        def set_threads(count: int) -> None:
            # As PyTorch would, but without starting them.
            if not 0 < count < 2**31:
                raise ValueError("Overflow when unpacking long")

        def load_model(name: str, *, device: str = "cpu", **options: Any) -> Any:
            check_device(device)
            return tools.load_model(name, **options)

        def no_feed(opened: Any, model: Any, layers: Sequence[int]) -> Any:
            raise ModelError("The stand-in takes nothing but text.")

        patch.setattr(torch, "set_num_threads", set_threads)
        patch.setattr("howsmooth.study.input_sequences.file_feed", no_feed)
        patch.setattr("howsmooth.bounds.table", plain_table)
        with installed(replace(tools, load_model=load_model)):
            yield root


def state(above: Path) -> dict[str, bytes]:
    """Everything below a folder but what is in folders named ``out``."""
    found = {}
    for place, folders, files in os.walk(above):
        folders[:] = [name for name in folders if name != "out"]
        for path in (Path(place, name) for name in (*folders, *files)):
            found[str(path)] = path.read_bytes() if path.is_file() else b"a folder"
    return found


def run(root: Path, *arguments: str) -> int:
    """Run a command line in its workplace, and look at all that it did but at its result."""
    before = state(root.parent)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    assert code in (0, 2, 3)
    assert "Traceback" not in out.getvalue() + err.getvalue()
    if code == 2:
        errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
        assert errors == err.getvalue().splitlines()[-1:]
        assert len(errors[0]) > len("error: ") + 5
    assert state(root.parent) == before, "something outside the folder out was written"
    return code


NUMBERS = ["-3", "0", "9", "0.5", "1e400", "nan", "9" * 5000, "0x10", "1_0", "٣", "1e-400", str(2**64)]
RANGES = ["2,3", "2:4", "all", "-1", "4:2", "2:4:0", "2:4:-1", "", ",", "2,,3", "1:99999999999"]
NAMES = [
    "small", "prose", "prose.txt", "start.npy", "nowhere.npy", "plan.toml", "folder", "builtin", "..", "/",
    " ", "x" * 5000, "../root/prose.txt", "~nobody/x", "-", "a\0b", "small\n", "float64", "head", "cuda:7",
]  # fmt: skip
VALUES = st.one_of(st.sampled_from([*NUMBERS, *RANGES, *NAMES]), st.text(max_size=20))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with options of its own, which have any values."""
    command = draw(st.sampled_from(sorted(USUAL)))
    known = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    options = [one for one in known if one.param_type_name == "option"]
    # The folder is fixed below; the paper's code needs real models, and workers have no stand-ins.
    left_out = ("--out", "--as-published", "--executor")
    taking = [name for one in options for name in one.opts if not one.is_flag and name not in left_out]
    flags = [name for one in options for name in one.opts if one.is_flag]
    line = list(USUAL[command])
    for name in draw(st.lists(st.sampled_from(taking), max_size=3)):
        value = draw(VALUES)
        line += draw(st.sampled_from([[name, value], [f"{name}={value}"]]))
    line += draw(st.lists(st.sampled_from(flags), max_size=3))
    return [command, *line, *draw(st.lists(VALUES, max_size=1)), "--out", "out"]


@pytest.mark.parametrize("command", USUAL)
def test_the_usual_lines_work(command: str) -> None:
    with workplace(command) as root:
        assert run(root, command, *USUAL[command], "--out", "out") == 0
        assert list(Path("out").iterdir())


@settings(
    max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(command_lines())
@example(["measure", *USUAL["measure"], "--threads", str(10**12), "--out", "out"])
@example(["measure", *USUAL["measure"], "--max-iterations", "9" * 20, "--out", "out"])
@example(["measure", "small", "--images", "/", "--out", "out"])
@example(["measure", "small", "--tokens", "start.npy", "--embeddings", "start.npy", "--out", "out"])
@example(["bound", "x" * 5000, "--out", "out"])
@example(["bound", "plan.toml", "--out", "out"])
@example(["bound", "small", "--text", "x" * 300, "--out", "out"])
def test_command_lines(line: list[str]) -> None:
    with workplace(line[0]) as root:
        run(root, *line)
