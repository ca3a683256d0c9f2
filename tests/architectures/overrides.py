"""What single model types need beyond the rules of ``shrink`` and ``inputs``."""

# ruff: noqa: E501 (the tables read best one entry a line)
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import ResNetConfig
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
_HALF_MROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5
    }
}  # fmt: skip


def _resnet(**features: Any) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic", **features
    )


_DETR = {"backbone_config": _resnet(out_features=["stage4"])}
_DEFORMABLE = {
    "backbone_config": _resnet(out_features=["stage2", "stage3", "stage4"]),
    "num_feature_levels": 3,
}
_WINDOWS = {"image_size": 32, "window_size": 4, "depths": [2, 1], "num_heads": [2, 4]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_GEMMA4 = {
    "global_head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
_HEAD_DIM = {"head_dim": 16, "num_key_value_heads": 2}
_SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 1}

_COMPASS = {"rope_parameters": {"full_attention": _MROPE["rope_parameters"]}}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
_HIERA = {
    "image_size": [64, 64], "hidden_size": 16, "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 1, 1, 1], "num_attention_heads": 1, "num_attention_heads_per_stage": [1, 2, 4, 4],
    "window_size_per_stage": [8, 4, 4, 4], "window_positional_embedding_background_size": [4, 4],
    "global_attention_blocks": [2],
}  # fmt: skip

#: Types whose base model takes the configuration of another type.
CONFIG_OF = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}

CONFIGS: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text", "paddleocr_vl_text"), _MROPE),
    **{name: {"text_config": _MROPE} for name in ("qwen2_5_vl", "qwen2_vl", "paddleocr_vl", "qwen2_5_omni_thinker")},
    **dict.fromkeys(("glm4v_text", "glm_image_text", "glm_ocr_text"), _MROPE),
    **{name: {"text_config": _MROPE} for name in ("glm4v", "glm46v", "glm_image", "glm_ocr", "glmga")},
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_moe": {"text_config": _HALF_MROPE},
    **dict.fromkeys(("conditional_detr", "dab-detr", "detr", "table-transformer"), _DETR),
    "deformable_detr": _DEFORMABLE,
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin", "swin2sr"), _WINDOWS),
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    **{name: {"text_config": _GEMMA4} for name in ("gemma4", "gemma4_unified", "diffusion_gemma")},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"), _HEAD_DIM),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    "cvt": {"depth": [1, 2, 3], "embed_dim": [16, 32, 48], "num_heads": [1, 2, 4], "drop_path_rate": [0.0, 0.0, 0.1]},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "dense"]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "depth_pro": {"patch_size": 16, "image_model_config": {"image_size": 16}, "patch_model_config": {"image_size": 16}, "fov_model_config": {"image_size": 16}},
    "longcat_flash": {"head_dim": 8, "qk_rope_head_dim": 8},
    "hunyuan_vl": {"text_config": {**_HEAD_DIM, **_MROPE}},
    "hunyuan_vl_text": {**_HEAD_DIM, **_MROPE},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "seamless_m4t": {"pad_token_id": 0, "t2u_pad_token_id": 1, "t2u_eos_token_id": 2, "t2u_bos_token_id": 0},
    "seamless_m4t_v2": {"pad_token_id": 0, "t2u_pad_token_id": 1, "t2u_eos_token_id": 2, "t2u_bos_token_id": 0, "char_vocab_size": 64},
    "lw_detr": {"backbone_config": {"image_size": 64, "num_windows": 4, "window_block_indices": [0]}}, "seggpt": {"image_size": [32, 16]},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "emu3": {"vocabulary_map": {"<image>": 120}},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": DbrxAttentionConfig(hidden_size=64, kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0), "ffn_config": DbrxFFNConfig(hidden_size=64, ffn_hidden_size=48)},
    "dots3_note_text": {"per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"]},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "num_key_value_heads": 4},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 4},
    "gemma3n_text": {"intermediate_size": [48, 48], "num_kv_shared_layers": 0},
    "gemma3n": {"text_config": {"intermediate_size": [48, 48], "num_kv_shared_layers": 0}},
    "hiera": {"image_size": [32, 32], "embed_dim": 16, "masked_unit_size": [4, 4], "num_query_pool": 2, "patch_size": [7, 7],
              "depths": [1, 1, 2], "num_heads": [1, 2, 4], "masked_unit_attention": [True, True, False]},
    "reformer": {"axial_pos_shape": [4, 2], "axial_pos_embds_dim": [32, 32], "hidden_size": 64, "attention_head_size": 16,
                 "attn_layers": ["local", "lsh"], "num_hidden_layers": 2, "num_buckets": 2, "lsh_attn_chunk_length": 4,
                 "local_attn_chunk_length": 4},
    "xmod": {"default_language": "en_XX"},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "pvt": {"image_size": 64, "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 2, 4], "patch_sizes": [4, 2, 2, 2], "num_encoder_blocks": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
    "efficientnet": {"hidden_dim": 64},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 16}},
    "granite_speech5_encoder": {"context_size": 16},
    "sam": {"vision_config": {"image_size": 64, "patch_size": 16, "num_pos_feats": 32}},
    "sam_hq": {"vision_config": {"image_size": 64, "patch_size": 16, "num_pos_feats": 32}},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "cohere_compass_text": _COMPASS,
    "cohere_compass": {"text_config": _COMPASS},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "align": {"vision_config": {"width_coefficient": 1.0}},
    "kimi_k25_vision": {"pos_emb_height": 4, "pos_emb_width": 4},
    "lilt": {"hidden_size": 48},
    "blip-2": {"image_token_index": 120},
    "instructblip": {"image_token_index": 120},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "efficientloftr": {"hidden_size": 256},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "dots3_note": {"text_config": {"per_layer_config": {}}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "backbone_config": _resnet(out_features=["stage4"]), "hidden_size": 32},
    "sam2_vision_model": {"backbone_config": _HIERA, "backbone_channel_list": [128, 64, 32, 16], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "num_pos_feats": 32},
    "sam2_hiera_det_model": _HIERA,
}  # fmt: skip


def _mel(length: int) -> Callable[[Any], dict[str, Any]]:
    def make(config: Any) -> dict[str, Any]:
        return {"input_features": torch.randn(2, getattr(config, "num_mel_bins", 16), length)}

    return make


def _with(**more: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {name: make(config) for name, make in more.items()}


def _ids(length: int = 8) -> Callable[[Any], torch.Tensor]:
    return lambda config: torch.randint(3, 30, (2, length))


def _noise(*shape: int) -> Callable[[Any], torch.Tensor]:
    return lambda config: torch.randn(*shape)


def _boxes(config: Any) -> torch.Tensor:
    low = torch.randint(0, 20, (2, 8, 2))
    return torch.cat((low, low + torch.randint(1, 20, (2, 8, 2))), dim=-1)


def _grid(config: Any) -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, 16, 2)


def _placeholders(config: Any) -> torch.Tensor:
    """Token ids that begin with places for an image's tokens."""
    places = torch.full((2, config.num_query_tokens), config.image_token_index)
    return torch.cat((places, torch.randint(3, 30, (2, 8))), dim=1)


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{name: _mel(128) for name in ("qwen2_audio_encoder", "voxtral_encoder", "moss_transcribe_diarize_audio")},
    "whisper": _with(input_features=lambda c: torch.randn(2, c.num_mel_bins, 128), decoder_input_ids=_ids(6)),
    "align": _with(input_ids=_ids(), pixel_values=_noise(2, 3, 64, 64)),
    "bros": _with(input_ids=_ids(), bbox=lambda c: torch.rand(2, 8, 4)),
    "udop": _with(input_ids=_ids(), bbox=lambda c: torch.rand(2, 8, 4), decoder_input_ids=_ids(6)),
    "layoutlmv3": _with(input_ids=_ids(), bbox=_boxes),
    "lilt": _with(input_ids=_ids(), bbox=_boxes),
    "clap": _with(input_ids=_ids(), input_features=_noise(2, 1, 64, 64)),
    "lxmert": _with(input_ids=_ids(), visual_feats=_noise(2, 6, 64), visual_pos=lambda c: torch.rand(2, 6, 4)),
    "esmc": _with(input_ids=_ids()),
    **{name: _with(input_ids=lambda c: torch.randint(3, 30, (4, 8))) for name in ("musicgen", "musicgen_melody")},
    "vits": _with(input_ids=_ids()),
    "decision_transformer": _with(
        states=_noise(2, 4, 17), actions=_noise(2, 4, 4), rewards=_noise(2, 4, 1), returns_to_go=_noise(2, 4, 1),
        timesteps=lambda c: torch.arange(4).expand(2, 4), attention_mask=lambda c: torch.ones(2, 4),
    ),
    "fun_asr_nano_encoder": _with(input_features=lambda c: torch.randn(2, 16, c.input_size if hasattr(c, "input_size") else 64),
                                  input_features_mask=lambda c: torch.ones(2, 16, dtype=torch.long)),
    "audio-spectrogram-transformer": _with(input_values=lambda c: torch.randn(2, c.max_length, c.num_mel_bins)),
    "timesfm": _with(past_values=lambda c: torch.randn(2, 64), past_values_padding=lambda c: torch.zeros(2, 64), freq=lambda c: torch.zeros(2, 1, dtype=torch.long)),
    "siglip2_vision_model": _with(pixel_values=lambda c: torch.randn(2, 16, c.num_channels * c.patch_size**2),
        pixel_attention_mask=lambda c: torch.ones(2, 16), spatial_shapes=lambda c: torch.tensor([[4, 4], [4, 4]])),
    "siglip2": _with(input_ids=_ids(), pixel_values=lambda c: torch.randn(2, 16, c.vision_config.num_channels * c.vision_config.patch_size**2),
        pixel_attention_mask=lambda c: torch.ones(2, 16), spatial_shapes=lambda c: torch.tensor([[4, 4], [4, 4]])),
    "perceiver": _with(inputs=lambda c: torch.randn(2, 8, c.d_model)),
    "dia": _with(input_ids=_ids(), decoder_input_ids=lambda c: torch.randint(3, 30, (2, 6, 9))),
    "audioflamingo3_encoder": _with(input_features=_noise(2, 16, 128), input_features_mask=lambda c: torch.ones(2, 128, dtype=torch.long)),
    "qwen3_asr_encoder": _with(input_features=_noise(2, 16, 200), input_features_mask=lambda c: torch.ones(2, 200, dtype=torch.long)),
    "gemma4_vision": _with(pixel_values=lambda c: torch.rand(2, 16, 3 * c.patch_size**2), pixel_position_ids=_grid),
    "blip_2_qformer": _with(query_embeds=_noise(2, 6, 64), encoder_hidden_states=lambda c: torch.randn(2, 8, c.encoder_hidden_size)),
    **{name: _with(past_values=_noise(2, 15), past_time_features=_noise(2, 15, 1), past_observed_mask=lambda c: torch.ones(2, 15),
                   future_values=_noise(2, 4), future_time_features=_noise(2, 4, 1))
       for name in ("autoformer", "informer", "time_series_transformer")},
    "fastspeech2_conformer": _with(input_ids=lambda c: torch.randint(3, c.vocab_size - 1, (2, 8))),
    "video_llama_3_vision": _with(pixel_values=lambda c: torch.randn(16, 3 * c.patch_size**2), grid_thw=lambda c: torch.tensor([[1, 4, 4]]), merge_sizes=lambda c: torch.tensor([2])),
    "lightglue": _with(pixel_values=_noise(1, 2, 3, 64, 64)),
    "oneformer": _with(pixel_values=_noise(1, 3, 64, 64), task_inputs=_noise(1, 77)),
    "kosmos-2": _with(input_ids=_ids(16), pixel_values=_noise(2, 3, 16, 16), image_embeds_position_mask=lambda c: (torch.arange(16) < c.latent_query_num).expand(2, 16)),
    "idefics": _with(input_ids=_ids(), pixel_values=_noise(2, 1, 3, 16, 16), image_attention_mask=lambda c: torch.ones(2, 8, 1)),
    "blip-2": _with(input_ids=_placeholders, pixel_values=_noise(2, 3, 16, 16)),
    "instructblip": _with(input_ids=_placeholders, pixel_values=_noise(2, 3, 16, 16), qformer_input_ids=_ids()),
    "tvp": _with(input_ids=_ids(), pixel_values=_noise(2, 2, 3, 64, 64), attention_mask=lambda c: torch.ones(2, 8)),
    "speecht5": _with(input_values=_noise(2, 8, 64), decoder_input_values=_noise(2, 6, 64)),
    "voxtral_realtime_text": _with(input_ids=_ids(), t_cond=_noise(1, 64)),
    "seggpt": _with(pixel_values=_noise(1, 3, 16, 16), prompt_pixel_values=_noise(1, 3, 16, 16), prompt_masks=_noise(1, 3, 16, 16)),
    **{name: _with(pixel_values=_noise(1, 3, 4, 64), target_sizes=lambda c: torch.tensor([[4, 4]]))
       for name in ("minicpm_ocr_vision", "minicpmv4_7_vision")},
    "gemma4_audio": _with(input_features=_noise(2, 32, 64)),
    "gemma3n_audio": _with(audio_mel=_noise(2, 32, 16), audio_mel_mask=lambda c: torch.zeros(2, 32, dtype=torch.bool)),
    "clvp": _with(input_ids=_ids(), input_features=_noise(2, 80, 16)),
    "bark": _with(input_ids=_ids()),
    "muse_spark_audio": _with(input_values=_noise(2, 3840)),
    "efficientloftr": _with(pixel_values=_noise(1, 2, 3, 64, 64)),
}  # fmt: skip
