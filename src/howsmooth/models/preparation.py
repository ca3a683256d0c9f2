"""From images and sound to the inputs of a model: sizes, means and spreads as its files or its type say."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import FEATURE_EXTRACTOR_MAPPING, AutoFeatureExtractor
from transformers.utils import cached_file

from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models.audio import Waveform
from howsmooth.models.places import Place

__all__ = ["AudioPreparation", "ImagePreparation", "audio_preparation", "image_preparation"]

_FILE = "preprocessor_config.json"
_LARGEST_SIDE = 4096
_USUAL_SIDE = 224
_USUAL_SECONDS = 10.0
_MOST_SECONDS = 120.0


@dataclass(frozen=True)
class ImagePreparation:
    """How images become ``pixel_values``.

    Attributes
    ----------
    size
        Height and width that the model was made for.
    channels
        1 or 3.
    patch
        Height and width of a patch, None if the model's configuration names none.
    mean, std
        Of each channel, subtracted and divided by.
    factor
        What values from 0 to 1 are multiplied with before.
    interpolates
        Whether the model takes ``interpolate_pos_encoding`` for images of other sizes.
    sentence
        All that in words.

    """

    size: tuple[int, int]
    channels: int
    patch: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float
    interpolates: bool
    sentence: str

    def prepared(self, images: Sequence[Tensor], size: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """Return the inputs for some images.

        Parameters
        ----------
        images
            Each (3, height, width), from 0 to 1.
        size
            Height and width of the model's input; its own by default.

        Returns
        -------
        dict
            ``pixel_values`` (batch, channels, height, width), float32. Images keep their proportions: the
            shorter side is fitted, and what the longer one has too much is cut off on both ends.

        """
        height, width = self.size if size is None else size
        if not 1 <= min(height, width) <= max(height, width) <= _LARGEST_SIDE:
            raise ArgumentError(
                "size", expected=f"height and width from 1 to {_LARGEST_SIDE}", got=f"{height} x {width}"
            )
        pixels = torch.stack([_fitted(image, height, width) for image in images])
        if self.channels == 1:
            red, green, blue = pixels.unbind(1)
            pixels = (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)  # as television weighs them
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        named = {"pixel_values": (pixels * self.factor - mean) / std}
        if self.interpolates and (height, width) != self.size:
            named["interpolate_pos_encoding"] = torch.tensor(True)
        return named


def _fitted(image: Tensor, height: int, width: int) -> Tensor:
    scale = max(height / image.shape[1], width / image.shape[2])
    inner = (max(height, round(image.shape[1] * scale)), max(width, round(image.shape[2] * scale)))
    # The antialiasing filter overshoots nowhere for this mode, so values stay from 0 to 1.
    scaled = nn.functional.interpolate(
        image.unsqueeze(0), size=inner, mode="bilinear", antialias=True, align_corners=False
    )[0]
    top, left = (inner[0] - height) // 2, (inner[1] - width) // 2
    return scaled[:, top : top + height, left : left + width]


@dataclass(frozen=True)
class AudioPreparation:
    """How sound becomes the input of an audio model.

    Attributes
    ----------
    rate
        Samples a second that the model hears.
    seconds
        Length of the input that the model was made for, or a usual one.
    raw
        Whether the model hears the samples themselves; else features of them.
    sentence
        All that in words.

    """

    rate: int
    seconds: float
    raw: bool
    sentence: str
    _extractor: Any = field(repr=False)

    def prepared(self, waves: Sequence[Waveform]) -> dict[str, Tensor]:
        """Return the inputs for some sounds of one length, at the model's rate."""
        made = self._extractor(
            [np.asarray(one) for one in waves], sampling_rate=self.rate, return_tensors="pt"
        )
        padding = made.get("attention_mask")
        return {
            name: value
            for name, value in made.items()
            if name != "attention_mask" or not bool((padding == 1).all())
        }


def image_preparation(place: Place, config: Any, model: nn.Module) -> ImagePreparation:
    """Read how a model wants its images.

    Raises
    ------
    ModelError
        If ``preprocessor_config.json`` cannot be understood, or the model takes neither one nor three
        channels.

    """
    found = _file_of(place)
    stated = (getattr(config, key, None) for key in ("num_channels", "in_channels", "in_chans"))
    channels = next((value for value in stated if value), 3)
    if channels not in (1, 3):
        raise ModelError(f"{place.name!r} takes images of {channels} channels, and those here have 1 or 3.")
    own = _pair(getattr(config, "image_size", None))
    size = own or _size(found.get("crop_size")) or _size(found.get("size")) or (_USUAL_SIDE, _USUAL_SIDE)
    if max(size) > _LARGEST_SIDE:
        raise ModelError(
            f"{place.name!r} wants images of {size[0]} x {size[1]} pixels, more than {_LARGEST_SIDE}."
        )
    mean, std, factor = (0.5,) * channels, (0.5,) * channels, 1.0
    said = "mean 0.5 and standard deviation 0.5 (the model says none)"
    if found:
        try:
            factor = 255.0 * (
                float(found.get("rescale_factor", 1 / 255)) if found.get("do_rescale", True) else 1
            )
            if found.get("do_normalize", True):
                mean = _channels(found.get("image_mean", mean), channels)
                std = _channels(found.get("image_std", std), channels)
            else:
                mean, std = (0.0,) * channels, (1.0,) * channels
        except (TypeError, ValueError) as error:
            raise ModelError(f"The {_FILE} of {place.name!r} cannot be understood: {error}.") from error
        if not (np.isfinite(factor) and factor > 0 and min(std) > 0):
            raise ModelError(
                f"The {_FILE} of {place.name!r} has a factor or deviation that is not above zero."
            )
        means, stds = (", ".join(f"{value:.4g}" for value in values) for values in (mean, std))
        said = f"mean {means} and standard deviation {stds} (its {_FILE})"
    return ImagePreparation(
        size=size,
        channels=channels,
        patch=_pair(getattr(config, "patch_size", None)),
        mean=mean,
        std=std,
        factor=factor,
        interpolates="interpolate_pos_encoding" in inspect.signature(model.forward).parameters,
        sentence=f"the shorter side fitted (bilinear), the rest cut off, {said}",
    )


def audio_preparation(place: Place, config: Any) -> AudioPreparation:
    """Read how a model wants its sound.

    Raises
    ------
    ModelError
        If transformers knows no way for this model, or its files cannot be understood.

    """
    found = _file_of(place)
    try:
        if found:
            extractor = AutoFeatureExtractor.from_pretrained(
                place.location, trust_remote_code=False, local_files_only=place.local_files_only
            )
        else:
            extractor = FEATURE_EXTRACTOR_MAPPING[type(config)]()
        rate = int(extractor.sampling_rate)
        seconds = float(getattr(extractor, "chunk_length", None) or _USUAL_SECONDS)
        if not (1000 <= rate <= 192_000 and 0 < seconds <= _MOST_SECONDS):
            raise ValueError(f"{seconds:.4g} seconds at {rate} samples a second")  # noqa: TRY301 - as others
        tried = extractor([np.zeros(rate, np.float32)], sampling_rate=rate, return_tensors="pt")
        values = tried.get("input_values")
    except Exception as error:  # of many kinds, one for each model
        raise ModelError(
            f"transformers has no usable way from sound to the inputs of {place.name!r}: "
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
        ) from error
    raw = values is not None and values.ndim == 2
    origin = f"its {_FILE}" if found else "the defaults of its type"
    sentence = f"{type(extractor).__name__} at {rate} samples a second ({origin})"
    return AudioPreparation(rate, seconds, raw, sentence, extractor)


def _file_of(place: Place) -> dict[str, Any]:
    """Return what the model's files say of its inputs; nothing if there is no such file."""
    if place.location is None:
        return {}
    try:
        found = cached_file(
            place.location,
            _FILE,
            local_files_only=place.local_files_only,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=not place.local_files_only,
        )
    except Exception as error:  # as when the model itself is read
        raise place.failure(error) from error
    if found is None:
        return {}
    try:
        read = json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"The {_FILE} of {place.name!r} cannot be read ({type(error).__name__}).") from error
    if not isinstance(read, dict):
        raise ModelError(f"The {_FILE} of {place.name!r} is no table of settings.")
    return read


def _channels(values: Any, channels: int) -> tuple[float, ...]:
    given = [float(values)] * channels if isinstance(values, int | float) else [float(one) for one in values]
    if len(given) != channels or not all(np.isfinite(given)):
        raise ValueError(f"its means and spreads are not of {channels} channels")
    return tuple(given)


def _pair(value: Any) -> tuple[int, int] | None:
    """Return a height and a width of what configurations write; None if it is neither."""
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(v, int) and v > 0 for v in pair):
        return pair[0], pair[1]
    return None


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, dict):
        if "height" in value and "width" in value:
            return _pair([value["height"], value["width"]])
        return _pair(value.get("shortest_edge"))
    return _pair(value)
