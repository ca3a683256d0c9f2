"""Constants of real models in every scope: the built-in ones, and tiny ones of eleven types of transformers.

Tiny models get their parameters by name from ``numbers``, so that no generator of PyTorch has a say.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

import howsmooth as hs
from tests.keep.numbers import Number, case, digest_of, interval, numbers

LAYER_SCOPES = ("head", "heads", "attention", "residual", "block")

Model = TypeVar("Model", bound=nn.Module)


def filled(model: Model, dtype: torch.dtype = torch.float64) -> Model:
    """Gains near one, small biases, and matrices so large that attention is far from uniform."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = numbers(crc32(name.encode()) % 100_000, *p.shape)
            if p.ndim < 2:
                drawn = 0.3 * drawn if "bias" in name or not p.ndim else 1 + 0.3 * drawn
            else:
                drawn = drawn * (1.5 / p.shape[-1] ** 0.5)
            p.copy_(drawn)
    return model.to(dtype).eval()


_SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 4}
_GPT2 = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_DISTILBERT = {
    "vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
_GEMMA2 = {"sliding_window": 4, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0}
_VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
_GPTOSS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

# type -> the names of its model and its configuration in transformers, and the sizes
TYPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", _SIZES),
    "roberta": ("RobertaModel", "RobertaConfig", _SIZES),
    "distilbert": ("DistilBertModel", "DistilBertConfig", _DISTILBERT),
    "gpt2": ("GPT2Model", "GPT2Config", _GPT2),
    "llama": ("LlamaModel", "LlamaConfig", _GROUPED),
    "mistral": ("MistralModel", "MistralConfig", {**_GROUPED, "sliding_window": 3}),
    "gemma2": ("Gemma2Model", "Gemma2Config", {**_GROUPED, **_GEMMA2}),
    "qwen3": ("Qwen3Model", "Qwen3Config", _GROUPED),
    "gpt_oss": ("GptOssModel", "GptOssConfig", {**_GROUPED, **_GPTOSS}),
    "vit": ("ViTModel", "ViTConfig", _VIT),
    "t5": ("T5EncoderModel", "T5Config", _T5),
}


# Types of which a span of blocks is measured as well, which takes as long as all scopes of a layer.
_SPANS = ("bert", "llama", "gpt_oss")


def token_ids(n: int, vocabulary: int, start: int = 3) -> Tensor:
    """Ids from 3 on, which no special token has."""
    return torch.tensor([[(7 * i + start) % (vocabulary - 3) + 3 for i in range(n)]])


def inputs_of(name: str, dtype: torch.dtype) -> Tensor:
    return numbers(60, 1, 3, 8, 8, dtype=dtype) if name == "vit" else token_ids(7, 40)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    import transformers

    model, config, sizes = TYPES[name]
    made: nn.Module = filled(getattr(transformers, model)(getattr(transformers, config)(**sizes)), dtype)
    return made


def _site(model: Any, inputs: Any, scope: str, **keywords: Any) -> Any:
    if scope == "head":
        keywords = {"heads": [1], **keywords}
    return hs.capture(model, inputs, scope=scope, **keywords)[-1]


def _measured(site: Any, rtol: float = 1e-6) -> Any:
    return hs.local_lipschitz(site.map, site.x[0], rtol=rtol)


def _type(name: str) -> Mapping[str, Number]:
    model, inputs = build(name), inputs_of(name, torch.float64)
    found: dict[str, Number] = {}
    for scope in (*LAYER_SCOPES, *(("span",) if name in _SPANS else ()), "model"):
        layers: dict[str, Any] = {"span": {"layers": [0, 1]}, "model": {}}.get(scope, {"layers": [1]})
        site = _site(model, inputs, scope, **layers)
        found[scope] = interval(_measured(site))
    found["tokens"] = digest_of(_site(model, inputs, "block", layers=[1]).x)
    single = _site(model.float(), inputs_of(name, torch.float32), "attention", layers=[1])
    found["attention, float32"] = interval(_measured(single, 1e-3), None)
    return found


for _name in TYPES:
    case(f"models/{_name}")(partial(_type, _name))


@case("models/t5 with its decoder")
def _decoder() -> Mapping[str, Number]:
    from transformers import T5Config, T5ForConditionalGeneration

    model = filled(T5ForConditionalGeneration(T5Config(**TYPES["t5"][2], decoder_start_token_id=0)))
    inputs = {"input_ids": token_ids(5, 40), "decoder_input_ids": token_ids(4, 40, start=11)}
    return {
        output: interval(_measured(_site(model, inputs, "model", side="queries", output=output)))
        for output in ("hidden", "logits")
    }


def builtin(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model that ships with the library."""
    return hs.load_model(f"builtin-{kind}", dtype=dtype, head=True)


def _builtin(kind: str) -> Mapping[str, Number]:
    model, ids = builtin(kind), token_ids(6, 2048)
    found: dict[str, Number] = {}
    for scope in LAYER_SCOPES:
        for layer in (0, 3) if scope in ("head", "attention", "block") else (3,):
            found[f"{scope}, layer {layer}"] = interval(_measured(_site(model, ids, scope, layers=[layer])))
    found["span"] = interval(_measured(_site(model, ids, "span", layers=[1, 2])))
    for output in ("hidden", "margin") if kind == "encoder" else ("hidden", "logits"):
        whole = _site(model, ids, "model", output=output)
        found[f"model, {output}"] = interval(_measured(whole, 1e-5))
    if kind == "decoder":
        last = _site(model, ids, "model", output="logits", last_token=True)
        found["model, logits, last token"] = interval(_measured(last, 1e-5))
    single = _site(builtin(kind, torch.float32), ids, "attention", layers=[3])
    found["attention, float32"] = interval(_measured(single, 1e-3), None)
    return found


for _kind in ("encoder", "decoder"):
    case(f"models/builtin-{_kind}")(partial(_builtin, _kind))


@case("models/inspect")
def _inspect() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    for name in ("llama", "gpt2"):
        inspected = hs.models.inspect_model(build(name), tokens=7)
        found[f"{name}, layers"] = len(inspected.sites)
        found[f"{name}, scopes"] = sum(len(site.scopes) for site in inspected.sites)
        found[f"{name}, norm radius"] = sum(float(site.norm_radius or 0.0) for site in inspected.sites)
        found[f"{name}, refusals"] = len(inspected.refusals)
    return found
