"""The implementation "howsmooth" of transformers against the eager attention of each model type."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from benchmarks import hessian_vector
from torch import Tensor
from torch.func import functional_call, grad, jvp
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.functional.lazy_mask import RuleMask, rule_mask
from tests._tiny_models import WithoutDowncast, tiny, token_ids
from tests.architectures.build import build, inputs_of, model_types
from tests.architectures.isolation import shard

hs.functional.register()

SHARDS = 6
#: Masks, windows, biases by position, soft caps, sinks, chosen keys, cross-attention, images, sound.
SAMPLE = (
    "align", "bert", "clip", "deepseek_v32", "gemma2", "gpt_oss", "granite_swa", "inkling2", "llama",
    "llama4_text", "mistral", "modernbert", "splinter", "swin", "t5", "vit", "whisper",
)  # fmt: skip


#: Eager attention adds the booleans of a mask to the scores. Float32 moves the top queries of these models.
AS_SDPA = ("grounding-dino", "mm-grounding-dino")
#: Rounding to float32 alone moves the gradients of these models by more, or makes their outputs NaN.
IN_FLOAT64 = (*AS_SDPA, "mask2former", "pe_audio", "pe_audio_encoder")
#: These models read their eager mask the wrong way round: queries see no key, and eager attention is NaN.
NAN = ("nemotron3_5_asr", "nemotron_asr_streaming", "nemotron_asr_streaming_encoder")


def _floats(outputs: Any) -> list[Tensor]:
    """The tensors of a model's outputs that depend on its parameters, without attention probabilities."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.requires_grad and outputs.numel() else []
    if hasattr(outputs, "items"):
        outputs = [part for name, part in outputs.items() if "attentions" not in name]
    return [t for part in outputs for t in _floats(part)] if isinstance(outputs, (list, tuple)) else []


def _with(implementation: str, model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Outputs, and gradients of a random sum of them, one gradient for all parameters."""
    model.set_attn_implementation(implementation)
    torch.manual_seed(0)
    outputs = _floats(model(**inputs))
    generator = torch.Generator().manual_seed(1)
    finite = (t[t.isfinite()] for t in outputs)
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in finite)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return [*(t.detach() for t in outputs), torch.cat([g.flatten() for g in found])]


def _error(ours: Tensor, eager: Tensor) -> float:
    there = eager.isfinite()
    assert torch.equal(ours.isfinite(), there)
    return float((ours - eager)[there].abs().max() / eager[there].abs().max())


def _prepared(model_type: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    model = build(model_type)
    inputs = inputs_of(model_type, model)
    if model_type in IN_FLOAT64:
        return model, inputs
    floats = (v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs.values())
    return model.float(), dict(zip(inputs, floats, strict=True))


def compared(model_type: str) -> float | None:
    """The largest difference of outputs and gradients from eager attention, relative to their size.

    None for a type whose attention does not go through the interface of transformers.
    """
    model, inputs = _prepared(model_type)
    calls: list[object] = []
    ours = AttentionInterface._global_mapping["howsmooth"]

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return ours(*args, **kwargs)

    exact = WithoutDowncast() if model_type in IN_FLOAT64 else nullcontext()
    with exact, pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "howsmooth", noted)
        found = _with("howsmooth", model, inputs)
        if not calls:
            return None
        judge = _with("sdpa" if model_type in AS_SDPA else "eager", model, inputs)
    return max(_error(a, b) for a, b in zip(found, judge, strict=True))


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_model_type_is_as_eager(model_type: str) -> None:
    error = compared(model_type)
    assert error is not None
    assert error <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, SHARDS + 1))
def test_every_model_type_is_as_eager(part: int) -> None:
    wrong, count = {}, 0
    for model_type in shard(model_types(), f"{part}/{SHARDS}"):
        if model_type in NAN:
            continue
        try:
            with WithoutDowncast() if model_type in IN_FLOAT64 else nullcontext():
                _with("eager", *_prepared(model_type))
        except Exception:
            continue  # with eager attention it does not run either
        try:
            error = compared(model_type)
        except Exception as raised:
            wrong[model_type] = repr(raised)[:200]
        else:
            count += error is not None
            if error is not None and not error <= 1e-5:
                wrong[model_type] = f"{error:.1e}"
    assert not wrong
    assert count >= 400 // SHARDS


@pytest.mark.parametrize("model_type", [NAN[2], pytest.param(NAN[0], marks=pytest.mark.slow)])
def test_a_model_whose_eager_attention_is_nan_gets_no_numbers(model_type: str) -> None:
    model, inputs = _prepared(model_type)
    for name in ("eager", "howsmooth"):
        model.set_attn_implementation(name)
        assert model(**inputs).last_hidden_state.isnan().all()


FUNCTIONS = {
    "causal": (causal_mask_function, None),
    "bidirectional": (bidirectional_mask_function, None),
    "causal window": (sliding_window_causal_mask_function(3), 3),
    "window": (sliding_window_bidirectional_mask_function(3), 3),
}
PADDING = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("m", "offset"), [(9, 0), (4, 5), (1, 8), (9, 2)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_is_the_eager_mask(name: str, m: int, offset: int, padded: bool) -> None:
    """As a rule for attention, and as numbers for what else a model does with its mask."""
    function, size = FUNCTIONS[name]
    given: dict[str, Any] = {
        "batch_size": 2, "q_length": m, "kv_length": 9, "q_offset": offset, "mask_function": function,
        "local_size": size, "attention_mask": PADDING if padded else None,
    }  # fmt: skip
    mask, eager = rule_mask(**given), eager_mask(**given)
    assert isinstance(mask, RuleMask)
    assert mask.shape == eager.shape
    assert mask.dtype == eager.dtype
    assert torch.equal(mask[:, :, -2:] + 1, eager[:, :, -2:] + 1)
    visible, padding = mask.rule
    seen = visible.block(slice(0, m), slice(0, 9))
    every = torch.ones(2, 1, m, 9, dtype=torch.bool) if seen is None else seen.expand(2, 1, m, 9)
    if padding is not None:
        every = every & padding[:, None, None]
    assert torch.equal(every, eager == 0)


@pytest.mark.parametrize(
    "function",
    [
        chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64)),
        sliding_window_causal_mask_function(4),
        sliding_window_bidirectional_mask_function(4),
    ],
)
def test_other_rules_are_not_taken_for_these(function: Callable[..., Any]) -> None:
    given = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": function, "local_size": 3}
    mask = rule_mask(**given)
    assert not isinstance(mask, RuleMask)
    assert torch.equal(mask, eager_mask(**given))


def _mistral() -> MistralForCausalLM:
    config = MistralConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, sliding_window=5, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return MistralForCausalLM(config).eval()


def test_padding_and_generation_with_a_cache() -> None:
    """Padding on the left, one token after another, and several tokens at once to a cache."""
    model, ids = _mistral(), token_ids(2, 9)
    seen = torch.ones_like(ids)
    seen[0, :3] = 0
    real = seen.bool()
    found = {}
    for name in ("eager", "howsmooth"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            whole = model(ids, attention_mask=seen).logits
            begun = model(ids[:, :4], attention_mask=seen[:, :4], use_cache=True)
            rest = model(ids[:, 4:], attention_mask=seen, past_key_values=begun.past_key_values).logits
            text = model.generate(ids, attention_mask=seen, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert _error(rest, whole[:, 4:]) <= 1e-5
        found[name] = (whole[real], rest, text)
    assert _error(found["howsmooth"][0], found["eager"][0]) <= 1e-5
    assert _error(found["howsmooth"][1], found["eager"][1]) <= 1e-5
    assert torch.equal(found["howsmooth"][2], found["eager"][2])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_hessian_vector_product_of_a_whole_model(name: str) -> None:
    """Forward over reverse mode through a model, with its masks made inside, as of eager attention."""
    model = tiny(name, torch.float64, "eager")
    x, e = torch.randn(2, 2, 7, 24, dtype=torch.float64).unbind()
    found = {}
    for implementation in ("eager", "howsmooth"):
        model.set_attn_implementation(implementation)

        def loss(x: Tensor) -> Tensor:
            outputs = functional_call(model, {}, kwargs={"inputs_embeds": x, "use_cache": False})
            return (outputs.last_hidden_state**2).sum()

        with WithoutDowncast():
            found[implementation] = jvp(grad(loss), (x,), (e,))[1].detach()
    assert _error(found["howsmooth"], found["eager"]) <= 1e-12


def test_hessian_vector_products_of_the_benchmark() -> None:
    """The whole model at once, one layer after the other, and the dense Hessian of eager attention."""
    x, e = torch.randn(2, 1, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    with WithoutDowncast():
        for name in ("howsmooth", "eager"):
            model = hessian_vector.made(9, name, hidden=16, layers=2).double()
            found[name] = [way(model, x, e) for way in hessian_vector.WAYS.values()]
    truth = found["eager"][0]
    assert max(_error(product, truth) for product in found["howsmooth"] + found["eager"]) <= 1e-12


@pytest.mark.slow
def test_memory_of_a_hessian_vector_product_at_8192_tokens() -> None:
    """Four layers of width 256, of which eager attention would hold 2 GiB of scores each."""
    assert hessian_vector.measured(8192, "howsmooth", "layers")[2] <= 2048


def test_dropout_in_training_only() -> None:
    """A Llama in training drops what its configuration says, in evaluation nothing."""
    model, ids = tiny("llama", attention="eager"), token_ids(1, 5)
    model.set_attn_implementation("howsmooth")
    plain = model.eval()(ids).last_hidden_state
    assert model.config.attention_dropout > 0
    torch.manual_seed(0)
    first, second = (model.train()(ids).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(ids).last_hidden_state, first)
    assert torch.equal(model.eval()(ids).last_hidden_state, plain)
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert torch.equal(model.train()(ids).last_hidden_state, plain)


def test_refusals() -> None:
    model, ids = tiny("llama", attention="eager"), token_ids(1, 5)
    model.set_attn_implementation("howsmooth")
    attention = model.eval().layers[0].self_attn
    tokens, positions = torch.randn(1, 5, 24), model.rotary_emb(torch.randn(1, 5, 24), torch.arange(5)[None])
    for name, given in {"output_attentions": True, "block_indices": ids, "cache": object()}.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            attention(tokens, positions, None, **{name: given})


def test_a_rule_needs_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the mask of a causal or windowed model are never computed."""
    asked: list[RuleMask] = []
    dispatch = RuleMask.__torch_dispatch__.__func__

    def noted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.extend(t for t in tree_leaves((args, kwargs)) if isinstance(t, RuleMask))
        return dispatch(cls, func, types, args, kwargs)

    monkeypatch.setattr(RuleMask, "__torch_dispatch__", classmethod(noted))
    for model in (tiny("llama", attention="howsmooth"), tiny("mistral", attention="howsmooth")):
        seen = torch.ones(2, 9)
        seen[0, :2] = 0
        model(token_ids(2, 9), attention_mask=seen).last_hidden_state.sum().backward()
    assert not asked
    rule_mask(batch_size=1, q_length=2, kv_length=2).sum()
    assert len(asked) == 1
