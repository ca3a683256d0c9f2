"""``howsmooth influence``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import T5Config

import howsmooth as hs
from howsmooth.cli import main
from tests._documented import check_documented

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_norms_are_those_of_the_dense_jacobian(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat.")
    given = ["influence", "builtin-decoder", "--text", "letter.txt", "--layers", "1", "--out", "found"]
    assert main(given) == 0
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
    assert f"{top['input']} {top['input_token']!r}" in out.splitlines()[-8 - 5]
    assert "Figure: found/influence.png, with influence.pdf, influence.csv." in out
    assert "), weights in float16, computed in float32: how far" in " ".join(out.split())


def test_progress_is_told_within_a_layer(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.cli.progress._SECONDS_BETWEEN_LINES", -1.0)
    for scope, outputs in (("attention", "0:4"), ("model", "-1,-2")):
        layers = ["--layers", "1"] if scope == "attention" else []
        given = ["influence", "builtin-decoder", "--span", "0:24", "--scope", scope, *layers, "--parquet"]
        assert main([*given, "--outputs", outputs]) == 0
        said = capsys.readouterr().err
        assert " left: output 1 of " in said, said
    assert len(pd.read_parquet("howsmooth-influence/influence.parquet")) == 2 * 24


def test_the_margin_of_a_whole_model_is_no_token(capsys: Capture) -> None:
    given = ["influence", "builtin-decoder", "--span", "0:5", "--scope", "model", "--output", "margin"]
    assert main(given) == 0
    captured = capsys.readouterr()
    out = captured.out
    assert out.count(" margin ") == 5, out
    assert "Measuring 1 output of 5 tokens, 1 derivative of the whole model\n" in captured.err
    assert "output_token" not in pd.read_csv("howsmooth-influence/influence.csv").columns


def test_json_alone_is_on_standard_output(capsys: Capture) -> None:
    assert main(["influence", "builtin-decoder", "--span", "0:6", "--scope", "model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("influence", found)
    assert (found["n"], found["layer"], found["scope"]) == (6, None, "model")
    assert (found["stored"], found["computed"]) == ("float16", "float32")
    assert {row["output"] for row in found["largest"]} == {5}  # the last token
    values = [row["value"] for row in found["largest"]]
    assert values == sorted(values, reverse=True)
    assert found["token_wise"]["lower"] <= found["token_wise"]["upper"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "0,1"], "layers: expected one layer, such as -1, got 0,1"),
        (["--layers", "all"], "layers: expected one layer, such as -1, got all"),
        (["--scope", "model", "--layers", "0"], "layers: expected none with the scope model"),
        (["--output", "logits"], "output: expected hidden unless the scope is model"),
        (["--confidence", "1", "--part", "not-loaded"], "confidence: expected a probability from 0.5"),
        (["--outputs", "4"], "outputs: expected outputs of builtin-decoder, which has 4"),
    ],
)
def test_refuses_and_names_the_option(options: list[str], said: str, capsys: Capture) -> None:
    assert main(["influence", "builtin-decoder", "--span", "0:4", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_layer_of_cross_attention_names_the_encoder(capsys: Capture) -> None:
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    T5Config(**sizes).save_pretrained("t5")
    np.save("ids.npy", [5, 7, 9, 11])
    given = ["influence", "t5", "--random-init", "--tokens", "ids.npy"]
    assert main(given) == 2
    said = "layers: expected a layer of self-attention, got -1, which is cross-attention. Choose another"
    assert said in (err := capsys.readouterr().err)
    assert "--part encoder." in err
    assert main([*given, "--scope", "model"]) == 2
    assert "the part encoder (--part encoder)" in capsys.readouterr().err
    assert main([*given, "--part", "encoder"]) == 0
