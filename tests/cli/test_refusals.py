"""Command lines that cannot be carried out: each ends in exit code 2 and one sentence with its remedy.

What is cheap to know is told before PyTorch or transformers is imported, and so is every help.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import typer
from transformers import BertConfig, CLIPConfig, GPT2Config, T5Config, ViTConfig

from howsmooth.cli import app, main
from howsmooth.model_folders import builtin_folder
from tests._sources import SmallModel
from tests._study import FakeModel, installed, make_tools, words

ENCODER, DECODER = "builtin-encoder", "builtin-decoder"
PROFILE, MEASURE, BOUND = ["profile", ENCODER], ["measure", ENCODER], ["bound", ENCODER]
PRECISION = ["precision", ENCODER]

AT_ONCE: list[tuple[list[str], str]] = [
    # ---- what is named and not there
    (["profile", "./nosuch"], "There is no folder './nosuch'. Give the folder"),
    (["precision", "empty"], "'empty' holds no model (no config.json)"),
    (["inspect", "bare"], "it has a configuration but no model.safetensors"),
    (["radius", "words"], "has no usable tokenizer. Save its tokenizer in the folder, or give token ids"),
    (["measure", "damaged"], "no usable tokenizer: its tokenizer.json cannot be read"),
    (["measure", "x" * 5000], "There is no model"),
    ([*PROFILE, "--text", "no.txt"], "'no.txt' is neither a known name nor a file"),
    ([*MEASURE, "--text", "two\nlines\x1b[31m"], "is neither a known name nor a file"),
    ([*PROFILE, "letter.txt"], "Is --text letter.txt meant?"),
    (["reproduce", "--text", "bytes.txt"], "is not UTF-8 text"),
    (["reproduce", "--model", "/nosuch,as-decoder"], "There is no folder '/nosuch'"),
    ([*BOUND, "--tokens", "no.npy"], "tokens: expected a .npy file"),
    ([*PROFILE, "--tokens", "half.npy"], "expected token ids as an integer array"),
    (["profile", "vit", "--random-init", "--images", "no.png"], "images: expected builtin, or a file or"),
    (["measure", "--device", "gpu"], "device: expected a device that PyTorch can use here"),
    ([*PROFILE, "--out", "taken/below"], "out: expected a writable folder, got the file"),
    ([*BOUND, "--out", "taken"], "out: expected a writable folder, got the file taken"),
    ([*PROFILE, "--out", "/proc/x"], "out: expected a writable folder"),
    (["measure", "--plan", "no.toml"], "no.toml: expected a plan file in TOML, got no such file: no.toml"),
    (["measure", "--plan", "empty.toml"], "models: expected the names of the models, got a file without"),
    (["measure", "--plan", "plan.toml"], "plan.toml: length: expected one of the keys"),
    (["measure", "--plan", "wrong.toml"], "There is no folder './nosuch'"),
    # ---- names that are misspelt or left out
    (["mesure"], "No such command 'mesure'. Did you mean 'measure'? See howsmooth --help."),
    (["measure", "--lenghts", "3"], "--lengths"),
    (["measure", "--foo"], "No such option: --foo"),
    (["measure", "--scope", "atention"], "Is attention meant?"),
    (["profile", "builtin-encodr"], "Is builtin-encoder meant?"),
    (["reproduce", "adversaral"], "Is adversarial meant?"),
    (["bound"], "Missing argument 'MODEL'"),
    (["inspect"], "Missing argument 'MODEL'"),
    ([*MEASURE, ENCODER], "models: expected each only once"),
    # ---- numbers and ranges
    (["measure", "--samples", "many"], "--samples"),
    (["measure", "--threads", "0"], "threads: expected a number of at least 1, got 0"),
    (["measure", "--rtol", "2"], "(in float32) up to 1, got 2.\n"),
    (["measure", "--rtol", "nan"], "rtol: expected a number from 2e-05 (in float32)"),
    (["measure", "--rtol", "1e-7"], "For a smaller rtol measure in float64"),
    ([*PROFILE, "--rtol", "0"], "rtol: expected a number from 1e-12"),
    (["measure", "--confidence", "1"], "confidence: expected a probability from 0.5"),
    (["measure", "--memory", "lots"], "memory: expected a number of bytes such as 8GiB"),
    (["measure", "--layers", "0:"], "layers: expected numbers and start:stop:step ranges"),
    (["measure", "--lengths", "2:100:2:7"], "lengths: expected numbers and start:stop:step"),
    ([*PROFILE, "--layers", "5:2"], "layers: expected ranges that are not empty"),
    ([*BOUND, "--lengths", "0"], "lengths: expected numbers of at least 1"),
    ([*BOUND, "--radius", "data"], "radius: expected a finite number > 0, or auto"),
    ([*BOUND, "--search", "--steps", "0"], "steps: expected a number of at least 1"),
    ([*PROFILE, "--span", "x"], "span: expected start:end with 0 <= start < end, got 'x'"),
    ([*PRECISION, "--span", "40:10"], "span: expected start:end with 0 <= start < end, got '40"),
    ([*PRECISION, "--bits", "1"], "bits"),
    ([*PRECISION, "--average", "0"], "average"),
    ([*PRECISION, "--average", "2"], "average: expected at least 3"),
    ([*PRECISION, "--average", "4", "--bits", "4"], "--bits 2,3,4,5,6,8"),
    (["inspect", DECODER, "--tokens", "1"], "tokens"),
    # ---- what is none of the choices, or does not go together
    (["measure", "--figures", "none"], "figures: expected one of page, all, got 'none'"),
    ([*PROFILE, "--scope", "block"], "scope"),
    ([*BOUND, "--scope", "block"], "scope: expected one of head, heads"),
    ([*BOUND, "--scope", "cross-attention"], "howsmooth measure takes this scope"),
    ([*PRECISION, "--quantisers", "row"], "quantisers"),
    ([*PRECISION, "--quantisers", "token,kivi-0"], "quantisers: expected all, or some of token"),
    ([*BOUND, "--steps", "9"], "steps: expected no steps without --search, got 9"),
    ([*BOUND, "--heads", "1"], "Add the scope head"),
    ([*MEASURE, "--scope", "model", "--layers", "1"], "Leave layers out"),
    ([*PROFILE, "--scope", "model", "--layers", "0"], "layers: expected none with the scope model"),
    ([*PROFILE, "--scope", "head", "--influence"], "influence"),
    ([*PROFILE, "--output", "logits"], "output: expected hidden unless the scope is model"),
    ([*MEASURE, "--output", "logits"], "output: expected hidden unless the scope is model"),
    ([*MEASURE, "--side", "memory"], "side: expected no side unless the scope is cross-attention or model"),
    ([*PROFILE, "--images", "builtin"], "takes a text or token ids, not images"),
    ([*PROFILE, "--text", "3.txt", "--tokens", "ids.npy"], "inputs: expected one text, file of tokens or im"),
    ([*PROFILE, "--tokens", "ids.npy", "--images", "builtin"], "inputs: expected one text, file of tokens"),
    ([*BOUND, "--text", "3.txt", "--tokens", "ids.npy"], "expected one text, file of tokens or images, got "),
    (["profile", "vit", "--images", "a.png", "--images", "b.png"], "images: expected one image, got 2"),
    (["profile", "vit", "--images", "a.png", "--span", "0:4"], "span: expected none beside images, got 0:4"),
    *(
        ([name, ENCODER, "--text", "a.txt", "--text", "b.txt"], "text: expected one value, got 'a.txt', 'b.t")
        for name in ("profile", "precision", "bound")
    ),
    # ---- more than the model or the text has
    (["measure", DECODER, "--as-decoder"], "is a decoder already, and causal. Leave out --as-decoder."),
    (["inspect", DECODER, "--as-decoder"], "is a decoder already"),
    (["radius", DECODER], "is no classifier but a language model (GPT2LMHeadModel)"),
    ([*PROFILE, "--layers", "0,4"], "expected layers of builtin-encoder, which has 4: 0 to 3"),
    ([*PRECISION, "--layers", "9"], "layers"),
    (["measure", "regular", "--layers", "-3"], "layers of regular, which has 2: 0 to 1"),
    (["reproduce", "--model", ENCODER, "--layers", "77"], "which has 4: 0 to 3, -4 to -1, got 77"),
    (["bound", DECODER, "--scope", "head", "--heads", "8"], "heads: expected heads of builtin-decoder"),
    (
        [*MEASURE, "--lengths", "8,300"],
        "lengths: expected at most 256 tokens, the positions of builtin-encoder, got 300. Give --lengths 256",
    ),
    ([*PROFILE, "--text", "3.txt", "--span", "0:80"], "it has 3 characters, at most 12 tokens"),
    ([*BOUND, "--text", "3.txt", "--lengths", "4,80"], "'3' is too short for 1 sequence of 80 tokens"),
    (
        [*MEASURE, "--text", "3.txt", "--lengths", "4,80"],
        "too short for 10 sequences of each of 2 lengths, 840 tokens without overlap: it has 3 characters",
    ),
]
"""Command lines with the remedy or the argument that their sentence names."""

# Imports of what takes seconds fail, and each command line gives its exit code and its words.
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


def told(lines: list[list[str]], folder: Path) -> list[tuple[int, str, float]]:
    """The exit code, the words and the processor time of each command line."""
    program = [sys.executable, "-c", PROGRAM]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    given = {"input": json.dumps(lines), "cwd": folder, "env": environment, "text": True}
    done = subprocess.run(program, **given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def check_refusal(code: int, said: str, remedy: str, line: list[str]) -> None:
    assert code == 2, line
    assert said.startswith("error: "), (line, said)
    assert remedy in said, (line, said)
    assert said.count("\n") == 1, (line, said)


def spoil(folder: Path) -> None:
    """Fill a folder with what is wrong."""
    for name in ("empty", "bare", "words", "damaged"):
        (folder / name).mkdir()
        if name != "empty":
            (folder / name / "config.json").write_text('{"vocab_size": 9}')
        if name in ("words", "damaged"):
            (folder / name / "model.safetensors").touch()
    (folder / "damaged" / "tokenizer.json").write_text("{")
    (folder / "taken").touch()
    contents = {
        "empty.toml": "",
        "plan.toml": 'models = ["a"]\nlength = 3\n',
        "wrong.toml": 'models = ["./nosuch"]\n',
        "3.txt": "a b",
        "letter.txt": "Dear Alice",
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    (folder / "bytes.txt").write_bytes(b"\xe9")
    shutil.copytree(builtin_folder(ENCODER), folder / "regular")
    config = json.loads((folder / "regular" / "config.json").read_text())
    (folder / "regular" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    np.save(folder / "half.npy", np.zeros(3, np.float32))
    np.save(folder / "ids.npy", [1, 2, 3])


def test_cheap_mistakes_are_told_before_what_takes_seconds(tmp_path: Path) -> None:
    spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = told([line for line, _ in AT_ONCE], tmp_path)
    for (code, said, _), (line, remedy) in zip(found, AT_ONCE, strict=True):
        check_refusal(code, said, remedy, line)
    assert found[0][2] < 1.0  # of processor time, so that a load on the machine is no failure
    assert sorted(tmp_path.rglob("*")) == before


def test_every_help_is_told_before_what_takes_seconds(tmp_path: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) == 7
    found = told([["--help"], *([name, "--help"] for name in commands), [], ["--version"]], tmp_path)
    assert [code for code, _, _ in found] == [0] * 10
    assert all("Usage: howsmooth" in said for _, said, _ in found[:-1])
    assert found[-1][1].startswith("howsmooth 0.")
    assert found[0][2] < 1.0


# ---- what only the loaded model tells

SMALL = ["small", "--text", "prose", "--lengths"]
T5 = ["measure", "t5", "--random-init", "--tokens", "ids.npy", "--lengths", "4", "--samples", "2"]
AFTERWARDS: list[tuple[list[str], str]] = [
    (["measure", *SMALL, "2,4,8", "--layers", "0,3"], "layers of small, which has 3: 0 to 2"),
    (["bound", *SMALL, "6", "--layers", "2"], "layers of small, which has 2"),
    (["bound", *SMALL, "65"], "at most 64 tokens"),
    (["bound", "endless", "--text", "prose", "--lengths", "401"], "Use --lengths 400, or a smaller one"),
    (["bound", "gtp2"], "Is gpt2 meant?"),
    (["inspect", "nothing-of-this-name"], "nothing-of-this-name"),
    (["inspect", DECODER, "--tokens", "100000"], "tokens: expected at most"),
    ([*PRECISION, "--bits", "20"], "bits"),
    (["inspect", "vit", "--random-init", "--tokens", "5"], "tokens: expected no number"),
    (["inspect", "clip", "--random-init"], "Measure its parts one at a time, each with --part NAME"),
    (
        ["measure", "clip", "--random-init", "--text", "alice", "--images", "builtin"],
        "such as CLIP, choose a part: text or vision",
    ),
    *(
        ([name, "gpt2", "--random-init", "--tokens", "two.npy"], "expected a file with one sequence, got two")
        for name in ("profile", "precision")
    ),
    (["bound", "gpt2", "--random-init", "--tokens", "two.npy", "--lengths", "8"], "Use --lengths 5, or"),
    (
        ["bound", "bert", "--random-init", "--embeddings", "x.npy", "--lengths", "5"],
        "which reads token ids. Take the encoder",
    ),
    ([*T5, "--scope", "cross-attention"], "Choose the others: layers 2."),
    ([*T5, "--scope", "cross-attention", "--layers", "1"], "layer 1 (decoder.block.0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models and files of tokens that do not fit each other."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, image = {**sizes, "vocab_size": 60}, {**sizes, "image_size": 16, "patch_size": 8}
    t5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    for name, config in {
        "clip": CLIPConfig(text_config=text, vision_config=image, projection_dim=8),
        "gpt2": GPT2Config(vocab_size=60, n_embd=8, n_layer=1, n_head=2),
        "bert": BertConfig(**sizes, vocab_size=1, pad_token_id=0),
        "vit": ViTConfig(**image),
        "t5": T5Config(**t5),
    }.items():
        config.save_pretrained(folder / name)
    np.save(folder / "ids.npy", [range(3, 15)])
    np.save(folder / "two.npy", [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32))
    return folder


@pytest.mark.parametrize(("line", "remedy"), AFTERWARDS, ids=[" ".join(line)[:50] for line, _ in AFTERWARDS])
def test_what_the_loaded_model_refuses(
    line: list[str],
    remedy: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("howsmooth.models.loading.model_location.hub_reachable", lambda: False)
    before = set(folder.rglob("*"))
    models = {"small": FakeModel()}, {"small": SmallModel(), "endless": SmallModel(max_length=None)}
    tools, work = make_tools(models=models[line[0] == "bound"], texts={"prose": words(400)})
    with installed(tools) if line[1] in ("small", "endless") else nullcontext():
        code = main([*line, "-q"])
    out, err = capsys.readouterr()
    assert out == ""
    check_refusal(code, " ".join(err.split()) + "\n", remedy, line)
    assert work.measured == []
    assert set(folder.rglob("*")) == before


def test_without_an_engine_for_parquet_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("howsmooth.files.find_spec", lambda _: None)
    line = [*MEASURE, "--lengths", "4", "--parquet"]
    check_refusal(main(line), capsys.readouterr().err, "parquet: expected an engine", line)
    assert not list(tmp_path.iterdir())
