"""Audio models: loaded with noise as dummy inputs, and captured on the tensors of their feature extractor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

import howsmooth as hs
from howsmooth.errors import ModelError
from howsmooth.models import inspect_model, load_model

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
AST = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TONE = (0.3 * np.sin(np.arange(16000) / 5)).astype(np.float32)


@pytest.fixture
def wav2vec2(tmp_path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Wav2Vec2Model(Wav2Vec2Config(**SIZES)).save_pretrained(tmp_path / "w")
    return tmp_path / "w"


def test_wav2vec2_is_captured_on_the_tensors_of_its_feature_extractor(wav2vec2: Path) -> None:
    loaded = load_model(wav2vec2)
    assert (loaded.modality, loaded.layers) == ("audio", 2)
    with pytest.raises(ModelError, match=r"hs\.capture\(model, inputs\)"):
        loaded.tokenizer.located("words")
    made = Wav2Vec2FeatureExtractor()([TONE], sampling_rate=16000, return_tensors="pt")
    sites = hs.capture(loaded, {"input_values": made["input_values"]})
    assert [tuple(site.x.shape) for site in sites] == [(1, 49, 16)] * 2
    assert hs.local_lipschitz(sites[0].map, sites[0].x).converged.all()


def test_whisper_is_captured_with_its_encoder(tmp_path: Path) -> None:
    config = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=60, max_source_positions=1500, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    WhisperModel(config).save_pretrained(tmp_path / "whisper")
    with pytest.raises(ModelError, match='part="encoder"'):
        load_model(tmp_path / "whisper")
    loaded = load_model(tmp_path / "whisper", part="encoder")
    assert (loaded.layers, "the part encoder of" in loaded.source) == (1, True)
    made = WhisperFeatureExtractor()([TONE], sampling_rate=16000, return_tensors="pt")
    (site,) = hs.capture(loaded, {"input_features": made["input_features"]})
    assert site.x.shape == (1, 1500, 16)


@pytest.mark.parametrize(
    ("config", "extractor", "shape"),
    [
        (Wav2Vec2Config(**SIZES), Wav2Vec2FeatureExtractor(), (1, 16000)),
        (
            Wav2Vec2Config(**SIZES),
            Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True),
            (1, 16000),
        ),
        (ASTConfig(**AST, max_length=128), ASTFeatureExtractor(max_length=128, mean=-3.0), (1, 128, 128)),
    ],
)
@pytest.mark.parametrize("in_file", [True, False])
def test_noise_stands_for_audio_when_a_model_is_inspected(
    tmp_path: Path, config: Any, extractor: Any, shape: tuple[int, ...], in_file: bool
) -> None:
    config.save_pretrained(tmp_path)
    if in_file:
        extractor.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, random_init=True, dtype=torch.float64)
    assert isinstance(loaded.preparation, dict)
    assert list(loaded.preparation) == ["input_values"]  # a mask that hides nothing is left out
    if in_file:
        assert loaded.preparation["input_values"].shape == shape
        assert inspect_model(loaded).sites[0].scopes


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"sampling_rate": 7}',
        '{"sampling_rate": "fast"}',
        '{"chunk_length": 1000000, "feature_extractor_type": "WhisperFeatureExtractor"}',
        '{"feature_extractor_type": "Elsewhere"}',
    ],
)
def test_without_a_usable_feature_extractor_only_tensors_are_taken(wav2vec2: Path, content: str) -> None:
    (wav2vec2 / "preprocessor_config.json").write_text(content)
    loaded = load_model(wav2vec2)
    assert (loaded.layers, loaded.preparation) == (None, None)
    assert "Give a tensor or a dict with input_values" in loaded.obstacle
    assert len(hs.capture(loaded, {"input_values": torch.from_numpy(TONE)[None]})) == 2
