"""What ``inspect_model`` lists, against the configurations of the models and layers broken on purpose."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import FalconConfig, FalconModel

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import Inspection, capture, inspect, inspect_model
from howsmooth.models.identification.layer_identification import read_layer
from howsmooth.scopes import SCOPES
from tests._tiny_models import VOCABULARY, tiny, token_ids
from tests.architectures.build import build, inputs_of

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


class Selective(nn.Module):
    """Attention that sees the keys of large tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        q, k, v = (p(hidden_states).unflatten(-1, (4, 6)).transpose(1, 2) for p in self.projections)
        size = hidden_states.norm(dim=-1)
        large = size >= size.median(dim=-1, keepdim=True).values
        mask = large[:, None, None, :].expand(-1, 1, size.shape[1], -1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2), None


def test_layers_that_are_refused_do_not_hide_the_others_and_share_their_reason() -> None:
    model = tiny("llama")
    for index in (0, 2):
        model.layers[index].self_attn = Selective()
    found = inspect_model(model)
    assert (found.sites[1].scopes, found.sites[1].heads) == (SCOPES, 4)
    assert [site.scopes for site in found.sites] == [(), SCOPES, ()]
    assert [site.name for site in found.sites[::2]] == ["layers.0.self_attn", "layers.2.self_attn"]
    (refusal,) = found.refusals
    assert (refusal.layers, refusal.scopes) == ((0, 2), SCOPES)
    assert refusal.reason.startswith("The layer uses data-dependent sparsity")


def test_a_scope_that_is_refused_leaves_the_others() -> None:
    class Shifted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.inner(h, x.roll(1, dims=1))

    model = tiny("bert")
    for index in (0, 2):
        model.encoder.layer[index].attention.output = Shifted(model.encoder.layer[index].attention.output)
    found = inspect_model(model, token_ids(2, 5))
    assert found.tokens == 5
    assert [site.scopes for site in found.sites] == [SCOPES[:-1], SCOPES, SCOPES[:-1]]
    assert [site.layout for site in found.sites] == ["", "post-norm", ""]
    (refusal,) = found.refusals
    assert (refusal.layers, refusal.scopes) == ((0, 2), ("block",))
    assert refusal.reason.startswith("The block around the layer is not captured: the input of its next norm")


def _built(model_type: str) -> tuple[Any, Any]:
    """A tiny model, and inputs of it."""
    model = build(model_type)
    return model, inputs_of(model_type, model)


def _kinds(found: Inspection) -> list[tuple[int | None, str, str]]:
    return [(site.layer, site.name, site.kind) for site in found.sites]


@pytest.mark.parametrize(
    ("model_type", "root"),
    [("mamba", "layers.{}"), ("rwkv", "blocks.{}"), ("fnet", "encoder.layer.{}"),
     ("poolformer", "encoder.block.{}.0")],
)  # fmt: skip
def test_layers_without_a_softmax_are_named(model_type: str, root: str) -> None:
    model, inputs = _built(model_type)
    found = inspect_model(model, inputs)
    assert _kinds(found)[:2] == [(None, root.format(i), "no softmax") for i in range(2)]
    assert all(site.scopes == () for site in found.sites)
    (refusal,) = found.refusals
    assert (refusal.layers, refusal.names[:2], refusal.scopes) == (
        (),
        (root.format(0), root.format(1)),
        SCOPES,
    )
    assert "no softmax: a linear or state-space mixer" in refusal.reason
    with pytest.raises(CaptureError, match="no softmax: a linear or state-space mixer"):
        capture(model, inputs)


def test_a_hybrid_has_both_in_the_order_of_its_pass() -> None:
    model, inputs = _built("jamba")
    found = inspect_model(model, inputs)
    assert _kinds(found) == [(None, "layers.0", "no softmax"), (0, "layers.1.self_attn", "self-attention")]
    assert [site.layer for site in capture(model, inputs)] == [0]


@pytest.mark.parametrize(
    ("model_type", "cross"),
    [("t5", "decoder.block.{}.layer.1.EncDecAttention"), ("bart", "decoder.layers.{}.encoder_attn")],
)
def test_both_stacks_of_an_encoder_decoder(model_type: str, cross: str) -> None:
    model, inputs = _built(model_type)
    found = inspect_model(model, inputs)
    crossed = [site for site in found.sites if site.kind == "cross-attention"]
    assert [site.name for site in crossed] == [cross.format(i) for i in range(2)]
    others = [site for site in found.sites if site not in crossed]
    assert [site.masking for site in others] == ["none", "none", "causal", "causal"]
    assert [site.positions for site in others] == ["score bias" if model_type == "t5" else "none"] * 4
    assert all(site.scopes == SCOPES for site in others)
    assert found.refusals == ()
    assert {(site.scopes, site.heads, site.d, site.masking) for site in crossed} == {
        (("cross-attention",), 4, 64, "none")
    }
    assert sorted({site.layer for site in capture(model, inputs, scope="cross-attention")}) == [
        site.layer for site in crossed
    ]


def test_windows_have_neither_heads_side_by_side_nor_one_head() -> None:
    found = inspect_model(*_built("swin"))
    assert found.sites[0].masking == "windows of 16 tokens"
    assert "attention" in found.sites[0].scopes
    assert not {"head", "heads"} & set(found.sites[0].scopes)
    reasons = {refusal.reason for refusal in found.refusals if "head" in refusal.scopes}
    assert reasons == {"Only 'attention' or wider, for a softmax over windows."}


def test_alibi_is_a_bias_of_scores() -> None:
    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    found = inspect_model(FalconModel(config).eval(), tokens=6)
    (site,) = found.sites
    assert (site.positions, site.masking, site.heads) == ("score bias", "causal", 4)


def test_modules_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    found = inspect_model(model, torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0)))
    assert _kinds(found) == [(i, f"layers.{i}.self_attn", "self-attention") for i in range(2)]
    assert all((site.heads, site.d, site.tokens) == (4, 24, 5) for site in found.sites)
    with pytest.raises(ArgumentError, match="inputs: expected"):
        inspect_model(model)


def test_progress_is_told_layer_by_layer() -> None:
    told: list[tuple[int, int]] = []
    inspect_model(tiny("bert"), on_layer=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_layer_is_read_once_for_all_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(passed: Any) -> Any:
        read.append(passed.layer.index)
        return read_layer(passed)

    monkeypatch.setattr(inspect, "read_layer", counted)
    found = inspect_model(tiny("bert"))
    assert read == [0, 1, 2]
    assert all(site.scopes == SCOPES for site in found.sites)


@pytest.mark.parametrize("tokens", [1, True, 33, 0])
def test_numbers_of_tokens_that_are_refused(tokens: Any) -> None:
    with pytest.raises(ArgumentError, match="tokens: expected"):
        inspect_model(tiny("bert"), tokens=tokens)


def test_tokens_beside_inputs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="None if inputs are given"):
        inspect_model(tiny("bert"), token_ids(1, 4), tokens=4)


def test_a_module_that_mixes_no_tokens() -> None:
    with pytest.raises(CaptureError, match="No layer of Sequential was seen to mix tokens"):
        inspect_model(nn.Sequential(nn.Linear(6, 6), nn.GELU()), torch.ones(1, 3, 6))
