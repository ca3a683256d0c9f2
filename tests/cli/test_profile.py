"""``howsmooth profile``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from transformers import GPT2Config

import howsmooth as hs
from howsmooth.cli import main
from tests._documented import check_documented

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_ranking_is_printed_and_the_files_are_written(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    assert (
        main(
            [
                "profile",
                "builtin-encoder",
                "--text",
                "letter.txt",
                "--layers",
                "0,-1",
                "--out",
                "found",
                "--parquet",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    found = hs.profile("builtin-encoder", Path("letter.txt").read_text(), layers=[0, 3])
    assert repr(found) in out
    assert "Page: found/profile.html" in out
    table = pd.read_csv("found/profile.csv")
    assert list(table["value"]) == list(found.table["value"])
    assert Path("found/profile.html").exists()
    stored = pd.read_parquet("found/profile.parquet")
    assert stored.equals(pd.DataFrame(found.table))
    assert stored.attrs["howsmooth"] == found.citation
    assert len(pd.read_parquet("found/tokens.parquet")) == len(found.tokens)


def test_without_an_engine_for_parquet_nothing_is_measured(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("howsmooth.study.file_writing.find_spec", lambda _: None)
    assert main(["profile", "builtin-encoder", "--span", "0:4", "--parquet"]) == 2
    assert "parquet: expected an engine for parquet, got none. Install one" in capsys.readouterr().err
    assert not Path("howsmooth-profile").exists()


def test_a_type_of_model_without_a_tokenizer_gets_one_of_the_text(capsys: Capture) -> None:
    GPT2Config(vocab_size=300, n_embd=24, n_layer=1, n_head=2).save_pretrained("tiny")
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    given = ["./tiny", "--random-init", "--text", "letter.txt", "--span", "0:4", "-q"]
    for name in ("profile", "influence"):
        assert main([name, *given]) == 0
        assert "tiny" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["profile", "precision", "influence", "bound"])
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


def test_influence_is_written_if_asked_for(capsys: Capture) -> None:
    arguments = ["profile", "builtin-decoder", "--span", "0:5", "--layers", "1", "--scope", "attention"]
    assert main([*arguments, "--influence"]) == 0
    assert "Influence(5 outputs x 5 inputs" in capsys.readouterr().out
    assert len(pd.read_csv("howsmooth-profile/influence.csv")) == 25


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
