"""``howsmooth bound``: what is printed, what is written, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertConfig, ViTConfig, ViTModel

import howsmooth as hs
from howsmooth.bounds import ball_upper_bound, norm_radius, table
from howsmooth.cli import main
from howsmooth.cli.terminal_output import amount
from howsmooth.models.attention_parameter_files import save_parameters
from tests._cases import dense_jacobian, random_attention
from tests._cases import tokens as gaussian
from tests._documented import check_documented
from tests._sources import SmallModel, norm, plain_table, small_sources, tokens
from tests._study import contents_of, make_plan, make_tools, run, words
from tests._tiny_models import tiny

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, model: SmallModel | None = None, real: bool = False) -> Result:
        monkeypatch.setattr("howsmooth.bounds.table", table if real else plain_table)
        capsys.readouterr()
        with small_sources(model):
            code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def head(tmp_path: Path) -> hs.SelfAttention:
    """One head in ``head.safetensors``, with five tokens."""
    attention = random_attention(31, heads=1, d_out=None)
    save_parameters(tmp_path / "head.safetensors", attention, gaussian(3, 5, attention.d))
    return attention


def said(out: str) -> dict[str, Any]:
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    return found


def values(attention: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(b["name"], b["side"]): b["value"] for b in attention["bounds"] if b["holds"]}


def test_bounds_of_a_file_hold_at_its_tokens(howsmooth: Howsmooth, head: hs.SelfAttention) -> None:
    code, out, _ = howsmooth("bound", "head.safetensors", "--scope", "head", "--json", "-q", real=True)
    check_documented("bound", said(out))
    (found,) = said(out)["attentions"]
    x = gaussian(3, 5, head.d)
    true = float(torch.linalg.matrix_norm(dense_jacobian(head, x), 2))
    radius = float(torch.linalg.vector_norm(x, dim=1).max())
    assert code == 0
    assert (found["n"], found["radius"]) == (5, pytest.approx(radius, rel=1e-12))
    assert found["radius_from"] == "the longest of 5 tokens"
    bounds = values(found)
    assert bounds["measured", "lower"] <= true * (1 + 1e-12)
    assert true <= bounds["measured", "upper"] * (1 + 1e-12)
    assert bounds["ball_upper_bound", "upper"] == ball_upper_bound(head, 5, radius).value
    uppers = [value for (_, side), value in bounds.items() if side == "upper" and value is not None]
    assert len(uppers) > 5
    assert min(uppers) >= true * (1 - 1e-6)


def test_other_lengths_and_radii_of_a_file_leave_its_tokens_out(
    howsmooth: Howsmooth, head: hs.SelfAttention
) -> None:
    code, out, _ = howsmooth(
        "bound", "head.safetensors", "--lengths", "9,30", "--radius", "2", "--scope", "head", "--json", "-q"
    )
    assert code == 0
    for found, n in zip(said(out)["attentions"], (9, 30), strict=True):
        assert (found["n"], found["radius"], found["radius_from"]) == (n, 2.0, "given")
        assert {b["quantity"] for b in found["bounds"]} == {"Lip(f on B_R^n)"}


def test_a_ball_that_does_not_hold_the_tokens(howsmooth: Howsmooth, head: hs.SelfAttention) -> None:
    _, out, _ = howsmooth("bound", "head.safetensors", "--radius", "0.5", "--scope", "head", "--json", "-q")
    (found,) = said(out)["attentions"]
    true = float(torch.linalg.matrix_norm(dense_jacobian(head, gaussian(3, 5, head.d)), 2))
    assert [b["name"] for b in found["bounds"]] == ["measured", "measured", "certificate", "theorem", "other"]
    assert values(found)["measured", "upper"] == pytest.approx(true, rel=1e-5)
    assert (found["radius"], found["radius_from"]) == (0.5, "given")


def test_bounds_on_a_ball_are_compared_only_with_tokens_in_it(
    howsmooth: Howsmooth, head: hs.SelfAttention
) -> None:
    _, small, _ = howsmooth("bound", "head.safetensors", "--radius", "0.5", "--scope", "head", "-q")
    _, large, _ = howsmooth("bound", "head.safetensors", "--radius", "50", "--scope", "head", "-q")
    assert small.count("÷ measured") == 1
    assert "outside of this ball" in " ".join(small.split())
    assert large.count("÷ measured") == 2
    assert "outside" not in large


def test_a_model_gives_one_table_a_layer_with_the_radius_of_its_norm(howsmooth: Howsmooth) -> None:
    code, out, err = howsmooth("bound", "small", "--text", "prose", "--lengths", "6")
    assert code == 0
    assert "small, layer 0, scope attention, unmasked, n = 6" in out
    assert "small, layer 1, scope attention, causal, n = 6" in out
    assert f"R = {norm_radius(norm()):.4g} (the LayerNorm before the attention)" in out
    assert "(the longest of 6 tokens)" in out
    assert "measured" in out
    assert "needs: luck" in out
    assert "Bounding" in err


@pytest.mark.parametrize("lengths", ["8", "5,8,11"])
def test_the_sequence_is_that_of_measure(howsmooth: Howsmooth, tmp_path: Path, lengths: str) -> None:
    tools, _ = make_tools(models={"small": SmallModel()}, texts={"prose": words(100)})
    run(make_plan(lengths=(8,), samples=1, seed=7, bounds="none"), tmp_path / "measured", tools)
    (start,) = set(contents_of(tmp_path / "measured").measurements["start"])
    options = ["--lengths", lengths, "--seed", "7", "--layers", "1", "--json", "-q"]
    _, out, _ = howsmooth("bound", "small", "--text", "prose", *options)
    (found,) = [attention for attention in said(out)["attentions"] if attention["n"] == 8]
    x = tokens(torch.arange(start, start + 8)[None])[0].double()
    f = SmallModel().attention(1, 8).to(dtype=torch.float64)
    true = float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))
    assert values(found)["measured", "upper"] == pytest.approx(true, rel=1e-5)
    _, other, _ = howsmooth("bound", "small", "--text", "prose", *options, "--seed", "8")
    assert values(said(other)["attentions"][0]) != values(said(out)["attentions"][0])


def test_heads_are_told_apart_and_written(howsmooth: Howsmooth, tmp_path: Path) -> None:
    options = ["--scope", "head", "--heads", "0,2", "--layers", "1", "--lengths", "5,7", "--out", "tables"]
    code, out, _ = howsmooth("bound", "small", "--text", "prose", *options)
    table = pd.read_csv(tmp_path / "tables" / "bounds.csv")
    assert code == 0
    assert "Written: tables/bounds.csv" in out
    assert set(zip(table["head"], table["n"], strict=True)) == {(0, 5), (0, 7), (2, 5), (2, 7)}
    assert "layer 1, head 2, scope head, causal, n = 7" in out


def test_rotary_positions_have_certificates_and_one_bound_on_a_ball(howsmooth: Howsmooth) -> None:
    command = ("bound", "small", "--text", "prose", "--lengths", "5", "-q")
    code, out, _ = howsmooth(*command, "--json", model=SmallModel(rotary=True), real=True)
    found = said(out)["attentions"]
    assert code == 0
    on_ball = {b["name"] for one in found for b in one["bounds"] if b["quantity"] != "‖D_X f‖"}
    assert on_ball == {"any_scores_ball_upper_bound"}
    assert all(("certificate", "upper") in values(one) for one in found)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, a small ViT, token ids and embedded tokens."""
    folder = tmp_path_factory.mktemp("models")
    tiny("llama").save_pretrained(folder / "llama")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder / "vit")
    (folder / "ids.txt").write_text(" ".join(str(3 + i * 7 % 20) for i in range(40)), encoding="utf-8")
    np.save(folder / "x.npy", gaussian(5, 9, 24).numpy().astype("float32"))
    return folder


@pytest.mark.parametrize(
    ("model", "option", "lengths"),
    [
        ("llama", ["--tokens", "ids.txt"], "7"),
        ("llama", ["--embeddings", "x.npy"], "5"),
        ("vit", ["--images", "builtin"], None),
    ],
)
def test_other_inputs_than_a_text(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    models: Path,
    model: str,
    option: list[str],
    lengths: str | None,
) -> None:
    monkeypatch.chdir(models)
    limits = [] if lengths is None else ["--lengths", lengths]
    assert main(["bound", model, *option, *limits, "--json", "-q"]) == 0
    found = said(capsys.readouterr().out)["attentions"]
    assert {one["layer"] for one in found} >= {0, 1}
    if lengths is not None:
        assert {one["n"] for one in found} == {int(lengths)}
    for one in found:
        measured = values(one)["measured", "upper"]
        limit = min(b["value"] for b in one["bounds"] if b["side"] == "upper" and b["name"] != "measured")
        assert 0 < measured <= limit


def test_numbers_beyond_all_range_are_written_with_their_power() -> None:
    assert amount(1000.0) == "1.9701e+434"
    assert amount(-1000.0) == "5.0760e-435".replace("0e", "e")
    assert amount(math.log(12.5)) == "12.5"
    assert amount(1e160) == "10^(4.3429e+159)"
    assert [amount(math.log(552.2286), 4, upper=upper) for upper in (False, True)] == ["552.2", "552.3"]
    assert [amount(1000.0, upper=upper) for upper in (False, True)] == ["1.97e+434", "1.9701e+434"]
    assert amount(math.inf) == "inf"
    assert amount(-math.inf) == "0"


def test_a_bound_that_overflows_is_null_with_its_logarithm(
    howsmooth: Howsmooth, head: hs.SelfAttention
) -> None:
    options = ["--lengths", "9", "--radius", "500", "--scope", "head"]
    _, out, _ = howsmooth("bound", "head.safetensors", *options, "--json", "-q")
    theorem, other = said(out)["attentions"][0]["bounds"]
    assert (theorem["value"], theorem["log_value"], theorem["holds"]) == (None, 800.0, True)
    assert (other["value"], other["log_value"], other["holds"]) == (None, None, False)
    _, out, _ = howsmooth("bound", "head.safetensors", *options, "-q")
    assert "2.7264e+347" in out


def test_a_classifier_of_embedded_tokens_names_its_encoder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertConfig(vocab_size=1, pad_token_id=0, **sizes).save_pretrained("bert")
    np.save("x.npy", np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32))
    given = ["bound", "bert", "--random-init", "--embeddings", "x.npy", "--lengths", "5", "-q"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "is a placeholder of one row, got the whole model, which reads token ids. Take the encoder" in said
    assert main([*given, "--part", "encoder"]) == 0


SMALL = ["bound", "small", "--text", "prose", "--lengths", "6"]
FILE = ["bound", "head.safetensors"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "radius of words": ([*SMALL, "--radius", "data"], "radius: expected a finite number > 0, or auto"),
    "length zero": (["bound", "small", "--lengths", "0"], "lengths: expected numbers of at least 1"),
    "no such layer": ([*SMALL, "--layers", "2"], "layers of small, which has 2"),
    "no such head": ([*SMALL, "--scope", "head", "--heads", "3"], "heads of small, which has 3"),
    "heads without their scope": ([*SMALL, "--heads", "1"], "Add the scope head"),
    "no such scope": ([*SMALL, "--scope", "block"], "scope: expected one of head, heads"),
    "too long": (["bound", "small", "--text", "prose", "--lengths", "65"], "at most 64 tokens"),
    "empty text": (["bound", "small", "--text", "empty"], "text 'empty' is empty"),
    "no such model": (["bound", "nothing", "--text", "prose"], "'nothing' is not known"),
    "no source": (["bound"], "Missing argument 'SOURCE'"),
    "no file": (["bound", "none.npz"], "There is no parameter file none.npz"),
    "pickled": (["bound", "pickled.npz", "--lengths", "4"], "never read"),
    "file without tokens": (
        ["bound", "bare.npz"],
        "because the file holds no tokens X, got none. Give --lengths and --radius.",
    ),
    "file without radius": (["bound", "bare.npz", "--lengths", "4"], "Give --radius."),
    "second layer of a file": ([*FILE, "--layers", "1"], "layers of head.safetensors, which has 1"),
    "file untrained": ([*FILE, "--random-init"], "expected a model with --random-init"),
    "two inputs": (
        [*SMALL, "--tokens", "ids.txt"],
        "expected one text, file of tokens, images or audio, got ",
    ),
    "file with a text": ([*FILE, "--text", "alice"], "expected a model with --text, got the parameter file"),
    "seed": ([*SMALL, "--seed", "-1"], "seed: expected a number from 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence_and_exit_code_2(
    howsmooth: Howsmooth, head: hs.SelfAttention, tmp_path: Path, case: str
) -> None:
    save_parameters(tmp_path / "bare.npz", head)
    np.savez(tmp_path / "pickled.npz", A=np.array([{}], dtype=object))
    arguments, sentence = REFUSED[case]
    code, out, err = howsmooth(*arguments)
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("error: ")
    assert sentence in last


def test_a_text_too_short_for_the_length(howsmooth: Howsmooth) -> None:
    code, _, err = howsmooth(
        "bound", "small", "--text", "prose", "--lengths", "101", model=SmallModel(max_length=None)
    )
    assert code == 2
    assert "text 'prose' is too short: for small, its sequences need 101 tokens, and it has 100." in err
    assert "Use --lengths 100, or a smaller one, or a longer text." in err


def test_a_table_has_80_columns_and_its_sources_below(
    howsmooth: Howsmooth, head: hs.SelfAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("80", None):
        monkeypatch.setenv("COLUMNS", width) if width else monkeypatch.delenv("COLUMNS")
        code, out, _ = howsmooth("bound", "head.safetensors", "--scope", "head", "-q", real=True)
        tables, sources = out.split("\nSources;")
        assert code == 0
        assert max(len(line.rstrip()) for line in tables.splitlines() if "[" in line) <= 80
        for bound in hs.bounds.table(head, gaussian(3, 5, head.d)).query("name != 'measured'").itertuples():
            (number,) = {row.split()[-1] for row in tables.splitlines() if row.split()[:1] == [bound.name]}
            source = str(bound.source).removeprefix("howsmooth documentation, ")
            assert f"{number} {source}" in " ".join(sources.split())


def test_cross_attention_is_refused_with_what_takes_it(howsmooth: Howsmooth) -> None:
    code, _, err = howsmooth("bound", "small", "--scope", "cross-attention")
    assert code == 2
    assert "howsmooth measure takes this scope" in " ".join(err.split())


def test_an_out_that_cannot_be_written(howsmooth: Howsmooth, head: hs.SelfAttention, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, _, err = howsmooth(*FILE, "--scope", "head", "--out", "taken", "-q")
    assert code == 2
    assert "out: expected a writable folder, got taken" in err
