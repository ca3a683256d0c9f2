"""``howsmooth inspect``: what is printed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BitNetConfig, BloomConfig, MistralConfig

from howsmooth.cli import main

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


def lines(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_model_with_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspected(capsys, "builtin-encoder")
    said = lines(out)
    assert (code, err) == (0, "Reading\nInspecting\n")
    assert said[0] == "builtin-encoder, BertModel: 4 attention layers"
    assert {"heads 8", "mask none", "layout post-norm", "scopes all scopes"} <= set(said)
    assert "dimensions tokens 256, queries and keys 32, values 32" in said
    assert [line.split()[:2] for line in said if "attention.self" in line] == [
        [str(layer), f"encoder.layer.{layer}.attention.self"] for layer in range(4)
    ]
    assert "layer name its radius" in said
    assert len({line.split()[2] for line in said if "attention.self" in line}) == 4  # each its own
    assert said[-1] == "Nothing is refused."


def test_as_decoder_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    BertConfig(**SIZES).save_pretrained("bert")
    options = ["--random-init", "--as-decoder", "--json", "-q", "--tokens", "5"]
    code, out, err = inspected(capsys, "bert", *options)
    found = json.loads(out)
    assert (code, err) == (0, "")
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


def test_what_is_refused_is_listed_with_its_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    BitNetConfig(**SIZES).save_pretrained("bitnet")
    code, out, _ = inspected(capsys, "bitnet", "--random-init", "-q")
    assert code == 0
    assert out.count("attn_sub_norm (BitNetRMSNorm) lies between") == 1
    assert "all layers, all scopes: The output projection of the layer cannot" in lines(out)[-1]
    assert "layers.0.self_attn" in out


def test_refusals_are_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    BloomConfig(vocab_size=60, hidden_size=24, n_layer=1, n_head=2).save_pretrained("bloom")
    cases = {
        ("bloom", "--random-init"): "its attention (BloomAttention) does not go through",
        ("t5", "--random-init"): "encoder-decoder",
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
