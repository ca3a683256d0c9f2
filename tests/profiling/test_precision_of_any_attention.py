"""hs.precision of models whose parameters are not read: keys and values at the softmax suffice.

The oracle quantises keys and values in the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.bert import modeling_bert
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

import howsmooth as hs
from howsmooth.models.recorded_softmaxes import RecordedModel
from tests import _hand_written
from tests._hand_written import Llama, LlamaAttention
from tests._tiny_models import token_ids
from tests.profiling.test_quantisation_effects import SHAPE, divergence, quantised, with_sharp_attention

IDS = token_ids(1, 9) % _hand_written.VOCABULARY
Edit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
#: Puts an edit of keys and values (1, kv_heads, n, dim) into the code of an attention module, and yields a
#: list that receives the concatenated heads (1, n, width) of each of its calls.
Edited = Callable[[nn.Module, Edit], Any]


@contextmanager
def eager_code_of(code: ModuleType, module: nn.Module, edit: Edit) -> Iterator[list[Tensor]]:
    own, heads = code.eager_attention_forward, list[Tensor]()

    def edited(at: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if at is not module:
            return own(at, query, key, value, *args, **kwargs)
        found = own(at, query, *edit(key, value), *args, **kwargs)
        heads.append(found[0].flatten(-2))
        return found

    code.eager_attention_forward = edited
    try:
        yield heads
    finally:
        code.eager_attention_forward = own


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.7 * self.up(self.down(x))


@contextmanager
def own_code_of(module: LlamaAttention, edit: Edit) -> Iterator[list[Tensor]]:
    """Edit what a layer of the hand-written Llama gives to ``repeat_kv``, its keys first."""
    own, heads, left = _hand_written.repeat_kv, list[Tensor](), list[int]()

    def edited(x: Tensor, n_rep: int) -> Tensor:
        turned = x.transpose(1, 2)
        return own(edit(turned, turned)[left.pop(0)].transpose(1, 2) if left else x, n_rep)

    begun = module.wq.register_forward_pre_hook(lambda *_: left.extend((0, 1)))
    ended = module.wo.register_forward_pre_hook(lambda _, given: heads.append(given[0].detach()))
    _hand_written.repeat_kv = edited
    try:
        yield heads
    finally:
        _hand_written.repeat_kv = own
        begun.remove()
        ended.remove()


def qwen3_next() -> tuple[nn.Module, list[nn.Module], Edited]:
    sizes = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3NextConfig(
        **{**SHAPE, "num_hidden_layers": 4}, **sizes, **experts, num_key_value_heads=2, head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=16, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    modules = [model.model.layers[3].self_attn]
    return model, modules, lambda *given: eager_code_of(modeling_qwen3_next, *given)


def deepseek() -> tuple[nn.Module, list[nn.Module], Edited]:
    config = DeepseekV3Config(
        **SHAPE, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6,
        v_head_dim=5, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, pad_token_id=0,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    modules = [layer.self_attn for layer in model.model.layers]
    return model, modules, lambda *given: eager_code_of(modeling_deepseek_v3, *given)


def lora() -> tuple[nn.Module, list[nn.Module], Edited]:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2))
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.q_proj, module.v_proj = LoRA(module.q_proj), LoRA(module.v_proj)
    modules[1].o_proj = LoRA(modules[1].o_proj)  # two modules are given the heads: neither is the projection
    return model, modules, lambda *given: eager_code_of(modeling_llama, *given)


def hand_written(fused: bool = False) -> tuple[nn.Module, list[nn.Module], Edited]:
    model = Llama(cache=False, flash=fused)
    for layer in model.layers:
        layer.direct = True  # its attention is called by forward, which no hook sees
    return model, [layer.attention for layer in model.layers], own_code_of


def bert() -> tuple[nn.Module, list[nn.Module], Edited]:
    model = BertForMaskedLM(BertConfig(**SHAPE))
    modules = [layer.attention.self for layer in model.bert.encoder.layer]
    for module, layer in zip(modules, model.bert.encoder.layer, strict=True):
        module.__dict__["o_proj"] = layer.attention.output.dense  # beside the modules, not one of them
    return model, modules, lambda *given: eager_code_of(modeling_bert, *given)


KINDS = {
    "bert": bert,
    "qwen3_next": qwen3_next,
    "deepseek_v3": deepseek,
    "lora": lora,
    "hand-written": hand_written,
    "hand-written, fused": lambda: hand_written(fused=True),
}


def made(kind: str) -> tuple[nn.Module, list[nn.Module], Edited]:
    torch.manual_seed(0)
    model, modules, edited = KINDS[kind]()
    if hasattr(model, "config"):
        model.config._attn_implementation = "eager"
        model.config._experts_implementation = "eager"  # the grouped product does not take float64
    return with_sharp_attention(model).double(), modules, edited


def logits_of(model: nn.Module) -> Tensor:
    output = model(IDS)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_changes_and_divergences_are_those_of_the_edited_model(kind: str) -> None:
    model, modules, edited = made(kind)
    found = hs.precision(model, IDS, bits=4, quantisers=("token", "channel"))
    kv_heads = {"deepseek_v3": 4, "bert": 4}.get(kind, 1 if kind.startswith("hand") else 2)
    rtol = 1e-6 if kind.startswith("hand") else 1e-3  # transformers computes norms and softmax in float32
    assert len(found.table) == len(modules) * kv_heads * 2 * 2
    plain = logits_of(model)
    projections = [getattr(m, "o_proj", None) or m.wo for m in modules]

    def edit_of(cases: pd.DataFrame, layer: int) -> Edit:
        def edit(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            given = {"K": key.clone(), "V": value.clone()}
            for case in cases[cases["layer"] == layer].to_dict("records"):
                part = given[case["operand"]][:, case["head"]]
                part.copy_(quantised(part, case["bits"], -1 if case["quantiser"] == "token" else -2))
            return given["K"], given["V"]

        return edit

    def kl_of(cases: pd.DataFrame, layers: list[int]) -> tuple[float, list[Tensor]]:
        if not layers:
            return divergence(plain, logits_of(model)), []
        with edited(modules[layers[0]], edit_of(cases, layers[0])) as heads:
            kl, seen = kl_of(cases, layers[1:])
        return kl, [*heads, *seen]

    for index in range(len(found.table)):
        case = found.table.iloc[[index]]
        layer = int(case["layer"].item())
        _, (own,) = kl_of(case.iloc[:0], [layer])
        kl, (moved,) = kl_of(case, [layer])
        change, projection = moved - own, projections[layer]
        if isinstance(projection, nn.Linear) and kind != "qwen3_next":
            change = change @ projection.weight.mT
        assert case["kl"].item() == pytest.approx(kl, rel=rtol)
        assert case["change"].item() == pytest.approx(float(torch.linalg.vector_norm(change)), rel=rtol)
    assert bool((found.table["change"] <= found.table["bound"]).all())
    assert bool((found.table["predicted"] <= found.table["bound"]).all())
    assert bool((found.table["predicted"] < 4 * found.table["change"]).all())
    for row in found.together.to_dict("records"):
        cases = found.table[
            (found.table[["bits", "quantiser"]] == [row["bits"], row["quantiser"]]).all(axis=1)
        ]
        assert row["kl"] == pytest.approx(kl_of(cases, list(range(len(modules))))[0], rel=rtol)
    left_out = {"qwen3_next": 2, "lora": 1}
    assert len(found.refused) == left_out.get(kind, 0)


def test_layers_without_softmax_and_heads_behind_a_gate_are_named() -> None:
    model, _, _ = made("qwen3_next")
    heads, mixers = hs.precision(model, IDS, bits=4, quantisers="token").refused
    assert "the output projection of layer 0 (model.layers.3.self_attn" in heads
    assert "predicted, change and bound are of the heads" in heads
    assert all(f"model.layers.{i} (Qwen3NextDecoderLayer)" in mixers for i in range(3))
    assert "model.layers.3" not in mixers


def test_copies_of_a_key_have_one_error() -> None:
    """The Fisher information of a key that several query heads share is that of the key itself."""
    model, modules, edited = made("hand-written")
    found = RecordedModel(model, IDS).squared_gradients(3000, seed=0)[0]
    shift = [torch.zeros(1, 1, IDS.shape[1], _hand_written.WIDTH, dtype=torch.float64) for _ in range(2)]

    def logits(k: Tensor, v: Tensor) -> Tensor:
        with edited(modules[0], lambda key, value: (key + k, value + v)):
            return model(IDS)[0]

    p = logits(*shift).detach().softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    for one, jacobian in zip(found, torch.func.jacrev(logits, (0, 1))(*shift), strict=True):
        truth = torch.einsum("ia...,iab,ib...->...", jacobian, middle, jacobian)[0]
        assert float((one - truth).detach().norm() / truth.detach().norm()) < 0.1


def test_cross_attention_is_left_out_by_name() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, tgt: Tensor, memory: Tensor) -> Tensor:
            return self.layer(tgt, memory)

    given = dict(zip(("tgt", "memory"), torch.randn(2, 1, 5, 8), strict=True))
    found = hs.precision(Decoder(), given, bits=4, quantisers="token")
    assert set(found.table["layer"]) == {0}
    assert "layer 1 (layer.multihead_attn, MultiheadAttention): its queries and keys" in found.refused[1]
