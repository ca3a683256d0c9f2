"""What capture refuses, and that it says why: never a wrong map, never a bare traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BartConfig,
    BitNetConfig,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    MobileBertConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.modeling_utils import AttentionInterface

from howsmooth.errors import ArgumentError, CaptureError, NonFiniteError
from howsmooth.models import SCOPES, capture
from tests._tiny_models import VOCABULARY, tiny, token_ids

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 6, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def make(config: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModel.from_config(config).eval()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not executed, as for a user: what they would stop must be refused in words."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scope": "everything"}, ["scope", "head, heads, attention, residual, block", "'everything'"]),
        ({"heads": [0]}, ["heads", "scope 'attention'"]),
        ({"layers": [3]}, ["layers", "from -3 to 2", "got 3", "3 layers"]),
        ({"layers": [-4]}, ["layers", "got -4"]),
        ({"layers": []}, ["layers", "empty"]),
        ({"layers": [1.0]}, ["layers", "1.0"]),
        ({"layers": [True]}, ["layers", "True"]),
        ({"layers": "01"}, ["layers", "'01'"]),
        ({"layers": 1}, ["layers", "got 1"]),
        ({"heads": [4], "scope": "head"}, ["heads", "from -4 to 3", "4 heads"]),
        ({"heads": [], "scope": "head"}, ["heads", "empty"]),
        ({"inputs": "some text"}, ["inputs", "str", "tokenizer"]),
        ({"inputs": [[1, 2]]}, ["inputs", "list"]),
        ({"inputs": torch.zeros(2, 3)}, ["inputs", "float32"]),
        ({"inputs": torch.zeros(3, dtype=torch.long)}, ["inputs", "(3,)", "torch.tensor([ids])"]),
        ({"inputs": torch.zeros(0, 3, dtype=torch.long)}, ["inputs", "(0, 3)"]),
        ({"inputs": torch.zeros(2, 0, dtype=torch.long)}, ["inputs", "(2, 0)"]),
        ({"inputs": torch.full((1, 3), VOCABULARY)}, ["0 to 59", "id 60", "tokenizer"]),
        ({"inputs": torch.full((1, 3), -1)}, ["id -1"]),
        ({"inputs": torch.ones(1, 33, dtype=torch.long)}, ["at most 32", "33"]),
        ({"inputs": {}}, ["input_ids", "nothing"]),
        ({"inputs": {"input_ids": token_ids(1, 4), "labels": token_ids(1, 4)}}, ["'labels'"]),
        ({"inputs": {"input_ids": [[1, 2]]}}, ["input_ids", "list"]),
        ({"inputs": {"input_ids": token_ids(1, 4), "past_key_values": torch.ones(1)}}, ["cache"]),
        (
            {"inputs": {"input_ids": token_ids(1, 4), "encoder_hidden_states": torch.ones(1)}},
            ["cross-attention"],
        ),
        (
            {"inputs": {"input_ids": token_ids(1, 4), "attention_mask": torch.tensor([[0, 1, 1, 1]])}},
            ["attention_mask", "padding", "without padding"],
        ),
        ({"inputs": {"input_ids": token_ids(1, 4), "token_type_ids": token_ids(1, 4)}}, ["IndexError"]),
        ({"inputs": {"inputs_embeds": torch.zeros(1, 4, 24, dtype=torch.float64)}}, ["float32", "float64"]),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_arguments(arguments: dict[str, Any], words: list[str]) -> None:
    arguments = {"inputs": token_ids(1, 4), **arguments}
    with pytest.raises(ArgumentError) as error:
        capture(tiny("bert"), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "bert", None])
@pytest.mark.usefixtures("unchecked")
def test_not_a_model(model: Any) -> None:
    with pytest.raises(ArgumentError, match="PreTrainedModel"):
        capture(model, token_ids(1, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=r"model\.float\(\)"):
        capture(tiny("bert").to(dtype), token_ids(1, 4))


def test_mixed_precision_and_no_weights() -> None:
    model = tiny("bert")
    model.encoder.layer[1].double()
    with pytest.raises(ArgumentError, match=r"float32.*float64"):
        capture(model, token_ids(1, 4))
    with pytest.raises(ArgumentError, match="meta"):
        capture(tiny("bert").to("meta"), token_ids(1, 4))


# ---- architectures


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen3Config(**SMALL), ["queries", "layer 0", "Qwen3Attention", "q_norm (Qwen3RMSNorm)"]),
        (Gemma2Config(**SMALL), ["layer 0", "Gemma2Attention", "softcap"]),
        (
            GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1),
            ["layer 0", "sinks", "GptOssAttention"],
        ),
        (MobileBertConfig(vocab_size=VOCABULARY, num_hidden_layers=1), ["values", "MobileBertSelfAtt"]),
        (BitNetConfig(**SMALL), ["output projection of layer 0", "attn_sub_norm (BitNetRMSNorm) lies"]),
    ],
    ids=["query norms", "softcap", "sinks", "values from elsewhere", "norm before the projection"],
)
def test_architectures_refused_by_name(config: Any, words: list[str]) -> None:
    with pytest.raises(CaptureError) as error:
        capture(make(config), token_ids(1, 4))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_model_that_does_not_use_the_interface() -> None:
    with pytest.raises(CaptureError, match="BloomAttention"):
        capture(
            make(BloomConfig(vocab_size=VOCABULARY, hidden_size=24, n_layer=1, n_head=2)), token_ids(1, 4)
        )


def test_encoder_decoder() -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    with pytest.raises(CaptureError, match="encoder-decoder"):
        capture(make(config), token_ids(1, 4))


def test_block_of_another_layout_is_refused_and_the_narrower_scopes_are_not() -> None:
    class Shifted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.inner(h, x.roll(1, dims=1))

    model, ids = tiny("bert"), token_ids(1, 4)
    for layer in model.encoder.layer:
        layer.attention.output = Shifted(layer.attention.output)
    assert capture(model, ids)[0].layout == ""
    with pytest.raises(CaptureError, match=r"block around layer 0.*not X \+ attention"):
        capture(model, ids, scope="block")


def _unknown_norm(model: Any) -> None:
    class SomeNorm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    for layer in model.encoder.layer:
        layer.attention.output.LayerNorm.__class__ = SomeNorm


def test_unknown_norm_is_refused_in_scope_block_only() -> None:
    model, ids = tiny("bert"), token_ids(1, 4)
    _unknown_norm(model)
    capture(model, ids)
    with pytest.raises(CaptureError, match="SomeNorm"):
        capture(model, ids, scope="block")


# ---- what only values can tell: the structure looks right, and the numbers are not


def _gate_after_projection(model: Any) -> None:
    for layer in model.layers:
        layer.self_attn.v_proj.register_forward_hook(
            lambda m, args, out: out * args[0].norm(dim=-1, keepdim=True)
        )


def _output_gate(model: Any) -> None:
    for layer in model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda m, args, out: out * torch.sigmoid(args[0]))


def _input_to_output(model: Any) -> None:
    for layer in model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, args: (args[0].sin(),))


@pytest.mark.parametrize("change", [_gate_after_projection, _output_gate, _input_to_output])
def test_hidden_nonlinearity(change: Callable[[Any], None]) -> None:
    model = tiny("llama")
    capture(model, token_ids(1, 5))
    change(model)
    with pytest.raises(CaptureError, match="layer 0"):
        capture(model, token_ids(1, 5))


def test_attention_of_another_meaning_under_the_users_implementation() -> None:
    def twice_as_sharp(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kw: Any) -> Any:
        kw.pop("is_causal", None)
        p = (2 * scaling * q @ k.mT).softmax(dim=-1)
        return (p @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("twice_as_sharp", twice_as_sharp)
    try:
        model = tiny("bert", attention="twice_as_sharp")
        with pytest.raises(CaptureError, match=r"layer 0.*differs from the model's own output"):
            capture(model, token_ids(1, 5))
    finally:
        AttentionInterface._global_mapping.pop("twice_as_sharp")


def test_positions_that_differ_between_the_sequences() -> None:
    model, ids = tiny("llama"), token_ids(2, 5)
    positions = torch.stack([torch.arange(5), torch.tensor([0, 3, 4, 9, 11])])
    capture(model, {"input_ids": ids, "position_ids": positions[1:]})
    with pytest.raises(CaptureError, match="differ between the sequences"):
        capture(model, {"input_ids": ids, "position_ids": positions})


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.linspace(-1, 1, 25).reshape(1, 1, 5, 5), "position bias"),
        (torch.tensor([1, 1, 1, 0]).bool()[None, :, None, None] | torch.eye(5).bool(), "heads differently"),
        (torch.ones(1, 1, 5, 5).triu(1).bool(), "padding"),
    ],
    ids=["bias", "by head", "nothing to see"],
)  # fmt: skip
def test_masks(mask: torch.Tensor, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(tiny("bert"), {"input_ids": token_ids(1, 5), "attention_mask": mask})


def test_weights_that_are_not_finite() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        model.h[1].mlp.c_proj.bias[0] = float("nan")
    assert len(capture(model, token_ids(1, 4), layers=[0, 1])) == 2
    with pytest.raises(NonFiniteError, match="layer 2"):
        capture(model, token_ids(1, 4))


def test_scopes_are_the_five_of_the_design() -> None:
    assert SCOPES == ("head", "heads", "attention", "residual", "block")
