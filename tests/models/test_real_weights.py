"""Trained weights: every layer and scope against dense float64 Jacobians of the model's own sublayers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import howsmooth as hs
from howsmooth.model_folders import builtin_folder
from howsmooth.scopes import SCOPES
from tests._hand_written import Case, Spot
from tests._judge import Own, judged
from tests._judged_types import Places, after_places, bert_places
from tests._selection import others_slow
from tests._shared import shared_data
from tests._tiny_models import WithoutDowncast

TEXT = "Once upon a time there was a little girl who saw that the name of the file was a string."


def load(
    name: str, n: int, dtype: torch.dtype = torch.float64, attention: str = "eager"
) -> tuple[str, nn.Module, dict[str, Any]]:
    """The kind of a model, the model without gradients, and n tokens for it."""
    folder = builtin_folder(name) if name.startswith("builtin") else shared_data(name)
    options = {"dtype": dtype, "attn_implementation": attention}
    if name == "bert_tiny_sst2_encoder":  # its embeddings are not there: sentences embedded by the model are
        whole = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
        x = load_file(folder / "sequences.safetensors")["nuovo"][None, :n].to(dtype)
        return "encoder", whole.bert.encoder.requires_grad_(requires_grad=False), {"hidden_states": x}
    model = AutoModel.from_pretrained(folder, **options).eval().requires_grad_(requires_grad=False)
    if name == "capp_gpt":  # plans of manufacturing, no text
        ids = torch.arange(3, 3 + n)[None]
    else:
        ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"][:n]])
    assert ids.shape == (1, n)
    return model.config.model_type, model, {"input_ids": ids}


def places(kind: str, layer: int) -> Places:
    """Where the values of a layer stand."""
    if kind in ("encoder", "bert"):
        root = f"layer.{layer}" if kind == "encoder" else f"encoder.layer.{layer}"
        return {**bert_places(root), "heads": (Spot(f"{root}.attention.output.dense"),)}
    if kind == "gpt2":
        found = after_places(f"h.{layer}", "attn", "ln_2", "wte")
        return {**found, "heads": (Spot(f"h.{layer}.attn.c_proj"),)}
    found = after_places(f"layers.{layer}", "self_attn", "post_attention_layernorm", "embed_tokens")
    return {**found, "heads": (Spot(f"layers.{layer}.self_attn.o_proj"),)}


def check_layer(name: str, n: int, layer: int, dtype: torch.dtype) -> None:
    kind, model, inputs = load(name, n)
    own = Own(model, inputs, WithoutDowncast)
    double = dtype == torch.float64
    case = Case(
        lambda: model, lambda: inputs, layer=layer, count=model.config.num_attention_heads,
        **places(kind, layer),
    )  # fmt: skip
    if not double:
        _, model, inputs = load(name, n, dtype, "sdpa")
    with WithoutDowncast() if double else nullcontext():
        found = judged((name, "plain"), model, inputs, case, own, SCOPES, 1e-9 if double else 1e-3)
    assert all(one.meets("closed form") for one in found), "\n".join(map(str, found))


LAYERS = {
    "bert_tiny_sst2_encoder": 2,
    "stories260k": 5,
    "capp_gpt": 4,
    "builtin-encoder": 4,
    "builtin-decoder": 4,
}


@pytest.mark.parametrize(
    ("name", "layer"),
    others_slow(
        [(name, layer) for name, layers in LAYERS.items() for layer in range(layers)],
        [("bert_tiny_sst2_encoder", 1), ("stories260k", 4), ("capp_gpt", 2)],
    ),
)
def test_layers_and_scopes_of_trained_models(name: str, layer: int) -> None:
    check_layer(name, 3 if name.startswith("builtin") else 4, layer, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_all_layers_of_trained_models_at_more_tokens(name: str, dtype: torch.dtype) -> None:
    for layer in range(LAYERS[name]):
        check_layer(name, 4 if name.startswith("builtin") else 10, layer, dtype)


def test_the_sentences_of_bert_tiny_go_straight_to_its_encoder() -> None:
    _, encoder, inputs = load("bert_tiny_sst2_encoder", 21)
    sites = hs.capture(encoder, inputs["hidden_states"])
    assert [(s.layer, s.layout, s.masking) for s in sites] == [(i, "post-norm", "none") for i in range(2)]
    torch.testing.assert_close(sites[0].x, inputs["hidden_states"], rtol=0, atol=0)
