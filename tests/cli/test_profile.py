"""``howsmooth profile``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.texts import load_text
from tests._documented import check_documented

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_ranking_is_printed_and_the_files_are_written(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    given = ["builtin-encoder", "--text", "letter.txt", "--layers", "0,-1", "--out", "found"]
    assert main(["profile", *given]) == 0
    out = capsys.readouterr().out
    found = hs.profile("builtin-encoder", load_text("letter.txt"), layers=[0, 3])
    assert repr(found) in out
    assert "Input: the local file letter.txt, without special tokens, SHA-256 of the ids " in out
    assert "Page: found/profile.html" in out
    table = pd.read_csv("found/profile.csv")
    assert list(table["value"]) == list(found.table["value"])
    assert Path("found/profile.html").exists()
    found.write("again", parquet=True)
    stored = pd.read_parquet("again/profile.parquet")
    assert stored.equals(pd.DataFrame(found.table))
    assert stored.attrs["howsmooth"] == found.citation
    assert len(pd.read_parquet("again/tokens.parquet")) == len(found.tokens)


def test_special_tokens_are_put_in_and_said(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    given = ["--text", "letter.txt", "--layers", "0", "--scope", "attention", "--special-tokens"]
    assert main(["profile", "builtin-encoder", *given, "--json", "-q"]) == 0
    said = json.loads(capsys.readouterr().out)
    ids = hs.load_model("builtin-encoder").tokenizer.encode(Path("letter.txt").read_text(), special=True)
    assert said["n"] == len(ids)
    assert ", with special tokens, SHA-256" in said["input"]
    by_ids = hs.profile("builtin-encoder", ids, layers=[0], scopes=["attention"])
    assert said["ranking"][0]["value"] == by_ids.table["value"][0]


def test_without_an_engine_for_parquet_nothing_is_measured(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("howsmooth.files.find_spec", lambda _: None)
    assert main(["measure", "builtin-encoder", "--lengths", "4", "--parquet"]) == 2
    assert "parquet: expected an engine for parquet, got none. Install one" in capsys.readouterr().err
    assert not Path("howsmooth-out").exists()


def test_a_type_of_model_without_a_tokenizer_gets_one_of_the_text(capsys: Capture) -> None:
    GPT2Config(vocab_size=300, n_embd=24, n_layer=1, n_head=2).save_pretrained("tiny")
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    given = ["./tiny", "--random-init", "--text", "letter.txt", "--span", "0:4", "-q"]
    assert main(["profile", *given]) == 0
    assert "tiny" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["profile", "precision", "bound"])
def test_several_inputs_are_refused_and_untrained_weights_are_named(name: str, capsys: Capture) -> None:
    GPT2Config(vocab_size=300, n_embd=24, n_layer=1, n_head=2).save_pretrained("tiny")
    model = [name, "./tiny", "--random-init", "--layers", "0", "-q"]
    assert main([*model, "--text", "a.txt", "--text", "b.txt"]) == 2
    assert "text: expected one value, got 'a.txt', 'b.txt'" in capsys.readouterr().err
    np.save("ids.npy", [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    if name == "bound":
        assert main([*model, "--tokens", "ids.npy", "--lengths", "8"]) == 2
        assert "pieces of at most 5. Use --lengths 5, or a smaller one" in capsys.readouterr().err
    else:
        assert main([*model, "--tokens", "ids.npy"]) == 2
        said = "tokens: expected a file with one sequence, got ids with 2. Write one of them into"
        assert said in capsys.readouterr().err
    np.save("ids.npy", [1, 2, 3, 4, 5])
    assert main([*model, "--tokens", "ids.npy"]) == 0
    assert "tiny (random init)" in capsys.readouterr().out


def test_a_file_after_the_model_is_answered_with_its_option(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice")
    assert main(["profile", "builtin-encoder", "letter.txt"]) == 2
    assert "Is --text letter.txt meant?" in capsys.readouterr().err


def test_json_alone_is_on_standard_output(capsys: Capture) -> None:
    assert (
        main(["profile", "builtin-decoder", "--span", "0:8", "--layers", "0", "--scope", "head", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    check_documented("profile", found)
    assert found["n"] == 8
    assert {row["scope"] for row in found["ranking"]} == {"head"}
    assert found["files"][0] == "howsmooth-profile/profile.html"


def test_the_depth_for_machines(capsys: Capture) -> None:
    assert main(["profile", "builtin-decoder", "--span", "0:5", "--scope", "model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("profile --scope model", found)
    assert found["value"] == found["stages"][-1]["until"]


def test_the_influences_of_a_layer_are_those_of_the_dense_jacobian(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat.")
    given = ["profile", "builtin-decoder", "--text", "letter.txt", "--layers", "1", "--scope", "attention"]
    assert main([*given, "--influence", "--out", "found"]) == 0
    out = capsys.readouterr().out
    table = pd.read_csv("found/influence.csv", keep_default_na=False)

    model = hs.load_model("builtin-decoder")
    ids = model.tokenizer.encode("Dear Alice, it was a cat.")
    (site,) = hs.capture(model, torch.tensor([ids]), layers=[1])
    f = site.map.to(dtype=torch.float64)
    dense = torch.func.jacrev(f)(site.x[0].double())  # (n, d_out, n, d)
    norms = torch.linalg.matrix_norm(dense.movedim(2, 1), 2)
    assert len(table) == len(ids) ** 2
    words = model.tokenizer.decoded(ids)
    for row in table.to_dict("records"):
        assert row["lower"] <= norms[row["output"], row["input"]] <= row["upper"]
        assert (row["output_token"], row["input_token"]) == (words[row["output"]], words[row["input"]])
    top = table.loc[table["value"].idxmax()]
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["moved", "token"]) + 1
    assert f"{top['input']} {top['input_token']!r}" in lines[first]
    assert "Which token moves which, layer 1:" in out
    assert out.count(f"of {len(ids) ** 2} norms") == 1
    assert "Influence(" not in out
    assert lines[-1].endswith("influence.csv, influence.png, influence.pdf.")
    assert max(map(len, lines[first - 5 : -1])) <= 100


@pytest.fixture
def tiny() -> list[str]:
    """The words that name a small model of one layer, and five token ids."""
    config = GPT2Config(vocab_size=60, n_embd=40, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained("tiny")
    np.save("ids.npy", [5, 6, 7, 8, 9])
    return ["profile", "./tiny", "--tokens", "ids.npy", "--influence"]


def test_progress_is_told_within_an_influence(
    tiny: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("howsmooth.cli.progress._SECONDS_BETWEEN_LINES", -1.0)
    assert main([*tiny, "--scope", "model"]) == 0
    said = [line.rpartition("left: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert "step 4 of 4" in said, said


def test_the_margin_of_a_whole_model_is_no_token(tiny: list[str], capsys: Capture) -> None:
    assert main([*tiny, "--scope", "model", "--output", "margin"]) == 0
    out = capsys.readouterr().out
    assert "Which token moves which, whole model to the margin:" in out
    assert out.count(" margin ") == 5, out
    assert "output_token" not in pd.read_csv("howsmooth-profile/influence.csv").columns
    page = Path("howsmooth-profile/depth.html").read_text()
    assert "Which token moves which, whole model to the margin" in page


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_influences_as_json(scope: str, tiny: list[str], capsys: Capture) -> None:
    assert main([*tiny, "--scope", scope, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("profile" if scope == "attention" else "profile --scope model", found)
    largest = found["influence"]["largest"]
    if scope == "model":
        assert {row["output"] for row in largest} == {4}  # the last token
    values = [row["value"] for row in largest]
    assert values == sorted(values, reverse=True)
    assert found["influence"]["token_wise"]["lower"] <= found["influence"]["token_wise"]["upper"]


def test_token_ids_and_images_are_inputs_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.profiling.Profile.write", lambda *_, **__: [Path("not-drawn.html")])
    np.save("ids.npy", [5, 6, 7, 8])
    GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=2).save_pretrained("tiny")
    assert main(["profile", "./tiny", "--random-init", "--tokens", "ids.npy", "--layers", "0"]) == 0
    assert "4 tokens" in capsys.readouterr().out
    assert main(["profile", "builtin-encoder", "--tokens", "ids.npy", "--images", "builtin"]) == 2
    assert "expected one text, file of tokens or images, got --tok" in capsys.readouterr().err
    for words, said in (
        (["--images", "a.png", "--images", "b.png"], "images: expected one image, got 2"),
        (["--images", "a.png", "--span", "0:4"], "span: expected none beside images, got 0:4"),
        (["--text", "a.txt", "--tokens", "ids.npy"], "inputs: expected one text, file of tokens"),
    ):
        assert main(["profile", "builtin-encoder", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["builtin-encoder", "--span", "5:2"], "span"),
        (["builtin-encoder", "--text", "nofile.txt"], "nofile.txt"),
        (["builtin-encodr"], "builtin-encoder"),
        (["not-loaded", "--rtol", "0"], "rtol: expected a number from 1e-12"),
        (["builtin-encoder", "--images", "builtin"], "image"),
        (["builtin-encoder", "--layers", "9"], "layers"),
        (["builtin-encoder", "--scope", "block"], "scope"),
        (["builtin-encoder", "--scope", "head", "--influence"], "influence"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(["profile", *arguments]) == 2
    (*_, line) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_an_interruption_is_said(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.models.load_model", interrupt)
    assert main(["profile", "builtin-encoder"]) == 130
    assert capsys.readouterr().err.endswith("interrupted: nothing was written.\n")
    assert not Path("howsmooth-profile").exists()
