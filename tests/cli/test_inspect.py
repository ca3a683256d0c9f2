"""``howsmooth inspect``: what is printed, and what is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BitNetConfig,
    CLIPConfig,
    Gemma2Config,
    MambaConfig,
    MistralConfig,
    T5Config,
    ViTConfig,
)

import howsmooth as hs
from howsmooth.bounds import norm_radius
from howsmooth.cli import main
from howsmooth.models import inspect_model, load_model
from tests._documented import check_documented

inspect_command = importlib.import_module("howsmooth.cli.inspect")
Result = tuple[int, str, str]
SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    capsys.readouterr()
    code = main(["inspect", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def captured() -> list[hs.Site]:
    return hs.capture(load_model("builtin-encoder"), torch.arange(16)[None])


def lines(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_model_with_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspected(capsys, "builtin-encoder")
    said = lines(out)
    assert (code, err) == (0, "Reading\nInspecting\n")
    assert said[0] == "builtin-encoder, BertModel: 4 attention layers"
    assert {"heads 8", "mask none", "layout post-norm", "scopes all scopes"} <= set(said)
    assert "dimensions tokens 256, queries and keys 32, values 32" in said
    (row,) = (line for line in said if "attention.self" in line)
    assert row.startswith("0 to 3 encoder.layer.*.attention.self (4 alike) ")
    radii = [norm_radius(site.norm) for site in captured()]
    assert row.endswith(f" {min(radii):.4g} to {max(radii):.4g}")
    assert "All layers: closed form, every parameter is known" in said
    assert said[-1] == "No layer is refused."
    assert "The masks are those of an input of 16 tokens." in said


def test_as_decoder_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    BertConfig(**SIZES).save_pretrained("bert")
    options = ["--random-init", "--as-decoder", "--json", "-q", "--tokens", "5"]
    code, out, err = inspected(capsys, "bert", *options)
    found = json.loads(out)
    assert (code, err) == (0, "")
    check_documented("inspect", found)
    assert (found["name"], found["model"], found["tokens"]) == ("bert", "BertModel", 5)
    assert [(site["layer"], site["masking"], site["heads"]) for site in found["sites"]] == [(0, "causal", 2)]
    assert found["refusals"] == []


def test_a_configuration_alone(capsys: pytest.CaptureFixture[str]) -> None:
    MistralConfig(**SIZES, sliding_window=4).save_pretrained("alone")
    code, out, _ = inspected(capsys, "./alone", "--random-init")
    assert code == 0
    assert {"heads 2, 1 of keys and values", "mask sliding window 4, causal"} <= set(lines(out))
    assert "positions in scores rotary" in lines(out)
    assert inspected(capsys, "./alone")[0] == 2
    out = inspected(capsys, "./alone", "--random-init", "--tokens", "3")[1]
    assert (
        "The masks are those of an input of 3 tokens; a sliding window of 4 is visible only with more" in out
    )


def test_a_layer_that_is_captured_around_its_softmax_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    BitNetConfig(**SIZES).save_pretrained("bitnet")
    code, out, _ = inspected(capsys, "bitnet", "--random-init", "-q")
    assert code == 0
    assert out.count("attn_sub_norm (BitNetRMSNorm) lies between") == 1
    assert {"path closed form", "positions in scores inside the layer"} <= set(lines(out))
    assert any(line.startswith("The layer: closed form, the softmax in closed form") for line in lines(out))
    assert "layers.0.self_attn" in out


def test_cross_attention_is_listed_with_its_scope(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    config = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5Config(**config, num_decoder_layers=2).save_pretrained("t5-like")
    code, out, _ = inspected(capsys, "t5-like", "--random-init", "-q")
    said = lines(out)
    assert code == 0
    assert said[0] == "t5-like, T5Model: 5 attention layers"
    (cross,) = [line for line in said if line.startswith("2, 4 decoder.block.*.layer.1.EncDecAttention")]
    assert cross.endswith("(2 alike) none none autodiff scope cross-attention")
    assert "No layer is refused." in said


def test_a_model_without_a_softmax_ends_with_its_table_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    MambaConfig(vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=3).save_pretrained(
        "mamba-like"
    )
    code, out, err = inspected(capsys, "mamba-like", "--random-init", "-q")
    said = lines(out)
    assert (code, err) == (2, "")
    assert said[0] == "mamba-like, MambaModel: 0 attention layers, 3 layers without a softmax"
    assert "- layers.* (3 alike): refused: no softmax" in said
    assert said[-1].startswith("layers.* (3 layers): The layer has no softmax: a linear or state-space mixer")


def test_an_image_is_made_for_a_vision_model(capsys: pytest.CaptureFixture[str]) -> None:
    ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32,
        patch_size=8,
    ).save_pretrained("vit-like")  # fmt: skip
    code, out, _ = inspected(capsys, "vit-like", "--random-init", "--json", "-q")
    found = json.loads(out)
    assert (code, found["tokens"], found["refusals"]) == (0, 17, [])
    assert found["sites"][0]["scopes"] == ["head", "heads", "attention", "residual", "block"]
    _, out, _ = inspected(capsys, "vit-like", "--random-init", "-q")
    assert "The masks are those of an input of 17 tokens.\n" in out  # no advice to give more
    code, _, err = inspected(capsys, "vit-like", "--random-init", "--tokens", "5", "-q")
    assert (code, "tokens: expected no number: the image that the model takes" in err) == (2, True)


def test_a_large_configuration_is_built_with_fewer_layers_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 4}
    kinds = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    Gemma2Config(**sizes, layer_types=kinds, sliding_window=4).save_pretrained("large")
    monkeypatch.setattr(inspect_command, "_MOST_WEIGHTS", 1000)
    code, out, _ = inspected(capsys, "large", "--random-init", "-q")
    assert code == 0
    assert lines(out)[0] == "large, Gemma2Model: 3 attention layers"
    assert "built with 3 of 4 layers, as all have 0.0 billion weights." in " ".join(lines(out))
    masks = [site.masking for site in inspect_model(load_model("large", random_init=True)).sites]
    expected = {"sliding_attention": "sliding window 4, causal", "full_attention": "causal"}
    assert masks == [expected[kind] for kind in kinds]


def test_refusals_are_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPConfig(text_config={**small, "vocab_size": 60}, vision_config=small).save_pretrained("clip-like")
    cases = {
        ("clip-like", "--random-init"): "Measure its parts one at a time, each with --part NAME",
        ("nothing-of-this-name", "-q"): "nothing-of-this-name",
        ("builtin-decoder", "--as-decoder", "-q"): "is a decoder already",
        ("builtin-decoder", "--tokens", "1"): "tokens",
        ("builtin-decoder", "--tokens", "100000"): "tokens: expected at most",
        (): "Missing argument 'MODEL'",
    }
    for arguments, words in cases.items():
        code, out, err = inspected(capsys, *arguments)
        assert (code, out) == (2, ""), arguments
        last = err.splitlines()[-1]
        assert last.startswith("error: "), arguments
        assert words in last, arguments
