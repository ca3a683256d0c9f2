"""Cheap mistakes are told before PyTorch or transformers is imported, and so is every help."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from howsmooth.cli import app
from howsmooth.cli.first_checks import check_at_once
from howsmooth.errors import ModelError
from howsmooth.model_folders import _REGULAR, builtin_folder, stated_sizes
from howsmooth.models import load_model
from howsmooth.quick_imports import quick_imports
from howsmooth.study.plans import Plan

# Imports of what takes seconds fail, and each command line gives its exit code and its errors.
PROGRAM = """
import contextlib, io, json, sys, time

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "pandas", "matplotlib", "scipy"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refused())
from howsmooth.cli import main
for line in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(line)
    print(json.dumps([code, out.getvalue(), time.process_time()]))
"""

ENCODER = ["profile", "builtin-encoder"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "folder of a model": (["profile", "./nosuch"], "There is no folder './nosuch'. Give the folder"),
    "folder without a model": (["precision", "empty"], "'empty' holds no model (no config.json)"),
    "folder without weights": (["inspect", "bare"], "it has a configuration but no model.safetensors"),
    "no tokenizer": (["radius", "words"], "'words' has no usable tokenizer. Give token ids"),
    "damaged tokenizer": (["measure", "damaged"], "no usable tokenizer: its tokenizer.json cannot be read"),
    "text": ([*ENCODER, "--text", "no.txt"], "'no.txt' is neither a known name nor a file"),
    "text of a figure": (["reproduce", "--text", "bytes.txt"], "is not UTF-8 text"),
    "model of a figure": (["reproduce", "--model", "/nosuch,as-decoder"], "There is no folder '/nosuch'"),
    "token ids": (["bound", "builtin-encoder", "--tokens", "no.npy"], "tokens: expected a .npy file"),
    "ids that are none": ([*ENCODER, "--tokens", "half.npy"], "expected token ids as an integer array"),
    "images": (
        ["profile", "vit", "--random-init", "--images", "no.png"],
        "images: expected builtin, or a file or folder",
    ),
    "device": (["measure", "--device", "gpu"], "device: expected a device that PyTorch can use here"),
    "output folder": ([*ENCODER, "--out", "taken/below"], "out: expected a writable folder, got the file"),
    "option": (["measure", "--lenghts", "3"], "--lengths"),
    "command": (["mesure"], "Did you mean 'measure'"),
    "number": (["measure", "--samples", "many"], "--samples"),
    "number out of range": (["measure", "--threads", "0"], "threads: expected a number of at least 1, got 0"),
    "name of a built-in model": (["profile", "builtin-encodr"], "Is builtin-encoder meant?"),
    "decoder as decoder": (
        ["measure", "builtin-decoder", "--as-decoder"],
        "is a decoder already, and causal. Leave out --as-decoder.",
    ),
    "images of a text model": ([*ENCODER, "--images", "builtin"], "takes a text or token ids, not images"),
    "no classifier": (
        ["radius", "builtin-decoder"],
        "is no classifier but a language model (GPT2LMHeadModel)",
    ),
    "system folder": ([*ENCODER, "--out", "/proc/x"], "out: expected a writable folder"),
    "span": ([*ENCODER, "--span", "x"], "span: expected start:end with 0 <= start < end, got 'x'"),
    "empty span": ([*ENCODER, "--span", "40:10"], "span: expected start:end with 0 <= start < end, got '40"),
    "empty range": ([*ENCODER, "--layers", "5:2"], "layers: expected ranges that are not empty"),
    "text of a span": (
        [*ENCODER, "--text", "3.txt", "--span", "0:80"],
        "it has 3 characters, at most 12 tokens",
    ),
    "text of a length": (
        ["bound", "builtin-encoder", "--text", "3.txt", "--lengths", "4,80"],
        "'3' is too short for 1 sequence of 80 tokens",
    ),
    "text of a study": (
        ["measure", "builtin-encoder", "--text", "3.txt", "--lengths", "4,80"],
        "too short for 10 sequences of each of 2 lengths, 840 tokens without overlap: it has 3 characters",
    ),
    "layer of a figure": (
        ["reproduce", "--model", "builtin-encoder", "--layers", "77"],
        "expected layers of builtin-encoder, which has 4: 0 to 3, -4 to -1, got 77",
    ),
    "accuracy": ([*ENCODER, "--rtol", "0"], "rtol: expected a number from 1e-12"),
    "rtol that is too large": (["measure", "--rtol", "2"], "(in float32) up to 1, got 2.\n"),
    "range": (["measure", "--layers", "0:"], "layers: expected numbers and start:stop:step ranges"),
    "length": (["bound", "builtin-encoder", "--lengths", "0"], "lengths: expected numbers of at least 1"),
    "memory": (["measure", "--memory", "lots"], "memory: expected a number of bytes such as 8GiB"),
    "choice": (["measure", "--scope", "atention"], "Is attention meant?"),
    "plan file": (
        ["measure", "--plan", "no.toml"],
        "no.toml: expected a plan file in TOML, got no such file: no.toml",
    ),
    "empty plan file": (
        ["measure", "--plan", "empty.toml"],
        "models: expected the names of the models, got a file without this key",
    ),
    "layer": ([*ENCODER, "--layers", "0,4"], "expected layers of builtin-encoder, which has 4: 0 to 3"),
    "layer of a folder": (["measure", "regular", "--layers", "-3"], "layers of regular, which has 2: 0 to 1"),
    "head": (
        ["bound", "builtin-decoder", "--scope", "head", "--heads", "8"],
        "heads: expected heads of builtin-decoder, which has 8",
    ),
    "positions": (
        ["measure", "builtin-encoder", "--lengths", "8,300"],
        "lengths: expected at most 256 tokens, the positions of builtin-encoder, got 300. Give --lengths 256",
    ),
    "model of a plan": (["measure", "--plan", "wrong.toml"], "There is no folder './nosuch'"),
    "key of a plan": (["measure", "--plan", "plan.toml"], "plan.toml: length: expected one of the keys"),
}


def told(lines: list[list[str]], folder: Path) -> list[list[object]]:
    """The exit code, the words and the processor time of each command line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lines),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what is wrong."""
    for name in ("empty", "bare", "words", "damaged"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "config.json").write_text('{"vocab_size": 9}')
        if name in ("words", "damaged"):
            (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    for name in ("taken", "empty.toml"):
        (tmp_path / name).touch()
    (tmp_path / "3.txt").write_text("a b")
    (tmp_path / "bytes.txt").write_bytes(b"\xe9")
    shutil.copytree(builtin_folder("builtin-encoder"), tmp_path / "regular")
    config = json.loads((tmp_path / "regular" / "config.json").read_text())
    (tmp_path / "regular" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (tmp_path / "wrong.toml").write_text('models = ["./nosuch"]\n')
    np.save(tmp_path / "half.npy", np.zeros(3, np.float32))
    (tmp_path / "plan.toml").write_text('models = ["a"]\nlength = 3\n')
    return tmp_path


def test_cheap_mistakes_are_told_before_what_takes_seconds(folder: Path) -> None:
    found = told([line for line, _ in MISTAKES.values()], folder)
    for (code, words, _), (name, (_, said)) in zip(found, MISTAKES.items(), strict=True):
        assert code == 2, name
        assert said in str(words), name
        assert str(words).startswith("error: "), name
        assert str(words).count("\n") == 1, name
    assert float(str(found[0][2])) < 1.0  # of processor time, so that a load on the machine is no failure


def test_of_a_plan_file_one_model_may_be_wrong() -> None:
    plan = Plan(models=["./nosuch", "builtin-encoder"], lengths=[8])
    check_at_once(plan, keep_going=True)
    with pytest.raises(ModelError, match="nosuch"):
        check_at_once(plan)


@pytest.mark.parametrize("kind", _REGULAR)
def test_a_configuration_states_what_the_loaded_model_has(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 24}
    config = AutoConfig.for_model(kind, hidden_size=16, vocab_size=40, pad_token_id=0, **sizes)
    for name in ("intermediate_size", "hidden_dim", "ffn_dim", "word_embed_proj_dim", "embedding_size"):
        if hasattr(config, name):
            setattr(config, name, 16)
    for name, value in {"num_key_value_heads": 2, "head_dim": 8}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, random_init=True)
    assert stated_sizes(tmp_path) == {"layers": 3, "heads": 2, "positions": 24}
    assert (loaded.layers, loaded.heads, loaded.max_length) == (3, 2, 24)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"num_hidden_layers": 3}',
        '{"model_type": "t5", "num_hidden_layers": 3}',
        '{"model_type": "bert", "num_hidden_layers": 3, "add_cross_attention": true}',
        '{"model_type": "bert", "num_hidden_layers": "3"}',
        '{"model_type": "bert", "num_hidden_layers": 3, "n_layer": 4}',
    ],
)
def test_what_a_configuration_leaves_open_is_not_stated(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert stated_sizes(tmp_path) == {}


def test_imports_without_collections() -> None:
    code = """
import gc
from howsmooth.quick_imports import quick_imports
with quick_imports():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    frozen = gc.get_freeze_count()
    with quick_imports():  # PyTorch is imported here
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_every_help_is_told_before_what_takes_seconds(tmp_path: Path) -> None:
    commands = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert len(commands) == 7
    found = told([["--help"], *([name, "--help"] for name in commands), ["--version"]], tmp_path)
    assert [code for code, _, _ in found] == [0] * 9
    assert float(str(found[0][2])) < 1.0


def test_options_are_few_enough_to_be_read() -> None:
    program = typer.main.get_command(app)
    slots = [
        name
        for command in program.commands.values()  # type: ignore[attr-defined]
        for one in command.params
        if one.param_type_name == "option"
        for name in one.opts
        if name.startswith("--")
    ]
    assert len(slots) <= 130
    assert len(set(slots)) <= 90
