"""Captured cross-attention against dense Jacobians of the models' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    LEDConfig,
    LEDModel,
    MarianConfig,
    MarianModel,
    PegasusConfig,
    PegasusModel,
    PreTrainedModel,
    ProphetNetConfig,
    ProphetNetModel,
    T5Config,
    T5Model,
    WhisperConfig,
    WhisperModel,
)

import howsmooth as hs
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import CrossSite
from howsmooth.scopes import SIDES
from tests._selection import others_slow
from tests._tiny_models import VOCABULARY, token_ids

_BART = {
    "vocab_size": VOCABULARY, "d_model": 8, "encoder_layers": 1, "decoder_layers": 2, "pad_token_id": 0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12,
}  # fmt: skip
_T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 3, "d_ff": 12, "num_layers": 2, "num_heads": 2}
_PROPHETNET = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_encoder_layers": 1, "num_decoder_layers": 2, "ngram": 2,
    "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12, "max_position_embeddings": 32,
}  # fmt: skip
_WHISPER = {"num_mel_bins": 4, "max_source_positions": 6, "bos_token_id": 1, "eos_token_id": 2}

TYPES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "t5": (T5Model, lambda: T5Config(**_T5)),
    "bart": (BartModel, lambda: BartConfig(**_BART)),
    "marian": (MarianModel, lambda: MarianConfig(**_BART, decoder_start_token_id=0)),
    "pegasus": (PegasusModel, lambda: PegasusConfig(**_BART)),
    "led": (LEDModel, lambda: LEDConfig(**_BART, attention_window=4)),
    "prophetnet": (ProphetNetModel, lambda: ProphetNetConfig(**_PROPHETNET)),
    "whisper": (WhisperModel, lambda: WhisperConfig(**_BART, **_WHISPER)),
}


# Whisper takes no padded memory, and the cross-attention of ProphetNet is not found with one.
UNPADDED = ("whisper", "prophetnet")


def encoder_decoder(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A tiny encoder-decoder whose attention is far from uniform."""
    make, config = TYPES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config())
        for p in model.parameters():
            p.data = torch.randn_like(p) / p.shape[-1] ** 0.5 if p.ndim > 1 else p + 0.2 * torch.randn_like(p)
    return model.to(dtype).eval().requires_grad_(requires_grad=False)


def inputs_of(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A memory of seven tokens (six in Whisper) and a decoder of four."""
    if name == "whisper":
        sound = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(1), dtype=dtype)
        return {"input_features": sound, "decoder_input_ids": token_ids(1, 4)}
    return {"input_ids": token_ids(1, 7, seed=1), "decoder_input_ids": token_ids(1, 4)}


def own_module(model: nn.Module, name: str) -> nn.Module:
    """The cross-attention of the last layer of the decoder, by its name."""
    names = {"t5": "block.1.layer.1.EncDecAttention", "prophetnet": "layers.1.cross_attn"}
    return model.get_submodule(f"decoder.{names.get(name, 'layers.1.encoder_attn')}")


def dense(module: nn.Module, x: Tensor, y: Tensor, mask: Tensor | None, side: str) -> Tensor:
    """The Jacobian of a module by reverse mode, as a matrix."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        arguments = {"mask" if hasattr(module, "q") else "attention_mask": mask}
        return module(x[None], key_value_states=y[None], **arguments)[0][0]

    of_x, of_y = torch.func.jacrev(run, argnums=(0, 1))(x, y)
    parts = {"queries": of_x.flatten(2).flatten(0, 1), "memory": of_y.flatten(2).flatten(0, 1)}
    return parts[side] if side in parts else torch.cat(list(parts.values()), dim=1)


@pytest.mark.parametrize(
    ("name", "padded"),
    others_slow(
        [(name, padded) for name in TYPES for padded in (False, True) if not (padded and name in UNPADDED)],
        [("t5", True), ("whisper", False)],
    ),
)
def test_against_the_models_own_module(name: str, padded: bool) -> None:
    model, inputs = encoder_decoder(name), inputs_of(name)
    if padded:
        inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    for side in SIDES:
        sites = hs.capture(model, inputs, scope="cross-attention", side=side)
        assert len(sites) == 2
        site = sites[-1]
        assert isinstance(site, CrossSite)
        assert site.path == "autodiff"
        assert site.masking == ("2 of 7 memory tokens hidden" if padded else "none")
        model.set_attn_implementation("eager")
        hides = torch.tensor([0.0] * 5 + [-torch.inf] * 2).double()
        mask = hides.expand(1, 1, len(site.queries), 7) if padded else None
        module = own_module(model, name)
        jacobian = dense(module, site.queries, site.memory, mask, side)
        found = hs.local_lipschitz(site.map, site.x, rtol=1e-8)
        expected = float(torch.linalg.matrix_norm(jacobian, 2))
        assert float(found.value) == pytest.approx(expected, rel=1e-6)


def test_sequences_of_a_batch_and_half_precision() -> None:
    model, ids = encoder_decoder("t5", torch.float32), token_ids(2, 5)
    inputs = {"input_ids": ids, "decoder_input_ids": token_ids(2, 3)}
    sites = hs.capture(model, inputs, scope="cross-attention", layers=[-1])
    assert [(site.layer, site.sequence) for site in sites] == [(5, 0), (5, 1)]
    assert [site.x.shape for site in sites] == [(1, 8, 8)] * 2
    half = hs.capture(model.bfloat16(), inputs, scope="cross-attention", layers=[-1])
    assert half[0].stored == torch.bfloat16


def test_a_decoder_layer_of_torch() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            out: Tensor = self.decoder(x, memory)
            return out

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Whole().double().eval()
        inputs = {"x": torch.randn(1, 3, 8).double(), "memory": torch.randn(1, 5, 8).double()}
    (site,) = hs.capture(model, inputs, scope="cross-attention")
    assert isinstance(site, CrossSite)
    found = hs.local_lipschitz(site.map, site.x, rtol=1e-8)

    def own(x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = model.decoder.multihead_attn(x[None], y[None], y[None], need_weights=False)[0][0]
        return out

    parts = torch.func.jacrev(own, argnums=(0, 1))(site.queries, site.memory)
    jacobian = torch.cat([part.flatten(2).flatten(0, 1) for part in parts], dim=1)
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"layers": [0]}, CaptureError, r"layer 0 .*self-attention.*scope 'attention'"),
        ({"side": "both"}, ArgumentError, "queries, memory, joint"),
        (
            {"side": "memory", "scope": "attention"},
            ArgumentError,
            "side: expected one of queries, memory, joint, with scope",
        ),
        ({"heads": [0]}, ArgumentError, "scope is 'head'"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hs.capture(encoder_decoder("t5"), inputs_of("t5"), **{"scope": "cross-attention", **arguments})


def test_padding_of_both_sequences_and_models_without_memory() -> None:
    padded = {"input_ids": token_ids(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    with pytest.raises(ArgumentError, match="Give decoder_input_ids"):
        hs.capture(encoder_decoder("t5"), padded, scope="cross-attention")
    with pytest.raises(CaptureError, match="T5Stack has no cross-attention"):
        hs.capture(encoder_decoder("t5").encoder, token_ids(1, 4), scope="cross-attention")


@pytest.mark.parametrize("name", others_slow(["t5", "bart", "marian", "pegasus"], ["bart"]))
def test_an_encoder_decoder_from_either_embeddings(name: str) -> None:
    model, inputs = encoder_decoder(name), inputs_of(name)
    embeddings = (part.get_input_embeddings() for part in (model.encoder, model.decoder))
    ids = (inputs["input_ids"], inputs["decoder_input_ids"])
    encoder, decoder = (table(one)[0] for table, one in zip(embeddings, ids, strict=True))
    sites = {side: hs.capture(model, inputs, scope="model", side=side)[0] for side in ("memory", "queries")}
    model.set_attn_implementation("eager")

    def run(e: Tensor, d: Tensor) -> Tensor:
        out: Tensor = model(inputs_embeds=e[None], decoder_inputs_embeds=d[None]).last_hidden_state[0]
        return out

    parts = torch.func.jacrev(run, argnums=(0, 1))(encoder, decoder)
    for side, tokens, part in zip(sites, (encoder, decoder), parts, strict=True):
        torch.testing.assert_close(sites[side].x[0], tokens)
        found = hs.local_lipschitz(sites[side].map, sites[side].x, rtol=1e-8)
        jacobian = part.flatten(2).flatten(0, 1)
        assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-5)


@pytest.mark.parametrize("name", others_slow([name for name in TYPES if name != "led"], ["t5"]))
def test_a_fixed_encoder_runs_once(name: str) -> None:
    model, inputs = encoder_decoder(name), inputs_of(name)
    (site,) = hs.capture(model, inputs, scope="model", side="queries")
    found: Any = site.map
    encoder = found.own.model.encoder
    layers = encoder.block if name == "t5" else encoder.layers
    layers.register_forward_pre_hook(lambda *_: pytest.fail("the encoder ran"))
    layers[0].register_forward_pre_hook(lambda *_: pytest.fail("the encoder ran"))
    assert hs.local_lipschitz(site.map.to(dtype=torch.float64), site.x.double()).converged


def test_an_encoder_decoder_whole_needs_a_side() -> None:
    model, inputs = encoder_decoder("t5"), inputs_of("t5")
    with pytest.raises(CaptureError, match="side='queries'"):
        hs.capture(model, inputs, scope="model")
    with pytest.raises(ArgumentError, match="with scope 'model' of an encoder-decoder"):
        hs.capture(model, inputs, scope="model", side="joint")
    with pytest.raises(CaptureError, match="embedded tokens of input_ids are not found"):
        hs.capture(encoder_decoder("whisper"), inputs_of("whisper"), scope="model", side="memory")
