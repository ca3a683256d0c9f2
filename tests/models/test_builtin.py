from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from howsmooth.model_folders import BUILTIN_MODELS, builtin_folder
from tests._shared import script as load_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_builtin_models.py"

#: The losses are sums of a few thousand float32 terms; other machines round otherwise.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("scripts/train_builtin_models.py")


@pytest.fixture(params=BUILTIN_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    kind = AutoModelForMaskedLM if name == "builtin-encoder" else AutoModelForCausalLM
    folder = builtin_folder(name)
    model = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def facts_of(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((builtin_folder(name) / "training.json").read_text("utf-8"))
    return facts


# ---------------------------------------------------------------- the files


def test_both_together_stay_small() -> None:
    files = [file for name in BUILTIN_MODELS for file in builtin_folder(name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 12_000_000


def test_the_folder_is_complete_and_says_half_precision(name: str) -> None:
    folder = builtin_folder(name)
    needed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert needed <= {file.name for file in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(n).get_dtype() for n in names} == {"F16"}
        assert all(bool(weights.get_tensor(n).isfinite().all()) for n in names)


def test_every_byte_of_the_files_is_readable_by_all(name: str) -> None:
    # A wheel keeps the modes: weights readable by their owner alone would fail in a shared installation.
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in builtin_folder(name).iterdir())


def test_architecture(name: str) -> None:
    model, tokenizer = load(name)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (4, 8, 256)
    assert config.max_position_embeddings == tokenizer.model_max_length == 256
    assert config.vocab_size == len(tokenizer) == 2048
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


# ---------------------------------------------------------------- the tokenizer


def test_tokenizer_round_trips_any_text(name: str) -> None:
    _, tokenizer = load(name)
    prose = (builtin_folder(name) / "heldout.txt").read_text("utf-8")
    for text in (prose, "Étude, 日本語, 🙂 \t x = y[0]\r\n  end"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert not set(ids) & set(tokenizer.all_special_ids)
    # English is cut into pieces of several letters, else the vocabulary has been lost.
    ids = tokenizer(prose, add_special_tokens=False)["input_ids"]
    assert 3.0 < len(prose) / len(ids) < 5.0


def test_special_tokens() -> None:
    _, encoder = load("builtin-encoder")
    ids = encoder("The name of the file.")["input_ids"]
    assert encoder.convert_ids_to_tokens([ids[0], ids[-1]]) == ["[CLS]", "[SEP]"]
    special = {encoder.pad_token, encoder.unk_token, encoder.cls_token, encoder.sep_token, encoder.mask_token}
    assert special == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    _, decoder = load("builtin-decoder")
    assert decoder.eos_token == "<|endoftext|>"
    assert decoder.eos_token_id == load("builtin-decoder")[0].config.eos_token_id


# ---------------------------------------------------------------- really trained, and as the card says


def test_the_losses_of_the_card_are_those_of_the_files(name: str, script: ModuleType) -> None:
    model, tokenizer = load(name)
    facts = facts_of(name)
    kind, piece = facts["kind"], facts["heldout_piece"]
    text = (builtin_folder(name) / piece["file"]).read_text("utf-8")
    score = script.evaluate(model, kind, script.token_stream(tokenizer, text), tokenizer)
    assert score["predicted_tokens"] == piece["trained_as_saved"]["predicted_tokens"]
    assert score["loss"] == pytest.approx(piece["trained_as_saved"]["loss"], abs=TOLERANCE)

    untrained = script.new_model(script.Plan(**facts["plan"]), tokenizer).eval()
    nothing = script.evaluate(untrained, kind, script.token_stream(tokenizer, text), tokenizer)
    assert nothing["loss"] == pytest.approx(math.log(2048), abs=0.5)
    assert score["loss"] < nothing["loss"] - 3.0
    assert score["loss"] < piece["unigram_loss"] - 2.0

    card = (builtin_folder(name) / "README.md").read_text("utf-8")
    assert f"**{piece['trained_as_saved']['loss']:.3f}**" in card
    assert f"**{facts['heldout']['trained_as_saved']['loss']:.3f}**" in card


def test_losses_agree_with_those_of_transformers(name: str, script: ModuleType) -> None:
    """An independent road: the model's own loss, on inputs put together by the test."""
    model, tokenizer = load(name)
    text = (builtin_folder(name) / "heldout.txt").read_text("utf-8")
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][:128]])
    if name == "builtin-decoder":
        expected = model(ids, labels=ids).loss.item()
        assert script.evaluate(model, "decoder", ids[0], tokenizer)["loss"] == pytest.approx(
            expected, abs=1e-5
        )
    else:
        ((inputs, labels),) = script.evaluation_batches("encoder", ids[0], tokenizer)
        expected = model(inputs, labels=labels).loss.item()
        assert script.evaluate(model, "encoder", ids[0], tokenizer)["loss"] == pytest.approx(
            expected, abs=1e-5
        )


def test_masking_follows_the_recipe_of_bert(script: ModuleType) -> None:
    _, tokenizer = load("builtin-encoder")
    windows = script.wrapped(
        tokenizer, torch.randint(5, 2048, (400, 128), generator=torch.Generator().manual_seed(1))
    )
    inputs, labels = script.masked(windows, tokenizer, torch.Generator().manual_seed(2))
    chosen = labels != script.IGNORED
    assert torch.equal(labels[chosen], windows[chosen])
    assert torch.equal(inputs[~chosen], windows[~chosen])
    assert not chosen[:, [0, -1]].any()
    assert chosen.double().mean().item() == pytest.approx(0.15 * 126 / 128, abs=0.01)
    assert (inputs[chosen] == tokenizer.mask_token_id).double().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (inputs[chosen] == windows[chosen]).double().mean().item() == pytest.approx(0.1, abs=0.02)


# ---------------------------------------------------------------- the script


def test_held_out_blocks_are_apart(script: ModuleType) -> None:
    paragraphs = [f"Paragraph {i}." for i in range(1000)]
    train, heldout = script.split(script.Text("t", "\n\n".join(paragraphs) + "\n", "made up"))
    kept, apart = train.strip().split("\n\n"), heldout.strip().split("\n\n")
    assert sorted(kept + apart) == sorted(paragraphs)
    assert apart == paragraphs[380:400] + paragraphs[780:800]


@pytest.mark.slow
def test_held_out_piece_is_what_the_card_names(name: str, script: ModuleType) -> None:
    facts = facts_of(name)
    text = script.python_docs()
    if text.digest != facts["text"]["sha256"]:
        pytest.skip(
            f"trained on the prose of Python {facts['text']['python']}, which this Python's differs from"
        )
    piece = script.heldout_piece(script.split(text)[1])
    assert piece == (builtin_folder(name) / "heldout.txt").read_text("utf-8")
    assert len(text.content) == facts["text"]["characters"]


@pytest.mark.slow
def test_quick_training_runs_and_learns(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--quick",
        "--out",
        str(tmp_path / "out"),
        "--scratch",
        str(tmp_path / "s"),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    for kind in ("encoder", "decoder"):
        facts = json.loads((tmp_path / "out" / kind / "training.json").read_text())
        assert facts["heldout"]["trained_as_saved"]["loss"] < facts["heldout"]["untrained"]["loss"] - 0.5
        assert (tmp_path / "out" / kind / "README.md").read_text().startswith("---\nlicense: apache-2.0")
    weights = (tmp_path / "out" / "decoder" / "model.safetensors").read_bytes()
    again = subprocess.run([*command, "--only", "decoder"], capture_output=True, text=True, check=False)
    assert "going on at step 60 of 60" in again.stdout
    assert (tmp_path / "out" / "decoder" / "model.safetensors").read_bytes() == weights
