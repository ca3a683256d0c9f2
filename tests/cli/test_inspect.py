"""``howsmooth inspect``: the attention layers of models, and what can be measured on them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BitNetConfig,
    Gemma2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    T5Config,
    ViTConfig,
)

import howsmooth as hs
from howsmooth.bounds import norm_radius
from howsmooth.cli import main
from howsmooth.models import inspect_model, load_model
from tests._documented import check_documented

inspect_command = importlib.import_module("howsmooth.cli.inspect")
Result = tuple[int, list[str], str]
HEADS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES = {**HEADS, "vocab_size": 60, "num_key_value_heads": 1, "head_dim": 8}
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    """The exit code, the lines of the output without their spaces, and the errors."""
    code = main(["inspect", *arguments])
    captured = capsys.readouterr()
    return code, [" ".join(line.split()) for line in captured.out.splitlines()], captured.err


def test_a_model_with_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, err = inspected(capsys, "builtin-encoder")
    assert (code, err) == (0, "Reading\nInspecting\n")
    assert said[0] == "builtin-encoder, BertModel: 4 attention layers"
    assert {"heads 8", "mask none", "layout post-norm", "scopes all scopes"} <= set(said)
    assert "dimensions tokens 256, queries and keys 32, values 32" in said
    (row,) = (line for line in said if "attention.self" in line)
    assert row.startswith("0 to 3 encoder.layer.*.attention.self (4 alike) ")
    sites = hs.capture(load_model("builtin-encoder"), torch.arange(16)[None])
    radii = [norm_radius(site.norm) for site in sites]
    assert row.endswith(f" {min(radii):.4g} to {max(radii):.4g}")
    assert "All layers: closed form, every parameter is known" in said
    assert said[-1] == "No layer is refused."
    assert "The masks are those of an input of 16 tokens." in said


def test_as_decoder_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    BertConfig(**SIZES).save_pretrained("bert")
    options = ["--random-init", "--as-decoder", "--json", "-q", "--tokens", "5"]
    code, out, err = inspected(capsys, "bert", *options)
    found = json.loads(" ".join(out))
    assert (code, err) == (0, "")
    check_documented("inspect", found)
    assert (found["name"], found["model"], found["tokens"]) == ("bert", "BertModel", 5)
    assert [(site["layer"], site["masking"], site["heads"]) for site in found["sites"]] == [(0, "causal", 2)]
    assert found["refusals"] == []


# Types of models: options, exit code, and what begins a line of the output.
CASES: dict[str, tuple[Callable[[], PreTrainedConfig], list[str], int, list[str]]] = {
    "sliding window": (
        lambda: MistralConfig(**SIZES, sliding_window=4), [], 0,
        [
            "heads 2, 1 of keys and values", "mask sliding window 4, causal", "positions in scores rotary",
            "The masks are those of an input of 16 tokens.",
        ],
    ),
    "fewer tokens than the window": (
        lambda: MistralConfig(**SIZES, sliding_window=4), ["--tokens", "3"], 0,
        ["The masks are those of an input of 3 tokens; a sliding window of 4 is visible only with more"],
    ),
    "captured around its softmax": (
        lambda: BitNetConfig(**SIZES), [], 0,
        [
            "path closed form", "positions in scores inside the layer",
            "The layer: closed form, the softmax in closed form", "0 layers.0.self_attn",
        ],
    ),
    "cross-attention": (
        lambda: T5Config(**T5, num_decoder_layers=2), [], 0,
        [
            "kind, T5Model: 5 attention layers", "No layer is refused.",
            "2, 4 decoder.block.*.layer.1.EncDecAttention (2 alike) none none autodiff scope cross-attention",
        ],
    ),
    "without a softmax": (
        lambda: MambaConfig(vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=3), [], 2,
        [
            "kind, MambaModel: 0 attention layers, 3 layers without a softmax",
            "- layers.* (3 alike): refused: no softmax",
            "layers.* (3 layers): The layer has no softmax: a linear or state-space mixer",
        ],
    ),
    "an image": (
        lambda: ViTConfig(**HEADS, image_size=32, patch_size=8), [], 0,
        ["The masks are those of an input of 17 tokens.", "scopes all scopes", "No layer is refused."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_type_of_model(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, options, expected, begins = CASES[case]
    config().save_pretrained("kind")
    code, said, err = inspected(capsys, "kind", "--random-init", "-q", *options)
    assert (code, err) == (expected, "")
    assert [words for words in begins if not any(line.startswith(words) for line in said)] == [], said
    assert sum("attn_sub_norm (BitNetRMSNorm) lies between" in line for line in said) == ("around" in case)


def test_a_large_configuration_is_built_with_fewer_layers_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 4}
    kinds = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    Gemma2Config(**sizes, layer_types=kinds, sliding_window=4).save_pretrained("large")
    monkeypatch.setattr(inspect_command, "_MOST_WEIGHTS", 1000)
    code, said, _ = inspected(capsys, "large", "--random-init", "-q")
    assert code == 0
    assert said[0] == "large, Gemma2Model: 3 attention layers"
    assert "built with 3 of 4 layers, as all have 0.0 billion weights." in " ".join(said)
    masks = [site.masking for site in inspect_model(load_model("large", random_init=True)).sites]
    expected = {"sliding_attention": "sliding window 4, causal", "full_attention": "causal"}
    assert masks == [expected[kind] for kind in kinds]
