"""Command lines and plan files that nobody would write: each ends in an exit code and one sentence.

Models and texts are stand-ins and figures are not drawn, so that many can be tried; the slow tests take the
built-in model and the library's own tools, and more examples.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
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
from howsmooth.study.plan_file import KEYS
from tests._sources import SmallModel, plain_table, small_tools
from tests._study import make_tools, words

ENDINGS = {0, 2, 3, 130}
COMMANDS = ("measure", "bound")

# ---- where a command runs, and what is held against it


@contextlib.contextmanager
def workplace(command: str, *, real: bool) -> Iterator[Path]:
    """A folder to work in, with a few files that commands can be given; stand-ins unless ``real``."""
    with tempfile.TemporaryDirectory() as above, pytest.MonkeyPatch.context() as patch:
        root = Path(above, "root")
        root.mkdir()
        patch.chdir(root)
        Path("head.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        Path("broken.npz").write_bytes(b"PK\x03\x04 broken")
        np.save("start.npy", np.arange(6.0).reshape(3, 2))
        Path("prose.txt").write_text("The cat sat on a mat, and it was all that it had to do. " * 40)
        Path("plan.toml").write_text(PLAN)
        Path("folder").mkdir()

        def set_threads(count: int) -> None:
            # As PyTorch would, but without starting them.
            if not 0 < count < 2**31:
                raise ValueError("Overflow when unpacking long")

        patch.setattr(torch, "set_num_threads", set_threads)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        if not real:
            put_stand_ins(patch, command)
        yield root


def put_stand_ins(patch: pytest.MonkeyPatch, command: str) -> None:
    """Put stand-ins for models, texts and all that takes long in the places of the library's functions."""
    tools = small_tools(count=400)
    if command == "measure":
        tools, _ = make_tools(models={"small": SmallModel()}, texts={"prose": words(400)})

    def load_model(name: str, *, device: str = "cpu", **options: Any) -> Any:
        check_device(device)
        return tools.load_model(name, **options)

    for name, stand_in in {
        "howsmooth.models.load_model": load_model,
        "howsmooth.models.capture": tools.capture,
        "howsmooth.models.sequence_datasets.dataset_of": no_feed,
        "howsmooth.texts.load_text": tools.load_text,
        "howsmooth.lipschitz.local_lipschitz": tools.measure,
        "howsmooth.study.tasks.bounds.bound_site": tools.bound,
        "howsmooth.bounds.table": plain_table,
    }.items():
        patch.setattr(name, stand_in)


def no_feed(opened: Any, model: Any, layers: Sequence[int]) -> Any:
    raise ModelError("The stand-in takes nothing but text.")


def state(above: Path) -> dict[str, bytes]:
    """Everything below a folder but what is in folders named ``out``."""
    found = {}
    for place, folders, files in os.walk(above):
        folders[:] = [name for name in folders if name != "out"]
        for name in (*folders, *files):
            path = Path(place, name)
            found[str(path)] = path.read_bytes() if path.is_file() else b"a folder"
    return found


def run(root: Path, *arguments: str) -> int:
    """Run a command line in its workplace, and look at all that it did but at its result."""
    before = state(root.parent)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    printed, said = out.getvalue(), err.getvalue()
    assert code in ENDINGS
    assert "Traceback" not in printed + said
    if code == 2:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert errors == said.splitlines()[-1:]
        assert len(errors[0]) > len("error: ") + 5
    assert state(root.parent) == before, "something outside the folder out was written"
    return code


# ---- command lines

TEXTS = st.text(st.characters(codec=None), max_size=20)
NUMBERS = st.one_of(
    st.integers(-3, 9).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["1e400", "-0", "nan", "9" * 5000, "0x10", "1_0", "٣", "1e-400", str(2**63), str(2**64)]),
)
RANGES = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=3).map(":".join),
    st.sampled_from(
        ["2,3", "2:4", "all", "-1", "4:2", "2:4:0", "2:4:-1", "0", "", ",", "2,,3", "1:99999999999"]
    ),
)
NAMES = st.one_of(
    st.sampled_from(
        [
            "small",
            "prose",
            "empty",
            "head.safetensors",
            "broken.npz",
            "prose.txt",
            "plan.toml",
            "folder",
            "..",
            "/",
            "",
            " ",
            "gpt2",
            "x" * 5000,
            "../root/prose.txt",
            "~",
            "~nobody/x",
            "-",
            "a\0b",
            "small\n",
            "float64",
            "head",
            "heads",
            "attention",
            "block",
            "auto",
            "data",
            "cpu",
            "meta",
            "cuda:7",
            "output",
        ]
    ),
    TEXTS,
)
VALUES = st.one_of(NAMES, NUMBERS, RANGES)


def options_of(command: str) -> tuple[list[str], list[str]]:
    """The options of a command that take a value, and those that do not, as it has them itself."""
    known = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    options = [one for one in known if one.param_type_name == "option"]
    taking = [name for one in options for name in one.opts if not one.is_flag]
    flags = [name for one in options for name in one.opts if one.is_flag]
    assert "--out" in taking
    assert "--json" in flags
    # The folder is fixed below. What the paper's code computes needs real models.
    return [name for name in taking if name not in ("--out", "--as-published")], flags


INPUTS = st.sampled_from(
    [
        "builtin",
        "folder",
        "prose.txt",
        "start.npy",
        "head.safetensors",
        "broken.npz",
        "plan.toml",
        "nowhere.npy",
    ]
)
LIKELY = {
    "--plan": INPUTS,
    "--lengths": RANGES,
    "--layers": RANGES,
    "--heads": RANGES,
    "--samples": NUMBERS,
    "--seed": NUMBERS,
    "--rtol": NUMBERS,
    "--confidence": NUMBERS,
    "--radius": NUMBERS,
    "--threads": NUMBERS,
    **dict.fromkeys(("--images", "--tokens", "--embeddings"), INPUTS),
}
"""What an option may well be given, so that more than the parser is tried."""

USUAL = {
    "measure": ["small", "--text", "prose", "--lengths", "2,3", "--samples", "1"],
    "bound": ["small", "--text", "prose", "--lengths", "3", "--layers", "0"],
}
"""A command line that works."""

REAL = {
    "measure": [
        "builtin-encoder",
        "--text",
        "prose.txt",
        "--lengths",
        "2,3",
        "--samples",
        "1",
        "--layers",
        "0",
    ],
    "bound": ["builtin-encoder", "--text", "prose.txt", "--lengths", "5", "--layers", "0", "--scope", "head"],
}
"""The same for the library's own tools."""


@st.composite
def command_lines(draw: st.DrawFn, *, real: bool, commands: Sequence[str] = COMMANDS) -> list[str]:
    """A command with options of its own, most of them with values that they might be given."""
    usual = REAL if real else USUAL
    command = draw(st.sampled_from(commands))
    taking, flags = options_of(command)
    # Without a model, all of what a command does by default would be done, which takes minutes.
    works = real or draw(st.booleans())
    line = list(usual[command]) if works else draw(st.lists(NAMES, max_size=2))
    for name in draw(st.lists(st.sampled_from(taking), max_size=3) if taking else st.just([])):
        value = draw(st.one_of(LIKELY.get(name, NAMES), VALUES))
        line += draw(st.sampled_from([[name, value], [f"{name}={value}"]]))
    line += draw(st.lists(st.sampled_from(flags), max_size=3))
    line += draw(st.one_of(st.just([]), st.just([]), st.lists(TEXTS, max_size=1)))
    return [command, *line, "--out", "out"]


def try_line(line: list[str], *, real: bool) -> None:
    with workplace(line[0], real=real) as root:
        run(root, *line)


quickly = settings(
    max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
slowly = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usual_lines_work(command: str) -> None:
    with workplace(command, real=False) as root:
        assert run(root, command, *USUAL[command], "--out", "out") == 0
        assert list(Path("out").iterdir())


@quickly
@given(command_lines(real=False))
@example(["measure", *USUAL["measure"], "--threads", str(10**12), "--out", "out"])
@example(["measure", *USUAL["measure"], "--max-iterations", "9" * 20, "--out", "out"])
@example(["measure", "small", "--images", "builtin", "--out", "out"])
@example(["measure", "small", "--images", "/", "--out", "out"])
@example(["measure", "small", "--tokens", "start.npy", "--embeddings", "head.safetensors", "--out", "out"])
@example(["bound", "x" * 5000, "--out", "out"])
@example(["bound", "small", "--text", "x" * 300, "--out", "out"])
def test_command_lines(line: list[str]) -> None:
    try_line(line, real=False)


# ---- plan files

PLAN = """models = ["small"]
texts = ["prose"]
lengths = [2, 4]
samples = 1
layers = "0"
scopes = ["attention"]
seed = 3
"""

VALUE = st.recursive(
    st.one_of(
        st.sampled_from(
            [
                "true",
                "1",
                "-1",
                "1e999",
                "inf",
                "nan",
                "0.5",
                "9" * 5000,
                "1979-05-27T07:32:00Z",
                '"2:4"',
                '"small"',
                '"prose"',
                '"../../x"',
                '"\\u0000"',
                '"head"',
                '"cpu"',
                '"float64"',
                "'''\n'''",
                '"C:\\\\x"',
                "0x7fffffffffffffff",
                '"' + "x" * 3000 + '"',
                "[]",
                "{}",
                '{ name = "small" }',
                '{ name = "small", layers = "0" }',
            ]
        ),
        st.integers().map(str),
        st.text(
            st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters='"\\'), max_size=8
        ).map(lambda words: f'"{words}"'),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda values: f"[{', '.join(values)}]"),
        st.tuples(st.sampled_from(["name", "layers", "random_init", "x"]), inner).map(
            lambda pair: f"{{ {pair[0]} = {pair[1]} }}"
        ),
    ),
    max_leaves=4,
)

KEY = st.one_of(
    # What the paper's code computes needs real models, workers have none of the stand-ins, and the
    # folder is fixed below.
    st.sampled_from(sorted(set(KEYS) - {"as_published", "out", "executor", "scheduler"})),
    st.sampled_from(["model", "Models", '"lengths "', "x.y", "[table]\nx", "[[models]]\nname", '""']),
)


@st.composite
def plans(draw: st.DrawFn, usual: str) -> str:
    """A plan with lines changed, added and cut, and with letters that do not belong there."""
    lines = dict(line.split(" = ", 1) for line in usual.splitlines())
    lines |= dict(draw(st.lists(st.tuples(KEY, VALUE), max_size=2)))
    plan = "\n".join(f"{key} = {value}" for key, value in lines.items())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        place = draw(st.integers(0, len(plan)))
        cut = draw(st.integers(0, 6))
        put = draw(
            st.sampled_from(["", "[", "]", '"', "=", "\n", "\\", "{", "\ufeff", "\0", "#", "\r", "[" * 3000])
        )
        plan = plan[:place] + put + plan[place + cut :]
    return plan


def try_plan(plan: str, *, real: bool) -> None:
    with workplace("measure", real=real) as root:
        Path("plan.toml").write_bytes(plan.encode("utf-8", "surrogatepass"))
        line = ["measure", "--plan", "plan.toml", "--out", "out"]
        began = run(root, *line, "--quiet")
        run(root, *line, "--dry-run", "--json")
        if began in (0, 3):
            assert run(root, *line, "--quiet") == began


@quickly
@given(plans(PLAN))
@example("models = " + "[" * 100_000)
@example('models = ["small"]\nlengths = [2]\nsamples = 99999999999999999999')
@example('models = ["small"]\nlengths = [2]\nmax_iterations = 99999999999999999999')
@example('models = ["small"]\nlengths = [2]\nthreads = 99999999999999999999')
@example('models = ["small"]\ntexts = ["' + "x" * 300 + '"]')
@example("")
@example("\udcff")
def test_plans(plan: str) -> None:
    try_plan(plan, real=False)


# ---- the same with the library's own tools


@pytest.mark.slow
@slowly
@given(command_lines(real=True))
def test_command_lines_with_the_real_tools(line: list[str]) -> None:
    try_line(line, real=True)


@pytest.mark.slow
@slowly
@given(plans(PLAN.replace("small", "builtin-encoder").replace('"prose"', '"prose.txt"')))
def test_plans_with_the_real_tools(plan: str) -> None:
    try_plan(plan, real=True)
