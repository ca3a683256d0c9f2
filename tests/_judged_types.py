"""Types of transformers, tiny, and where each of their values stands, read from their modelling files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from tests._hand_written import Block, Case, Spot
from tests._judge import Own, Verdict, called, judged, outcome, truths_of_real_tokens, verdict
from tests._tiny_models import WithoutDowncast
from tests.keep.cases_models import filled

IDS = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(2))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

_SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 4}
_WINDOWS = {**_GROUPED, "sliding_window": 3}
_GPT = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}

Places = dict[str, Any]


def after_places(root: str, attention: str, following: str, entry: str, projection: str = "") -> Places:
    """Of a layer whose attention is followed by a sum, and that by a module."""
    return {
        "tokens": (Spot(f"{root}.{attention}"),),
        "attention": (Spot(f"{root}.{projection or attention}", "out"),),
        "block": (Block(Spot(root), Spot(f"{root}.{following}")),),
        "model": (Spot(entry, "out"), Spot(root.rsplit(".", 1)[0] + ".0")),
    }


def _beside(root: str, attention: str, norm: str, entry: str) -> Places:
    """Of a layer in which attention and feed-forward part stand side by side, behind a norm."""
    return {
        **after_places(root, attention, norm, entry),
        "block": (Block(Spot(f"{root}.{norm}"), Spot(f"{root}.{attention}", "out"), adds=True),),
    }


def bert_places(root: str, inner: str = "attention", entry: str = "embeddings.word_embeddings") -> Places:
    """Of a layer whose attention module ends with its residual and norm."""
    return {
        "tokens": (Spot(f"{root}.{inner}"),),
        "attention": (Spot(f"{root}.{inner}.output.dense", "out"),),
        "block": (Block(Spot(root), Spot(f"{root}.{inner}", "out")),),
        "model": (Spot(entry, "out"), Spot("embeddings", "out")),
    }


_LLAMA = after_places("layers.1", "self_attn", "post_attention_layernorm", "embed_tokens")
_GEMMA = after_places("layers.1", "self_attn", "pre_feedforward_layernorm", "embed_tokens")
_OLMO2 = after_places("layers.1", "self_attn", "mlp", "embed_tokens")
_GPT2 = after_places("h.1", "attn", "ln_2", "wte")
_BART = after_places("encoder.layers.1", "self_attn", "fc1", "encoder.embed_tokens")
_VISION = after_places("layers.1", "attention", "layernorm_after", "embeddings.patch_embeddings")
_PARALLEL = _beside("layers.1", "self_attn", "input_layernorm", "embed_tokens")

#: type -> the configuration's own sizes, and the places.
TYPES: dict[str, tuple[dict[str, Any], Places]] = {
    "bert": (_SIZES, bert_places("encoder.layer.1")),
    "bert, decoder": ({**_SIZES, "is_decoder": True}, bert_places("encoder.layer.1")),
    "roberta": (_SIZES, bert_places("encoder.layer.1")),
    "electra": ({**_SIZES, "embedding_size": 16}, bert_places("encoder.layer.1")),
    "camembert": (_SIZES, bert_places("encoder.layer.1")),
    "ernie": (_SIZES, bert_places("encoder.layer.1")),
    "data2vec-text": (_SIZES, bert_places("encoder.layer.1")),
    "distilbert": (
        {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24,
         "max_position_embeddings": 32},
        {**after_places("transformer.layer.1", "attention", "ffn", "embeddings.word_embeddings"),
         "block": (Block(Spot("transformer.layer.1"), Spot("transformer.layer.1.sa_layer_norm", "out")),)},
    ),
    "gpt2": (_GPT, _GPT2),
    "gpt2, by layer": ({**_GPT, "scale_attn_by_inverse_layer_idx": True}, _GPT2),
    "gpt_bigcode": (_GPT, _GPT2),
    "gpt_neo": (
        {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32,
         "attention_types": [[["global", "local"], 1]], "window_size": 3},
        _GPT2,
    ),
    "gptj": ({**_GPT, "rotary_dim": 2}, _beside("h.1", "attn", "ln_1", "wte")),
    "codegen": ({**_GPT, "rotary_dim": 2}, _beside("h.1", "attn", "ln_1", "wte")),
    "gpt_neox": (
        {**_SIZES, "rotary_pct": 0.5}, _beside("layers.1", "attention", "input_layernorm", "embed_in"),
    ),
    "bloom": (
        {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        after_places("h.1", "self_attention", "post_attention_layernorm", "word_embeddings",
               "self_attention.dense"),
    ),
    "opt": (
        {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 32, "word_embed_proj_dim": 16},
        after_places("decoder.layers.1", "self_attn", "final_layer_norm", "decoder.embed_tokens"),
    ),
    "mpt": (
        {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
        after_places("blocks.1", "attn", "norm_2", "wte"),
    ),
    "falcon": (
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "alibi": False, "multi_query": True},
        _beside("h.1", "self_attention", "input_layernorm", "word_embeddings"),
    ),
    "llama": (_GROUPED, _LLAMA),
    "mistral": (_WINDOWS, _LLAMA),
    "qwen2": (_GROUPED, _LLAMA),
    "qwen3": (_GROUPED, _LLAMA),
    "stablelm": (_GROUPED, _LLAMA),
    "starcoder2": (_WINDOWS, _LLAMA),
    "olmo": (_GROUPED, _LLAMA),
    "olmo2": (_GROUPED, _OLMO2),
    "granite": ({**_GROUPED, "residual_multiplier": 0.37}, _LLAMA),
    "smollm3": (_GROUPED, _LLAMA),
    "helium": (_GROUPED, _LLAMA),
    "glm": (_GROUPED, _LLAMA),
    "gemma": (_GROUPED, _LLAMA),
    "gemma2": ({**_WINDOWS, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0}, _GEMMA),
    "gemma3_text": ({**_WINDOWS, "query_pre_attn_scalar": 4}, _GEMMA),
    "phi": (_SIZES, _PARALLEL),
    "phi3": (_GROUPED, _LLAMA),
    "diffllama": ({**_GROUPED, "lambda_std_dev": 0.5}, _LLAMA),  # two softmaxes
    "cohere": (_GROUPED, _PARALLEL),
    "cohere2": (_WINDOWS, _PARALLEL),
    "nemotron": (_GROUPED, _LLAMA),
    "mixtral": ({**_GROUPED, **_EXPERTS}, _LLAMA),
    "gpt_oss": (
        {**_WINDOWS, **_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, _LLAMA,
    ),
    "deepseek_v3": (
        {**_SIZES, "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 2, "n_routed_experts": 2,
         "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
        _LLAMA,
    ),
    "vit": (_VIT, _VISION),
    "beit": ({**_VIT, "layer_scale_init_value": 0.3, "use_relative_position_bias": True}, _VISION),
    "deit": (_VIT, _VISION),
    "dinov2": (
        {**_VIT, "layerscale_value": 0.3},
        after_places("encoder.layer.1", "attention", "norm2", "embeddings.patch_embeddings"),
    ),
    "bart": (
        {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24,
         "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "max_position_embeddings": 32},
        {**_BART, "block": (Block(Spot("encoder.layers.1"), Spot("encoder.layers.1.fc1")),),
         "expected": {"model": "refused: encoder-decoder"}},
    ),
    "t5": (
        {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        {**after_places("encoder.block.1", "layer.0.SelfAttention", "layer.1", "shared"),
         "expected": {"model": "refused: encoder-decoder"}},
    ),
}  # fmt: skip


def built(name: str) -> nn.Module:
    """The model of a type, in float64, called as its configuration says, with its cache."""
    from transformers import AutoConfig, AutoModel

    model = filled(AutoModel.from_config(AutoConfig.for_model(name.partition(",")[0], **TYPES[name][0])))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others know no float64
    return model


def type_inputs(name: str) -> dict[str, Tensor]:
    if "image_size" in TYPES[name][0]:
        return {"pixel_values": IMAGE}
    more = {"decoder_input_ids": IDS} if name in ("bart", "t5") else {}
    return {"input_ids": IDS, **more}


def type_case(name: str) -> Case:
    return Case(lambda: built(name), lambda: type_inputs(name), heads=(), **TYPES[name][1])


#: Types that are called in all ways, and what is compiled block by block.
CALLED = {"llama": "layers", "bert": "encoder.layer"}
CALLED_WAYS = ("compiled", "blocks compiled", "data parallel", "training")


def judge_type(
    name: str, way: str = "plain", scopes: Iterable[str] = ("attention", "block", "model")
) -> list[Verdict]:
    """The verdicts on a type of transformers that is called in one way."""
    torch._dynamo.reset()
    model, inputs = called(built(name), way, CALLED.get(name, "")), type_inputs(name)
    given = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    compiled = "compiled" in way  # which a mode of ours would stand in the way of
    if compiled:
        with torch.no_grad():
            model(**inputs)
    own = Own(built(name), inputs, nullcontext if compiled else WithoutDowncast)
    with nullcontext() if compiled else WithoutDowncast():
        return judged((name, way), model, given, type_case(name), own, scopes, 1e-4 if compiled else 1e-9)


#: Two documents in one sequence, each with positions of its own, and the ways to say whether a cache is used.
PACKED = {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1, 2]]).expand(2, -1)}
PACKED_TYPES = ("llama", "mistral", "gemma2", "gpt2")
CACHES: dict[str, dict[str, Any]] = {
    "as it is called": {},
    "use_cache=False": {"use_cache": False},
    "use_cache=True": {"use_cache": True},
    "a mask of ones": {"attention_mask": torch.ones_like(IDS)},
}


def judge_packed(
    name: str, how: str, scopes: Iterable[str] = ("attention", "block", "model")
) -> list[Verdict]:
    """The verdicts on packed documents: what leaks in the model's own call leaks in the map."""
    inputs = {**PACKED, **CACHES[how]}
    with WithoutDowncast():
        own = Own(built(name), inputs, WithoutDowncast)
        return judged((name, how), built(name), inputs, type_case(name), own, scopes, 1e-9)


PADDED_TYPES = ("bert", "gpt2", "llama", "mistral")
LENGTHS = (3, 5)


def padded(side: str) -> dict[str, Tensor]:
    columns, lengths = torch.arange(5), torch.tensor(LENGTHS)[:, None]
    mask = columns < lengths if side == "right" else columns >= 5 - lengths
    return {"input_ids": IDS, "attention_mask": mask.long()}


def judge_padded(name: str, side: str, scopes: Iterable[str] = ("attention", "block")) -> list[Verdict]:
    """The verdicts on the real tokens of each padded sequence."""
    model, inputs, case, found = built(name), padded(side), type_case(name), []
    if name == "gpt2":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with WithoutDowncast():
        own = Own(built(name), inputs, WithoutDowncast)
        for scope in scopes:
            for sequence, real in enumerate(inputs["attention_mask"].bool()):

                def get(scope: str = scope, sequence: int = sequence, real: Tensor = real) -> tuple[str, str]:
                    sites = hs.capture(model, inputs, layers=[case.layer], scope=scope)
                    assert [site.sequence for site in sites] == [0, 1]
                    given = truths_of_real_tokens(own, case, scope, sequence, real)
                    return verdict(sites[sequence], given, 1e-9)

                found.append(Verdict(name, f"padded {side}", scope, *outcome(get)))
    return found
