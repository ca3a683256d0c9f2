"""A tiny configuration of any model type: the defaults of its class, with their integers made small by name.

The rules know no model type: a width is a width wherever it stands. What a type needs beyond them is in
``overrides``.
"""

# ruff: noqa: E501 (the tables read best one entry a line)
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

WIDTH = 64
HEADS = 4
KEY_DIM = WIDTH // HEADS
VOCABULARY = 128
LAYERS = 2
IMAGE = 16  # pixels along the side of an image
PATCH = 4  # ... and of a patch: 16 patches
FIRST_SPECIAL = 100  # token ids from here on may have a meaning (images, ends of sentences)


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit) if value > 0 else value


def _exactly(target: int) -> Callable[[int], int]:
    return lambda value: target if value > 0 else value


# The first rule whose name matches decides; a name that matches none keeps its default.
_RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"(^|_)(in|num|input|audio|mask_input|latent)_channels$|in_chans$", _at_most(64)),
    (r"type_vocab|_factor$|_ratio$|ngram_size|vocab_offset|^n_langs$", _at_most(4)),
    (r"vocab", _at_most(VOCABULARY)),
    (r"codebook_size|num_embeddings$|num_embeds", _at_most(64)),
    (r"num_codebooks|num_quantizers|n_codebooks|num_code_groups", _at_most(2)),
    (r"first_k_dense_replace|num_kv_shared_layers|num_mtp_layers|num_nextn", _at_most(0)),
    (r"max_window_layers|insert_layer_id|moe_layer_(start|end)_index", _at_most(1)),
    (r"(_layers|^layers|^n_layers?|depth|num_blocks|_blocks|_depth|num_hidden_groups)$", _at_most(LAYERS)),
    (r"num_self_attends_per_block", _at_most(2)),
    (r"(kv_heads|key_value_heads|linear_num_key_heads|linear_num_value_heads)$", _at_most(2)),
    (r"(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", _at_most(8)),
    (r"heads?$|^num_head", _at_most(HEADS)),
    (r"num_experts_per_tok|moe_topk|moe_k$|num_shared|n_shared", _at_most(2)),
    (r"experts|expert_num$", _at_most(4)),
    (r"^n_group$|^topk_group$|mamba_n_groups|mamba_ngroups|^n_groups$", _at_most(1)),
    (r"qk_rope_head_dim|rotary_dim|qk_rope", _at_most(8)),
    (r"index_topk|centroid_intermediate_top_k", _at_most(64)),
    (r"lora_rank|_rank$|embed_?ding_rank|adapter_rank", _at_most(16)),
    (r"mamba_d_conv|_d_conv$|conv_kernel|kernel_size|conv_L_cache", lambda value: value),
    (r"mamba_d_state|ssm_state_size|state_size$|d_state", _at_most(8)),
    (r"d_kv$|key_dim|head_dim|head_size|dim_head|d_head|kv_channels|query_pre_attn_scalar", _at_most(KEY_DIM)),
    (r"intermediate|ffn_dim|mlp_dim|d_ff$|d_inner|^dff$|dim_ff|feedforward|linear_units|ffn_hidden", _at_most(48)),
    (r"num_conv_pos_embeddings$", _at_most(8)),
    (r"num_conv_pos_embedding_groups$|num_groups$|upsample_groups", _at_most(2)),
    (r"hidden_size|d_model|_dim$|^dim$|n_embd|embedding_size|embed_size|embed_hidden|_width$|hidden_dim", _at_most(WIDTH)),
    (r"num_filters|_channels$|^channels$|feature_size$|emb_size|_units$|_size_per_layer_input", _at_most(WIDTH)),
    (r"max_2d_position|positions$|position_embeddings$|position_embedding_size|max_text_len|context_length", _at_most(64)),
    (r"sliding_window|attention_window|local_attention|window_pattern", _at_most(4)),
    (r"num_queries|num_latents|num_query_tokens|latent_query_num|num_proposals|num_denoising|num_detection", _at_most(6)),
    (r"num_mel_bins|n_mel_bins|input_feat_size|input_feat_per_channel", _at_most(16)),
    (r"window_size$", _at_most(4)),
    (r"chunk_size$", lambda value: min(value, 8) if value > 0 else value),
)  # fmt: skip
_LISTS: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"depths|block_sizes|num_block_repeats|stage_num_blocks|numb_of_layers|focal_levels|n_attn_blocks|^depth$", _exactly(1)),
    (r"conv_dim$|tdnn_dim|channels|_dims$|_sizes$|embed_dim|hidden_sizes", _at_most(WIDTH)),
)  # fmt: skip
_TOKEN = re.compile(r"(_token_id|_token_index|_index|_pad_id|_start_id|_end_id|_newline_id|_patch_id)$")
_NOT_TOKEN = re.compile(r"ignore|merge_index|layer_index|decode_index|head_in_index|eval_index")
_COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


class _Specials:
    """Distinct ids for the special tokens of a configuration, the same for the same name everywhere in it."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        if name in _COMMON:
            return _COMMON[name]
        key = name.removesuffix("_token_id").removesuffix("_token_index").removesuffix("_index")
        return self.ids.setdefault(key, FIRST_SPECIAL + len(self.ids) % (VOCABULARY - FIRST_SPECIAL))


def small_integer(name: str, value: int) -> int:
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule(value)
    return value


def _small_list(name: str, value: list[Any], layers: int) -> list[Any]:
    if name == "layer_types" or name.endswith("_layer_types"):
        distinct = list(dict.fromkeys(value))
        return (distinct + value[len(distinct) :])[: max(layers, len(distinct))]
    if name in ("num_heads", "num_attention_heads") and all(isinstance(item, int) for item in value):
        return [min(item, HEADS if item % 2 == 0 else 1) for item in value]
    for pattern, rule in _LISTS:
        if re.search(pattern, name):
            return [
                rule(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in value
            ]
    if re.search(
        r"out_indices|layer_indexes|fullatt|deepstack|global_attn_indexes|extract_layers|hook_ids", name
    ):
        return (
            sorted({min(item, LAYERS - 1) for item in value})
            if value and isinstance(value[0], int)
            else value
        )
    return value


def _small_rope(value: Mapping[str, Any], key_dim: int) -> dict[str, Any]:
    if value and all(isinstance(item, Mapping) for item in value.values()):
        return {key: _small_rope(item, key_dim) for key, item in value.items()}
    small = dict(value)
    if small.get("mrope_section"):
        half = int(key_dim * small.get("partial_rotary_factor", 1.0)) // 2
        rest = half - half // 3 * 2
        small["mrope_section"] = [rest, half // 3, half // 3]
    return small


def _image_side(fields: Mapping[str, Any]) -> int:
    return IMAGE if any(name in fields for name in ("patch_size", "num_patches")) else 64


def shrink(
    default: PreTrainedConfig, override: Mapping[str, Any], specials: _Specials | None = None
) -> PreTrainedConfig:
    """A tiny configuration of the class of ``default``; ``override`` wins, ``{"text_config": {...}}`` goes deeper."""
    specials = _Specials() if specials is None else specials
    small: dict[str, Any] = {}
    names = {
        f.name: f.default_factory() if callable(f.default_factory) else f.default
        for f in dataclasses.fields(default)
    }
    for name, declared in names.items():
        value = vars(default).get(name, declared)
        if isinstance(override.get(name), PreTrainedConfig):
            small[name] = override[name]
        elif isinstance(value, PreTrainedConfig):
            small[name] = shrink(value, override.get(name, {}), specials)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], PreTrainedConfig):
            small[name] = [shrink(item, override.get(name, {}), specials) for item in value]
        elif (
            _TOKEN.search(name)
            and not _NOT_TOKEN.search(name)
            and isinstance(value, int)
            and not isinstance(value, bool)
        ):
            small[name] = specials(name) if value >= 0 else value
        elif name == "eos_token_id" and isinstance(value, list):
            small[name] = 2
        elif declared is None:
            continue  # it is made from the other values
        elif isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
            continue
        elif name in ("image_size", "patch_size", "crop_size", "pretrain_image_size"):
            side = PATCH if name == "patch_size" else _image_side(names)
            small[name] = (
                min(value, side) if isinstance(value, int) else type(value)(min(v, side) for v in value)
            )
        elif name == "window_size" and "spatial_merge_size" in names:
            small[name] = min(value, 4 * PATCH)  # in pixels
        elif isinstance(value, int):
            small[name] = small_integer(name, value)
            queries = names.get(name.replace("key_value_heads", "attention_heads"))
            if "key_value_heads" in name and value == queries:
                small[name] = HEADS  # as many keys as queries, as the type has them
        else:
            small[name] = type(value)(_small_list(name, list(value), LAYERS))
    types = vars(default).get("layer_types")
    if isinstance(types, (list, tuple)) and "layer_types" in names and len(set(types)) > 1:
        small["layer_types"] = _small_list("layer_types", list(types), LAYERS)
        small["num_hidden_layers"] = len(small["layer_types"])
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(default).get(name)
        if isinstance(rope, Mapping) and "mrope_section" in str(rope):
            head = small.get("head_dim") or small.get("hidden_size", WIDTH) // (
                small.get("num_attention_heads") or HEADS
            )
            small[name] = _small_rope(rope, head)
    stages = vars(default).get("_out_indices")
    if (
        stages
        and "num_hidden_layers" not in names
        and not {"out_features", "depths", "depth"} & set(override)
    ):
        small["out_indices"] = list(stages)
    for name, value in override.items():
        if not isinstance(small.get(name), PreTrainedConfig):
            small[name] = value
    return type(default)(**small)
