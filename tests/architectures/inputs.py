"""Tiny inputs of any model, from the names of its arguments: the first candidates that run are taken."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.shrink import FIRST_SPECIAL, PATCH

BATCH = 2
LENGTH = 8


_MEL = (
    "num_mel_bins", "n_mel_bins", "input_feat_size", "input_feat_per_channel", "feature_size",
    "feature_projection_input_dim", "input_dim", "input_channels", "mel_dim",
)  # fmt: skip


def _find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the attributes that the configuration or one of its parts has."""
    parts = [config]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
        parts += [
            value
            for key, value in vars(part).items()
            if hasattr(value, "model_type") and hasattr(value, "to_dict")
        ]
    return default


def _ids(length: int = LENGTH, low: int = 3, high: int = FIRST_SPECIAL) -> Tensor:
    return torch.randint(low, high, (BATCH, length))


def _square(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[-2]), int(size[-1]))


def _images(config: Any) -> list[Tensor]:
    channels = _find(config, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
    channels = channels if isinstance(channels, int) and channels <= 16 else 3
    size = _find(config, "image_size", "crop_size", "img_size", "pretrain_image_size", default=64)
    frames = _find(config, "num_frames", "frames_per_clip", default=2)
    patch = _find(config, "patch_size", default=PATCH)
    temporal = _find(config, "temporal_patch_size", default=1)
    sizes = list(dict.fromkeys([_square(size), (16, 16), (32, 32), (64, 64), (128, 128)]))
    flat = channels * (patch if isinstance(patch, int) else patch[0]) ** 2
    return [
        *(torch.randn(BATCH, channels, *s) for s in sizes),
        *(torch.randn(BATCH, frames, channels, *s) for s in sizes[:2]),
        torch.randn(16, flat * temporal),
        torch.randn(BATCH, 16, flat * temporal),
    ]


def _frames(config: Any) -> list[Tensor]:
    mel = _find(config, *_MEL, default=16)
    longest = _find(config, "max_length", "max_source_positions", default=16)
    lengths = [min(2 * longest, 32), min(longest, 32), 16, 64]
    shapes = [s for t in lengths for s in ((BATCH, mel, t), (BATCH, t, mel))]
    return [torch.randn(*s) for s in dict.fromkeys(shapes)]


def _sound(config: Any) -> list[Tensor]:
    return [torch.randn(BATCH, 3200), torch.randn(BATCH, 1, 3200), *_frames(config)]


def _boxes() -> Tensor:
    low, high = torch.randint(0, 20, (BATCH, LENGTH, 2)), torch.randint(20, 40, (BATCH, LENGTH, 2))
    return torch.cat((low, high), dim=-1)


def _series(config: Any) -> list[Tensor]:
    length = _find(config, "context_length", default=16)
    lags = max(_find(config, "lags_sequence", default=[0]) or [0])
    channels = _find(config, "num_input_channels", "input_size", default=1)
    return [torch.randn(BATCH, length + lags), torch.randn(BATCH, length + lags, channels)]


def _patches(config: Any) -> tuple[Tensor, Tensor]:
    channels, patch = (
        _find(config, "in_channels", "in_chans", "num_channels", default=3),
        _find(config, "patch_size", default=PATCH),
    )
    depth = _find(config, "temporal_patch_size", default=1)
    return torch.randn(16, channels * depth * patch * patch), torch.tensor([[1, 4, 4]])


def candidates(model: nn.Module) -> dict[str, list[Any]]:
    """What each argument of the model's forward may be given: names known to no rule are left out."""
    config: Any = model.config
    known: dict[str, Any] = {
        "input_ids": lambda: [_ids()],
        "decoder_input_ids": lambda: [_ids(6)],
        "pixel_values": lambda: _images(config),
        "pixel_values_videos": lambda: [t for t in _images(config) if t.ndim == 5],
        "input_features": lambda: _frames(config),
        "input_values": lambda: _sound(config),
        "bbox": lambda: [_boxes()],
        "past_values": lambda: _series(config),
        "past_observed_mask": lambda: [torch.ones_like(t) for t in _series(config)],
        "grid_thw": lambda: [_patches(config)[1]],
        "image_grid_thw": lambda: [_patches(config)[1]],
        "hidden_states": lambda: [_patches(config)[0], torch.randn(BATCH, LENGTH, 64)],
        "inputs_embeds": lambda: [torch.randn(BATCH, LENGTH, 64)],
        "encoder_hidden_states": lambda: [torch.randn(BATCH, LENGTH, 64)],
        "states": lambda: [torch.randn(BATCH, LENGTH, _find(config, "state_dim", default=17))],
        "state": lambda: [torch.randn(BATCH, _find(config, "max_state_dim", default=17))],
    }
    return {
        name: make() for name, make in known.items() if name in inspect.signature(model.forward).parameters
    }


def tries(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs to try in turn: what the model must have, then more."""
    given = candidates(model)
    parameters = inspect.signature(model.forward).parameters
    required = [
        k
        for k, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    decoder = ["decoder_input_ids"] if getattr(model.config, "is_encoder_decoder", False) else []
    groups = [
        [main, *required, *decoder],
        [main, *required, "decoder_input_ids"],
        [main, *required, "input_ids", "pixel_values", "input_values", "input_features", *decoder],
        ["input_ids", *decoder],
        ["pixel_values"],
        list(given),
    ]
    seen: set[tuple[str, ...]] = set()
    for group in groups:
        names = tuple(name for name in dict.fromkeys(group) if name in given)
        if not names or names in seen:
            continue
        seen.add(names)
        for values in itertools.product(*(given[name] for name in names)):
            yield dict(zip(names, values, strict=True))
