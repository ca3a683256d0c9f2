"""What ``inspect_model`` lists, against the configurations of the models and layers broken on purpose."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomModel

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import SCOPES, InspectedSite, inspect_model
from tests._tiny_models import VOCABULARY, tiny, token_ids

EXPECTED = {
    "bert": (4, "none", "none", "post-norm", "LayerNorm"),
    "gpt2": (4, "causal", "none", "pre-norm", "LayerNorm"),
    "llama": (2, "causal", "rotary", "pre-norm", "RMSNorm"),
}
NAMES = {
    "bert": ("encoder.layer.{}.attention.self", "BertSelfAttention"),
    "gpt2": ("h.{}.attn", "GPT2Attention"),
    "llama": ("layers.{}.self_attn", "LlamaAttention"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_sites_are_as_the_configuration_says(name: str) -> None:
    model = tiny(name)
    found = inspect_model(model)
    assert (found.model, found.tokens, found.refusals) == (type(model).__name__, 16, ())
    assert len(found.sites) == 3
    for layer, site in enumerate(found.sites):
        path, module = NAMES[name]
        assert (site.layer, site.name, site.module) == (layer, path.format(layer), module)
        assert (site.heads, site.d, site.key_dim, site.value_dim) == (4, 24, 6, 6)
        told = (site.kv_heads, site.masking, site.positions, site.layout, site.norm)
        assert told == EXPECTED[name]
        assert site.scopes == SCOPES
        if name == "llama":  # without a bias the farthest output is an axis of the ellipsoid
            gain = float(model.layers[layer].input_layernorm.weight.detach().abs().max())
            assert site.norm_radius == pytest.approx(math.sqrt(24) * gain, rel=1e-6)


class Bent(nn.Module):
    """A linear map that is none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


def test_layers_that_are_refused_do_not_hide_the_others_and_share_their_reason() -> None:
    model = tiny("llama")
    for index in (0, 2):
        model.layers[index].self_attn.v_proj = Bent(model.layers[index].self_attn.v_proj)
    found = inspect_model(model)
    assert (found.sites[1].scopes, found.sites[1].heads) == (SCOPES, 4)
    assert found.sites[0] == InspectedSite(0, "layers.0.self_attn", "LlamaAttention")
    assert found.sites[2] == InspectedSite(2, "layers.2.self_attn", "LlamaAttention")
    (refusal,) = found.refusals
    assert (refusal.layers, refusal.scopes) == ((0, 2), SCOPES)
    assert "values of the layer" in refusal.reason


def test_a_model_of_which_every_layer_is_refused() -> None:
    model = tiny("llama")
    for layer in model.layers:
        layer.self_attn.v_proj = Bent(layer.self_attn.v_proj)
    found = inspect_model(model)
    assert [(site.scopes, site.d, site.masking) for site in found.sites] == [((), None, None)] * 3
    assert [refusal.layers for refusal in found.refusals] == [(0, 1, 2)]
    assert found.tokens is None


def test_a_scope_that_is_refused_leaves_the_others() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.inner(h, 2 * x)

    model = tiny("bert")
    for index in (0, 2):
        model.encoder.layer[index].attention.output = Doubled(model.encoder.layer[index].attention.output)
    found = inspect_model(model, token_ids(2, 5))
    assert found.tokens == 5
    assert [site.scopes for site in found.sites] == [SCOPES[:-1], SCOPES, SCOPES[:-1]]
    assert [site.layout for site in found.sites] == ["", "post-norm", ""]
    (refusal,) = found.refusals
    assert (refusal.layers, refusal.scopes) == ((0, 2), ("block",))
    assert refusal.reason.startswith("The block around the layer is not captured: the input of its next norm")


@pytest.mark.parametrize("tokens", [1, True, 33, 0])
def test_numbers_of_tokens_that_are_refused(tokens: Any) -> None:
    with pytest.raises(ArgumentError, match="tokens: expected"):
        inspect_model(tiny("bert"), tokens=tokens)


def test_tokens_beside_inputs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="None if inputs are given"):
        inspect_model(tiny("bert"), token_ids(1, 4), tokens=4)


def test_models_of_which_no_attention_is_seen() -> None:
    model = BloomModel(BloomConfig(vocab_size=VOCABULARY, hidden_size=24, n_layer=1, n_head=2)).eval()
    with pytest.raises(CaptureError, match="BloomAttention"):
        inspect_model(model)
