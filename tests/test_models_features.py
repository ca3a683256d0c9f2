"""What lies around a softmax in models: captured, and judged by finite differences of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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

from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.models import Site, capture
from tests._injected import central_difference, injected
from tests._tiny_models import VOCABULARY, tiny, token_ids

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 6, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def double(config: Any) -> PreTrainedModel:
    """A model with weights so large that its attention is not uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(config).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_((0.2 if p.ndim < 2 else p.shape[-1] ** -0.5) * torch.randn_like(p))
    return model


def agrees(site: Site, own: Callable[[Tensor], Tensor], closed_form: bool = True) -> None:
    """Hold a map, and its Jacobian in closed form, against the model."""
    with torch.no_grad():
        value = own(site.x).reshape(site.map(site.x).shape)
    torch.testing.assert_close(site.map(site.x), value, rtol=1e-5, atol=1e-6)
    e = torch.randn(site.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = central_difference(own, site.x, e).reshape(value.shape)
    derivative = (closed_form_jacobian if closed_form else AutodiffJacobian)(site.map, site.x).product(e)
    assert float((derivative - wanted).norm() / wanted.norm()) < 1e-7
    assert site.path == ("closed form" if closed_form else "autodiff")


@pytest.mark.parametrize(
    ("config", "projection", "kind", "words"),
    [
        (Qwen3Config(**SMALL), "layers.0.self_attn.o_proj", None, ""),
        (Gemma2Config(**SMALL | {"query_pre_attn_scalar": 5}, attn_logit_softcapping=2.0),
         "layers.0.self_attn.o_proj", SelfAttention, "every parameter"),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "layers.0.self_attn.o_proj",
         None, ""),
        (BloomConfig(vocab_size=VOCABULARY, hidden_size=24, n_layer=1, n_head=4), "h.0.self_attention.dense",
         SelfAttention, "every parameter"),
        (MobileBertConfig(vocab_size=VOCABULARY, num_hidden_layers=1, hidden_size=24, embedding_size=8,
                          intermediate_size=16, num_attention_heads=2, intra_bottleneck_size=8),
         "encoder.layer.0.attention.output.dense", StagedAttention, "queries of layer 0"),
        (BitNetConfig(**SMALL), "layers.0.self_attn.o_proj", StagedAttention,
         "attn_sub_norm (BitNetRMSNorm)"),
    ],
    ids=["query norms", "softcap", "sinks", "alibi", "values from elsewhere", "norm before the projection"],
)  # fmt: skip
def test_features(config: Any, projection: str, kind: type | None, words: str) -> None:
    model, ids = double(config), token_ids(2, 6)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others know no float64
    (site,) = capture(model, ids, layers=[0])
    assert isinstance(site.map, (SelfAttention, StagedAttention) if kind is None else kind)
    assert words in site.path_reason
    agrees(site, injected(model, {"input_ids": ids}, site.name, projection))


def test_encoder_decoder() -> None:
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = double(BartConfig(vocab_size=VOCABULARY, **sizes, **layers, **heads))
    given = {"input_ids": token_ids(1, 5), "decoder_input_ids": token_ids(1, 7, seed=1)}
    sites = capture(model, given)
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]
    assert [(s.name, s.x.shape[1], s.causal) for s in sites] == [(names[0], 5, False), (names[1], 7, True)]
    for site in sites:
        agrees(site, injected(model, given, site.name, f"{site.name}.out_proj"))
    # Without tokens for the decoder it gets those of the encoder.
    same = capture(model, given["input_ids"], layers=[1])[0]
    expected = capture(model, {**given, "decoder_input_ids": given["input_ids"]}, layers=[1])[0]
    assert torch.equal(same.x, expected.x)


# ---- what only values can tell: the structure looks right, and the numbers are not


def _gate_after_projection(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_hook(
        lambda m, args, out: out * args[0].norm(dim=-1, keepdim=True)
    )


def _output_gate(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda m, args, out: out * torch.sigmoid(args[0]))


def _input_to_output(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_pre_hook(lambda m, args: (args[0].sin(),))


@pytest.mark.parametrize(
    ("change", "closed_form", "words"),
    [
        (_gate_after_projection, True, "not confirmed"),
        (_output_gate, False, "not confirmed"),
        (_input_to_output, True, "no module of its own lies between"),
    ],
)
def test_hidden_nonlinearity(change: Callable[[Any], None], closed_form: bool, words: str) -> None:
    model, ids = tiny("llama", torch.float64), token_ids(1, 5)
    change(model.layers[1])
    (site,) = capture(model, ids, layers=[1])
    assert words in site.path_reason
    agrees(site, injected(model, {"input_ids": ids}, site.name, f"{site.name}.o_proj"), closed_form)


def test_attention_of_another_meaning_under_the_users_implementation() -> None:
    def twice_as_sharp(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kw: Any) -> Any:
        kw.pop("is_causal", None)
        p = (2 * scaling * q @ k.mT).softmax(dim=-1)
        return (p @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("twice_as_sharp", twice_as_sharp)
    try:
        model, ids = tiny("bert", torch.float64, attention="twice_as_sharp"), token_ids(1, 5)
        (site,) = capture(model, ids, layers=[1])
        projection = "encoder.layer.1.attention.output.dense"
        agrees(site, injected(model, {"input_ids": ids}, site.name, projection), closed_form=False)
    finally:
        AttentionInterface._global_mapping.pop("twice_as_sharp")


@pytest.mark.parametrize(
    ("mask", "kind", "words"),
    [
        (torch.linspace(-1, 1, 25).double().reshape(1, 1, 5, 5), SelfAttention, "none"),
        (torch.tensor([1, 1, 1, 0]).bool()[None, :, None, None] | torch.eye(5).bool(), StagedAttention,
         "a mask of its own for each head"),
    ],
    ids=["bias", "by head"],
)  # fmt: skip
def test_masks(mask: Tensor, kind: type, words: str) -> None:
    model, given = tiny("bert", torch.float64), {"input_ids": token_ids(1, 5), "attention_mask": mask}
    (site,) = capture(model, given, layers=[1])
    assert isinstance(site.map, kind)
    assert site.masking == words
    agrees(site, injected(model, given, site.name, "encoder.layer.1.attention.output.dense"))


def test_an_adapter_beside_a_projection_is_part_of_the_map() -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.inner = inner
            self.down, self.up = nn.Linear(24, 2).double(), nn.Linear(2, 24).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.up(self.down(x))

    model, ids = tiny("llama", torch.float64), token_ids(1, 5)
    attention = model.layers[1].self_attn
    attention.o_proj, attention.q_proj = Adapted(attention.o_proj), Adapted(attention.q_proj)
    (site,) = capture(model, ids, layers=[1])
    agrees(site, injected(model, {"input_ids": ids}, site.name, f"{site.name}.o_proj"))
