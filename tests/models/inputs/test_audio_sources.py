"""Sound: what is read, what is refused, the sound made by code, and how it becomes the inputs of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile
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
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models import load_model
from howsmooth.models.inputs.audio_sources import load_audio
from howsmooth.models.sequence_datasets import AudioChunkDataset, AudioDataset, audio_inputs, dataset_of

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


@pytest.fixture
def wav2vec2(tmp_path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Wav2Vec2Model(Wav2Vec2Config(**SIZES)).save_pretrained(tmp_path / "w")
    return tmp_path / "w"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_wav_files_of_every_depth(tmp_path: Path, dtype: Any) -> None:
    wave = np.sin(np.arange(400) / 7)
    kind = np.dtype(dtype).kind
    written = wave if kind == "f" else wave * (127 if dtype == np.uint8 else np.iinfo(dtype).max)
    wavfile.write(tmp_path / "a.wav", 8000, (written + (128 if dtype == np.uint8 else 0)).astype(dtype))
    audio = load_audio(tmp_path / "a.wav")
    assert (audio.rate, audio.seconds, audio.name) == (8000, 0.05, "a")
    np.testing.assert_allclose(audio.samples, wave, atol=0.02 if dtype == np.uint8 else 1e-4)


def test_channels_are_averaged() -> None:
    pair = np.stack([np.full(10, 0.5), np.full(10, -0.25)], axis=1)
    np.testing.assert_allclose(load_audio(pair).samples, 0.125)
    np.testing.assert_allclose(load_audio(torch.from_numpy(pair)).samples, 0.125)


@pytest.mark.parametrize("rate", [44100, 8000, 22050])
def test_another_rate_is_the_same_sound(rate: int) -> None:
    seconds = 0.5
    t = np.arange(int(rate * seconds)) / rate
    audio = load_audio(0.8 * np.sin(2 * np.pi * 440 * t), rate=rate)
    made = audio.at(16000)
    assert len(made) == pytest.approx(16000 * seconds, abs=1)
    wanted = 0.8 * np.sin(2 * np.pi * 440 * np.arange(len(made)) / 16000)
    np.testing.assert_allclose(made[800:-800], wanted[800:-800], atol=0.01)
    assert audio.at(rate) is audio.samples


def test_a_tone_that_the_lower_rate_cannot_hold_vanishes() -> None:
    t = np.arange(22050) / 44100
    made = load_audio(np.sin(2 * np.pi * 15000 * t), rate=44100).at(16000)
    assert float(np.abs(made[500:-500]).max()) < 0.05


def write(folder: Path, kind: str) -> Path:
    path = folder / "x.wav"
    if kind == "text":
        path.write_text("This is no sound.")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut short":
        wavfile.write(path, 8000, np.zeros(1000, np.int16))
        path.write_bytes(path.read_bytes()[:30])
    elif kind == "no samples":
        wavfile.write(path, 8000, np.zeros(0, np.int16))
    elif kind == "nan":
        wavfile.write(path, 8000, np.full(9, np.nan, np.float32))
    elif kind == "too loud":
        wavfile.write(path, 8000, np.full(9, 3.0, np.float32))
    elif kind == "slow":
        wavfile.write(path, 7, np.zeros(9, np.int16))
    elif kind == "mp3":
        path = folder / "x.mp3"
        path.write_bytes(b"ID3")
    elif kind == "objects":
        path = folder / "x.npy"
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif kind == "image":
        path = folder / "x.npy"
        np.save(path, np.zeros((40, 40, 3)))
    elif kind == "words":
        path = folder / "x.npy"
        np.save(path, np.array(["a"]))
    return path


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("text", "cannot be read"),
        ("empty", "cannot be read"),
        ("cut short", "cannot be read"),
        ("no samples", "from 1 to|cannot be read"),
        ("nan", "NaN"),
        ("too loud", "from -1 to 1"),
        ("slow", "samples a second"),
        ("mp3", "Convert other formats"),
        ("objects", "cannot be read"),
        ("image", "shape"),
        ("words", "integer or floating"),
        ("nowhere", "cannot be read"),
    ],
)
def test_what_is_no_sound_is_refused(tmp_path: Path, kind: str, word: str) -> None:
    with pytest.raises(ArgumentError, match=word) as error:
        load_audio(write(tmp_path, kind))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "rate"),
    [(3, None), (np.zeros(9), 0), (np.zeros(9), True), (np.zeros((2, 2, 2)), None), ("a\0b.wav", None)],
)
def test_arguments(given: Any, rate: Any) -> None:
    with pytest.raises(ArgumentError):
        load_audio(given, rate)


def test_the_sound_made_by_code_is_the_same_every_time_and_has_structure() -> None:
    audio = load_audio()
    assert audio.digest == load_audio("builtin").digest
    assert audio.seconds == 60
    loud = np.abs(audio.samples[: 59 * 16000].reshape(-1, 1600)).max(axis=1)
    assert loud.max() > 0.3
    assert (loud < 0.05).sum() > 10  # pauses
    near = np.corrcoef(audio.samples[:-1], audio.samples[1:])[0, 1]
    assert near > 0.3  # not white


def test_windows_of_sound_have_the_frames_that_were_asked_for(wav2vec2: Path) -> None:
    loaded = load_model(wav2vec2)
    assert (loaded.modality, loaded.layers) == ("audio", 2)
    feed = dataset_of(load_audio(), loaded)
    assert isinstance(feed, AudioDataset)
    assert feed.usual == (6, 12, 25, 50, 100, 200)
    assert feed.preparation.startswith("a frame every 20 ms")
    for n in (1, 6, 13):
        sites = hs.capture(loaded, feed.inputs([0, 40], n))
        assert {tuple(site.x.shape) for site in sites} == {(2, n, 16)}
    # The last window that there is room for ends within the sound.
    (given,) = feed.inputs([feed.count - 6], 6).values()
    assert given.shape[1] == feed.inputs([0], 6)["input_values"].shape[1]
    assert feed.words(50, 2) == ("1.00s", "1.02s")


def test_whisper_hears_chunks_with_its_encoder(tmp_path: Path) -> None:
    config = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=60, max_source_positions=1500, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    WhisperModel(config).save_pretrained(tmp_path / "whisper")
    with pytest.raises(ModelError, match="part encoder"):
        load_model(tmp_path / "whisper")
    loaded = load_model(tmp_path / "whisper", part="encoder")
    assert "the part encoder of" in loaded.source
    feed = dataset_of(load_audio(), loaded)
    assert isinstance(feed, AudioChunkDataset)
    assert (feed.lengths, feed.parts, feed.count) == ((1500,), ((0, 1500), (1500, 1500)), 3000)
    first, second = (feed.inputs([start], 1500)["input_features"] for start in (0, 1500))
    assert first.shape == (1, 80, 3000)
    heard = load_audio().samples[: 30 * 16000]
    wanted = WhisperFeatureExtractor()([heard], sampling_rate=16000, return_tensors="pt")
    assert torch.equal(first, wanted["input_features"])
    assert not torch.equal(first, second)


TONE = (0.3 * np.sin(np.arange(16000) / 5)).astype(np.float32)
AST = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "extractor"),
    [
        (Wav2Vec2Config(**SIZES), Wav2Vec2FeatureExtractor()),
        (Wav2Vec2Config(**SIZES), Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)),
        (ASTConfig(**AST), ASTFeatureExtractor()),
        (ASTConfig(**AST, max_length=128), ASTFeatureExtractor(max_length=128, mean=-3.0, std=2.0)),
    ],
)
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json", None])
def test_inputs_are_those_of_the_feature_extractor(
    tmp_path: Path, config: Any, extractor: Any, file: str | None
) -> None:
    config.save_pretrained(tmp_path)
    settings = extractor.to_dict()
    if file is None:
        extractor = type(extractor)()
    elif file.startswith("pre"):
        (tmp_path / file).write_text(json.dumps(settings))
    else:
        (tmp_path / file).write_text(json.dumps({"feature_extractor": settings}))
    loaded = load_model(tmp_path, random_init=True)
    assert type(extractor).__name__ in str(loaded.preparation)
    given = audio_inputs(loaded, TONE)
    assert list(given) == ["input_values"]  # a mask that hides nothing is left out
    wanted = extractor([TONE], sampling_rate=16000, return_tensors="pt")["input_values"]
    assert torch.equal(given["input_values"], wanted)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"sampling_rate": 7}',
        '{"sampling_rate": "fast"}',
        '{"feature_extractor_type": "Elsewhere"}',
    ],
)
def test_files_that_cannot_be_understood(wav2vec2: Path, content: str) -> None:
    (wav2vec2 / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match="no usable way from audio") as error:
        load_model(wav2vec2)
    assert "\n" not in str(error.value)


def test_inputs_from_python(wav2vec2: Path) -> None:
    loaded = load_model(wav2vec2, dtype=torch.float64)
    given = audio_inputs(loaded, "builtin", seconds=0.5)
    assert given["input_values"].shape == (1, 8000)
    assert given["input_values"].dtype == torch.float64
    with pytest.raises(ArgumentError, match="seconds"):
        audio_inputs(loaded, "builtin", seconds=61.0)
    with pytest.raises(ModelError, match="takes text, not audio"):
        audio_inputs(load_model("builtin-encoder"))
    with pytest.raises(ArgumentError, match="samples for"):
        dataset_of(load_audio(np.zeros(500)), loaded)
