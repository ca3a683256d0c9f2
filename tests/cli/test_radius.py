"""``howsmooth radius``: what it prints and writes, resumption, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import howsmooth as hs
from howsmooth.bounds.radius.classifier import Classifier
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from howsmooth.cli import main
from howsmooth.texts import load_text
from tests._classifier import save_classifier
from tests._documented import check_documented

Capture = pytest.CaptureFixture[str]
SHORT = ["radius", "model", "--no-attack", "--quiet"]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    save_classifier(Path("model"))
    Path("letter.txt").write_text("the cat sat")


def test_the_radii_are_printed_and_the_files_are_written(capsys: Capture) -> None:
    assert main([*SHORT, "--text", "letter.txt", "--out", "found"]) == 0
    out = capsys.readouterr().out
    found = hs.word_radii("model", load_text("letter.txt"), attack=False)
    assert repr(found) in out
    assert "Page: found/radius.html" in out
    assert list(pd.read_csv("found/radius.csv")["radius"]) == list(found.table["radius"])
    assert "the <" in Path("found/radius.html").read_text()


def test_several_sentences_in_a_file_are_named_as_one_input(capsys: Capture) -> None:
    Path("two.txt").write_text("the cat sat\n\nthe mat\n")
    assert main([*SHORT, "--text", "two.txt"]) == 0
    assert "The 2 lines of the text are one input, of which" in capsys.readouterr().out
    assert main([*SHORT, "--text", "letter.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("radius", found)
    assert "note" not in found


def test_embedded_tokens_give_the_radii_of_their_ids(capsys: Capture) -> None:
    model = hs.load_model("model", head=True).model
    ids = torch.tensor([[2, 5, 6, 3]])
    np.save("ids.npy", ids[0].numpy())
    np.save("x.npy", Classifier.at(model, {"input_ids": ids}).place.tokens.numpy())
    target = str((int(model(ids).logits[0].argmax()) + 1) % 3)
    rankings = []
    for given in (["--tokens", "ids.npy"], ["--embeddings", "x.npy"]):
        assert main([*SHORT, *given, "--jointly", "--norm", "inf", "--target", target, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["ranking"][0]["rival"] == int(target)
        assert found["n"] == 4
        assert found["computed"] == "float64"
        assert found["norm"] == "inf"
        rankings.append(found["ranking"][0]["radius"])
    assert rankings[0] == pytest.approx(rankings[1], rel=1e-4)


def test_tokens_of_another_width_and_numbers_that_are_none_are_named(capsys: Capture) -> None:
    np.save("wide.npy", np.ones((4, 3)))
    np.save("nan.npy", np.full((4, 8), np.nan))
    for file, said in (
        ("wide.npy", "inputs: expected embedded tokens (n, 8)"),
        ("nan.npy", "nan.npy: expected"),
    ):
        assert main([*SHORT, "--embeddings", file]) == 2
        assert f"error: {said}" in capsys.readouterr().err


def test_chosen_tokens_move_alone_or_jointly(capsys: Capture) -> None:
    line = [*SHORT, "--text", "letter.txt", "--out", "found", "--json"]
    at = NetworkAtInput(
        hs.load_model("model", head=True).model, {"input_ids": torch.tensor([[2, 5, 6, 7, 3]])}
    )
    assert main([*line, "--positions", "1,-1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["position"]: row["token"] for row in found["ranking"]} == {1: "the", 4: "[SEP]"}
    for positions, tokens in (("1,-1", [1, 4]), ("0:1", [0, 1])):
        assert main([*line, "--positions", positions, "--jointly"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert f"while tokens {positions} move jointly" in found["statement"]
        (row,) = found["ranking"]
        expected = at.radius(tokens, order=2, attack=False).radius
        assert row["radius"] == pytest.approx(expected, rel=5e-3)


def test_after_an_interruption_the_same_command_continues(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [*SHORT, "--text", "letter.txt", "--out", "found"]
    whole = NetworkAtInput.radius
    made: list[int] = []

    def until_the_third(self, tokens, **how):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(tokens)
        return whole(self, tokens, **how)

    monkeypatch.setattr(NetworkAtInput, "radius", until_the_third)
    assert main(line) == 130
    said = capsys.readouterr().err
    assert "radii of 2 tokens are saved in found" in said
    assert "howsmooth radius model" in said
    monkeypatch.setattr(NetworkAtInput, "radius", lambda *a, **how: made.append(a[1]) or whole(*a, **how))
    assert main(line) == 0
    assert made == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "--span", "5:2"], "span"),
        (["model", "--text", "nofile.txt"], "nofile.txt"),
        (["model", "--norm", "1"], "norm"),
        (["model", "--target", "7", "--text", "letter.txt"], "target"),
        (["model", "--seconds", "5", "--jointly"], "seconds"),
        (["model", "--embeddings", "x.npy"], "x.npy"),
        (["model", "--embeddings", "x.npy", "--span", "0:2"], "--positions chooses the tokens that move"),
        (["model", "--text", "letter.txt", "--positions", "9"], "positions: expected tokens of model"),
        (["model", "--embeddings", "x.npy", "--tokens", "ids.npy"], "tokens"),
        (["builtin-encoder"], "BertForMaskedLM"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(["radius", *arguments]) == 2
    (*_, line) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line
