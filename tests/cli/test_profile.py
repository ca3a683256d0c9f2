"""``howsmooth profile`` and ``howsmooth precision``: what they print and write."""

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
pytestmark = pytest.mark.usefixtures("undrawn")


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
    check_documented("profile", said)
    assert {row["scope"] for row in said["ranking"]} == {"attention"}
    assert said["files"][0] == "howsmooth-profile/profile.html"


def test_a_type_of_model_without_a_tokenizer_gets_one_of_the_text(capsys: Capture) -> None:
    GPT2Config(vocab_size=300, n_embd=24, n_layer=1, n_head=2).save_pretrained("tiny")
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    given = ["./tiny", "--random-init", "--text", "letter.txt", "--span", "0:4", "-q"]
    assert main(["profile", *given]) == 0
    assert "tiny" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["profile", "precision", "bound"])
def test_token_ids_are_an_input_and_untrained_weights_are_named(name: str, capsys: Capture) -> None:
    GPT2Config(vocab_size=300, n_embd=24, n_layer=1, n_head=2).save_pretrained("tiny")
    np.save("ids.npy", [1, 2, 3, 4, 5])
    options = ["--bits", "4", "--quantisers", "token"] if name == "precision" else []
    assert (
        main([name, "./tiny", "--random-init", "--layers", "0", "-q", "--tokens", "ids.npy", *options]) == 0
    )
    out = capsys.readouterr().out
    assert "tiny (random init)" in out
    assert ("n = 5" if name == "bound" else "5 tokens") in out
    assert ("left out" in out) == (name == "precision")


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
    written = {path.name for path in Path("howsmooth-profile").iterdir()}
    assert {"depth.csv", "depth.pdf", "depth.png"} < written


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_influences_as_json(scope: str, tiny: list[str], capsys: Capture) -> None:
    assert main([*tiny, "--scope", scope, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("profile" if scope == "attention" else "profile --scope model", found)
    largest = found["influence"]["largest"]
    if scope == "model":
        assert {row["output"] for row in largest} == {4}  # the last token
        assert found["value"] == found["stages"][-1]["until"]
    values = [row["value"] for row in largest]
    assert values == sorted(values, reverse=True)
    assert found["influence"]["token_wise"]["lower"] <= found["influence"]["token_wise"]["upper"]


# ---- many texts, and two models

LINES = "Dear Alice, it was a cat.\n\nThe cat sat on the mat.\nNo dog was there at all.\n"


def test_each_line_of_a_file_is_a_text(capsys: Capture) -> None:
    Path("lines.txt").write_text(LINES)
    given = ["profile", "builtin-encoder", "--texts", "lines.txt", "--layers", "0", "--scope", "head"]
    assert main([*given, "--out", "many"]) == 0
    out = capsys.readouterr().out
    texts = [line for line in LINES.splitlines() if line]
    found = hs.profile("builtin-encoder", texts, layers=[0], scopes="head")
    table = pd.read_csv("many/profile.csv")
    assert list(table["mean"]) == list(found.table["mean"])
    assert "\n".join(line for line in repr(found).splitlines() if "rank" in line) in out
    kept = Path("many/texts.jsonl").read_text()
    assert kept.count("line 3 of the local file lines.txt") == 0  # the key is a digest
    assert main([*given, "--out", "many", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert Path("many/texts.jsonl").read_text() == kept
    check_documented("profile --texts, --against", said)
    assert said["ranking"][0]["mean"] == found.ranking["mean"][0]
    assert [one.partition(",")[0] for one in said["inputs"]] == [
        f"line {i} of the local file lines.txt" for i in (1, 3, 4)
    ]


def test_finished_texts_are_kept_after_an_interruption(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("lines.txt").write_text(LINES)
    given = ["profile", "builtin-encoder", "--texts", "lines.txt", "--layers", "0", "--scope", "head", "-q"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("howsmooth.profiling.several_profiles._statistics", interrupt)
        assert main(given) == 130
    said = capsys.readouterr().err
    assert "interrupted: texts are kept in howsmooth-profile/texts.jsonl. Continue with:\n  howsmooth" in said
    monkeypatch.setattr("howsmooth.profiling.lipschitz_profile.layers_of", interrupt)
    assert main(given) == 0


def test_the_constants_of_a_model_against_those_of_another(capsys: Capture) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=40, n_layer=1, n_head=2)))
        models[-1].save_pretrained(f"tiny-{seed}")
    np.save("ids.npy", [5, 6, 7, 8, 9])
    given = ["profile", "./tiny-0", "--against", "./tiny-1", "--tokens", "ids.npy"]
    assert main([*given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    check_documented("profile --texts, --against", said)
    first, second = (hs.profile(f"./tiny-{seed}", torch.tensor([5, 6, 7, 8, 9])) for seed in (0, 1))
    by_place = {(row["scope"], row["head"]): row["ratio"] for row in said["ranking"]}
    for scope, head, ratio in zip(
        first.table["scope"], first.table["head"], first.table["value"] / second.table["value"], strict=True
    ):
        assert by_place[scope, None if pd.isna(head) else head] == pytest.approx(ratio, rel=1e-12)
    assert said["model"] == "tiny-0 / tiny-1"
    assert Path("howsmooth-profile/comparison.html").exists()
    assert main(given[:2] + given[4:] + ["--scope", "parts", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert {row["scope"] for row in parts["ranking"]} == {"attention", "mlp", "whole-block"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--texts", "lines.txt", "--text", "alice"], "texts: expected no other input beside it, got --text"),
        (["--texts", "lines.txt", "--influence"], "texts: expected the constants of layers and heads"),
        (["--against", "builtin-decoder", "--scope", "model"], "against: expected the constants of layers"),
        (["--texts", "line.txt"], "texts: expected a file with at least two lines, got 1 line. Give"),
        (["--texts", "none.txt"], "text 'none.txt' is neither a known name nor a file"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], said: str, capsys: Capture) -> None:
    Path("lines.txt").write_text(LINES)
    Path("line.txt").write_text(LINES.partition("\n")[0])
    assert main(["profile", "builtin-encoder", *options]) == 2
    assert said in capsys.readouterr().err


def test_an_interruption_is_said(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.models.load_model", interrupt)
    assert main(["profile", "builtin-encoder"]) == 130
    assert capsys.readouterr().err.endswith("interrupted: nothing was written.\n")
    assert not Path("howsmooth-profile").exists()


# ---- precision

SHORT = ["precision", "builtin-decoder", "--span", "0:8", "--layers", "0", "--quantisers", "token"]


def test_the_bits_of_a_budget_are_printed_with_their_divergence(capsys: Capture) -> None:
    Path("letter.txt").write_text("Dear Alice, it was a cat that sat on the mat.")
    assert main([*SHORT, "--text", "letter.txt", "--bits", "8,3", "--average", "4", "--out", "found"]) == 0
    out = capsys.readouterr().out
    text = Path("letter.txt").read_text()
    found = hs.precision("builtin-decoder", text, span="0:8", layers=[0], quantisers="token", bits=(3, 8))
    assert found.has_kl
    assert f"{found.table['change'].max():.4g}" in out
    budget = found.budget(4)
    for operand in "KV":
        given = " ".join(str(b) for b in budget[budget["operand"] == operand]["bits"])
        assert f"token 0 {operand} {given}" in [" ".join(line.split()) for line in out.splitlines()]
    assert f"at once: divergence {found.simulate(budget):.3g}, with 3 bits for all " in out
    assert f"{found.simulate(3):.3g} at 3 bits" in out
    assert "Page: found/precision.html" in out
    table = pd.read_csv("found/precision.csv")
    assert sorted(table["change"]) == pytest.approx(sorted(found.table["change"]))


def test_precision_as_json(capsys: Capture) -> None:
    short = [*SHORT[:-1], "token,kivi-4-4"]
    assert main([*short, "--bits", "4,3", "--average", "4", "--no-logits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("precision", found)
    assert found["n"] == 8
    assert {row["bits"] for row in found["ranking"]} == {3, 4}
    assert found["ranking"][0]["kl"] is None
    assert len(found["budget"]) == 2 * 16
    assert [row["quantiser"] for row in found["mixed"]] == ["token", "kivi-4-4"]
    assert found["mixed"][0]["bits"] == 4
    assert found["mixed"][0]["kl"] is None
    assert found["files"][0] == "howsmooth-precision/precision.html"


def test_precision_of_weights(capsys: Capture) -> None:
    short = ["precision", "builtin-decoder", "--span", "0:8", "--layers", "0", "--quantisers", "channel"]
    given = [*short, "--weights", "8,3", "--average", "4", "--out", "found"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    columns = "layer part bits quantiser predicted change output_norm predicted_kl kl entries name"
    assert found["ranking"][0].keys() == set(columns.split())
    assert {(row["part"], row["bits"]) for row in found["ranking"]} == {
        (part, bits) for part in ("attention", "MLP") for bits in (3, 8)
    }
    assert [row["part"] for row in found["budget"]] == ["MLP", "attention"]
    assert sorted(pd.read_csv("found/precision.csv")["kl"]) == sorted(r["kl"] for r in found["ranking"])
    for options, said in (
        (["--bits", "4", "--weights", "4"], "none beside --weights"),
        (["--weights", "4", "--average", "4"], "Give --weights 2,3,4,5,6,8"),
        (["--weights", "1"], "at least 2"),
    ):
        assert main([*short, *options]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
