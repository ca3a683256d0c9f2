"""``howsmooth precision``: what it prints and writes, and what it refuses."""

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
SHORT = ["precision", "builtin-decoder", "--span", "0:8", "--layers", "0", "--quantisers", "token"]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_ranking_is_printed_and_the_files_are_written(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    assert main([*SHORT, "--text", "letter.txt", "--bits", "8,3", "--average", "4", "--out", "found"]) == 0
    out = capsys.readouterr().out
    text = Path("letter.txt").read_text()
    found = hs.precision("builtin-decoder", text, span="0:8", layers=[0], quantisers="token", bits=(3, 8))
    assert found.has_kl
    assert f"{found.table['change'].max():.4g}" in out
    for operand in "KV":
        rows = found.budget(4)
        given = " ".join(str(b) for b in rows[rows["operand"] == operand]["bits"])
        assert f"layer 0, {operand}, kv heads from 0: {given}" in out
    assert f"at once: divergence {found.simulate(found.budget(4)):.3g}\n" in out
    assert f"{found.simulate(3):.3g} at 3 bits" in out
    assert "Page: found/precision.html" in out
    table = pd.read_csv("found/precision.csv")
    assert sorted(table["change"]) == pytest.approx(sorted(found.table["change"]))


def test_json_alone_is_on_standard_output(capsys: Capture) -> None:
    assert main([*SHORT, "--bits", "4,3", "--average", "4", "--no-logits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("precision", found)
    assert found["n"] == 8
    assert {row["bits"] for row in found["ranking"]} == {3, 4}
    assert found["ranking"][0]["kl"] is None
    assert len(found["budget"]) == 16
    assert found["budget_kl"] is None
    assert found["files"][0] == "howsmooth-precision/precision.html"


def test_token_ids_and_untrained_models(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.profiling.Precision.write", lambda *_, **__: [Path("not-drawn.html")])
    np.save("ids.npy", [5, 6, 7, 8])
    GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=2).save_pretrained("tiny")
    given = ["--random-init", "--tokens", "ids.npy", "--layers", "0", "--bits", "4", "--quantisers", "token"]
    assert main(["precision", "./tiny", *given]) == 0
    out = capsys.readouterr().out
    assert "4 tokens" in out
    assert "left out" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["builtin-encoder", "--span", "5:2"], "span"),
        (["builtin-encoder", "--text", "nofile.txt"], "nofile.txt"),
        (["builtin-encodr"], "builtin-encoder"),
        (["builtin-encoder", "--layers", "9"], "layers"),
        (["builtin-encoder", "--bits", "1"], "bits"),
        (["builtin-encoder", "--bits", "20"], "bits"),
        (["builtin-encoder", "--quantisers", "row"], "quantisers"),
        (["builtin-encoder", "--average", "0"], "average"),
        (["builtin-encoder", "--average", "4", "--bits", "4"], "--bits 2,3,4,5,6,8"),
        (["builtin-encoder", "--average", "2"], "average: expected at least 3"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(["precision", *arguments]) == 2
    (*_, line) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line
