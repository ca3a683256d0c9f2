"""Model inputs made from images by the model's own processor, and from noise by an audio model's feature
extractor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    FEATURE_EXTRACTOR_MAPPING,
    IMAGE_PROCESSOR_MAPPING,
    AutoFeatureExtractor,
    AutoImageProcessor,
    ViTImageProcessorPil,
)

from howsmooth.errors import ArgumentError, ModelError, reason
from howsmooth.models.loading.model_location import Location

__all__ = ["ImagePreparation", "Preparation", "audio_sample", "image_preparation"]

_FILES = ("preprocessor_config.json", "processor_config.json")
_LARGEST_SIDE = 4096
_USUAL_SECONDS = 10.0
_MOST_SECONDS = 120.0
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class ImagePreparation:
    """The image processor of a model, with the settings that convert images to ``pixel_values``."""

    size: tuple[int, int]  #: Height and width of the processor's output.
    channels: int  #: Number of colour channels, 1 or 3.
    #: Height and width of a patch, None if the model's configuration does not state it.
    patch: tuple[int, int] | None
    sentence: str  #: A phrase for reports that names the processor and its normalisation.
    # Height and width for which the model has positions: other sizes need interpolated positions. None if the
    # model does not interpolate.
    _positions: tuple[int, int] | None
    _processor: Any = field(repr=False)
    # The options of the processor with which its images have the size ``size``.
    _options: dict[str, Any] = field(repr=False)

    def prepared(
        self, images: Sequence[Image.Image], size: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Convert Pillow images in RGB to model inputs, with the image processor of the model.

        They are ``pixel_values`` (batch, channels, height, width) in float32, and
        ``interpolate_pos_encoding`` if the model must interpolate its positions. ``size`` is the height and
        width of the model's input; by default ``self.size``.

        Raises
        ------
        ArgumentError
            If the processor cannot make images of that size.

        """
        size = self.size if size is None else size
        if not 1 <= min(size) <= max(size) <= _LARGEST_SIDE:
            raise ArgumentError(
                "size", expected=f"height and width from 1 to {_LARGEST_SIDE}", got=f"{size[0]} x {size[1]}"
            )
        options = self._options if size == self.size else _sized(self._processor, *size)
        named = {"pixel_values": _pixels(self._processor, images, (self.channels, *size), options)}
        if self._positions is not None and size != self._positions:
            named["interpolate_pos_encoding"] = torch.tensor(True)
        return named


Preparation = ImagePreparation | dict[str, Tensor] | None
"""How a model gets its inputs: for an audio model they stand for noise, and a model of tokens needs none."""


def _pixels(
    processor: Any, images: Sequence[Image.Image], shape: tuple[int, int, int], options: dict[str, Any]
) -> Tensor:
    coloured = [one.convert(_MODES[shape[0]]) for one in images]
    with np.errstate(all="ignore"):  # _tried refuses a standard deviation of zero
        pixels: Tensor = processor(coloured, return_tensors="pt", **options)["pixel_values"]
    if tuple(pixels.shape) != (len(images), *shape):
        raise ArgumentError(
            "size",
            expected=f"a size of which {type(processor).__name__} makes images",
            got=f"{shape[1:]}, for which it makes values of shape {tuple(pixels.shape)}",
        )
    return pixels


def _sized(processor: Any, height: int, width: int) -> dict[str, Any]:
    """Return the options that make an image processor resize images to a given height and width."""
    size = {"height": height, "width": width}
    if not processor.do_center_crop:
        return {"do_resize": True, "size": size}
    # The image is resized by the same factor as the crop, so that the crop keeps the same share of the image.
    crop = dict(processor.crop_size)
    scale = max(height / crop["height"], width / crop["width"])
    inner = {name: round(scale * side) for name, side in dict(processor.size).items()}
    return {"do_resize": True, "size": inner, "crop_size": size}


def image_preparation(place: Location, config: Any, model: nn.Module) -> ImagePreparation:
    """Return the image processor of a model, after trying it on two images.

    The processor is the one in the model's files. Without such files it is the default processor of the
    model's type, at the image size of the model's configuration. If that processor cannot be used (because it
    needs torchvision, say), the processor of ViT takes its place, which resizes, crops and normalises.
    ``config`` is the configuration of the whole model, and ``model`` may be a part of it.

    Raises
    ------
    ModelError
        If no processor can be used, or the model takes neither one nor three channels.

    """
    own = getattr(model, "config", config)
    stated = (getattr(own, key, None) for key in ("num_channels", "in_channels", "in_chans"))
    channels = next((value for value in stated if value), 3)
    if channels not in _MODES:
        raise ModelError(f"{place.name!r} takes images of {channels} channels, and those here have 1 or 3.")
    positions = _pair(getattr(own, "image_size", None))
    has_files = _has_files(place)
    why = ""
    for origin, build in _processors(place, (config, own), channels, has_files=has_files):
        try:
            processor = build()
            processor.do_convert_rgb = False  # images are converted before, to the channels of the model
            by_files = has_files and processor.do_resize
            size, options = _tried(processor, channels, None if by_files else positions)
        except Exception as error:  # each processor raises errors of its own
            why = f"{type(error).__name__}: {reason(error)}"
            continue
        spread = f", mean {processor.image_mean}, standard deviation {processor.image_std}"
        interpolates = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        return ImagePreparation(
            size=size,
            channels=channels,
            patch=_pair(getattr(own, "patch_size", None)),
            sentence=f"{type(processor).__name__} ({origin}){spread if processor.do_normalize else ''}",
            _positions=(positions or size) if interpolates else None,
            _processor=processor,
            _options=options,
        )
    raise ModelError(f"transformers has no usable way from images to the inputs of {place.name!r}: {why}.")


def _processors(
    place: Location, configs: tuple[Any, Any], channels: int, *, has_files: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the image processors to try, each as a description and a function that builds the processor."""
    if has_files:
        options = {"local_files_only": place.local_files_only, "trust_remote_code": False}
        named = partial(AutoImageProcessor.from_pretrained, config=configs[0], backend="pil", **options)
        general = partial(ViTImageProcessorPil.from_pretrained, **options)
        origin = "settings of the model's files"
        yield origin, partial(named, place.location)
        yield f"{origin}; the processor that they name cannot be used", partial(general, place.location)
        return
    grey = {"image_mean": [0.5], "image_std": [0.5]} if channels == 1 else {}
    kinds = [IMAGE_PROCESSOR_MAPPING[type(one)] for one in configs if type(one) in IMAGE_PROCESSOR_MAPPING]
    for kind in kinds:
        if "pil" in kind:
            yield "the defaults of the model's type", partial(kind["pil"], **grey)
    yield "the model's type has no processor that can be used", partial(ViTImageProcessorPil, **grey)


def _tried(
    processor: Any, channels: int, wanted: tuple[int, int] | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the height and width to which an image processor resizes every image, and the options that it
    needs for this.

    The size is ``wanted`` or, if that is None, the one that the processor gives to a square image.
    """
    stated = (getattr(processor, name, None) for name in ("size", "crop_size", "pad_size"))
    sides = [*(wanted or ()), *(side for size in stated for side in dict(size or {}).values())]
    if any(side > _LARGEST_SIDE for side in sides):
        raise ValueError(f"{' x '.join(map(str, sides))} pixels are more than {_LARGEST_SIDE} a side")
    # Two images of different proportions show whether the processor gives all images the same size.
    trials = [Image.new(_MODES[channels], size, "gray") for size in ((96, 96), (128, 96))]
    square, wide = (processor(one, return_tensors="pt")["pixel_values"].shape[2:] for one in trials)
    height, width = square
    size = wanted or (height, width)
    options = {} if size == square == wide else _sized(processor, *size)
    if not bool(_pixels(processor, trials, (channels, *size), options).isfinite().all()):
        raise ValueError("it makes NaN or infinity of an image")
    return size, options


def audio_sample(place: Location, config: Any, model: nn.Module) -> dict[str, Tensor] | None:
    """Return inputs of an audio model that its feature extractor makes from noise.

    A model of raw samples gets a second of noise; another model gets the length for which it was made, or 10
    seconds if that is unknown. The settings of the extractor come from the model's files or, if there are
    none, from the defaults of the model's type. None if transformers has no usable extractor.
    """
    try:
        if _has_files(place):
            extractor = AutoFeatureExtractor.from_pretrained(
                place.location, trust_remote_code=False, local_files_only=place.local_files_only
            )
        else:
            extractor = FEATURE_EXTRACTOR_MAPPING[type(config)]()
        rate = int(extractor.sampling_rate)
        seconds = float(getattr(extractor, "chunk_length", None) or _USUAL_SECONDS)
        if not (1000 <= rate <= 192_000 and 0 < seconds <= _MOST_SECONDS):
            return None
        for length in (1.0, seconds):
            wave = 0.1 * np.random.RandomState(0).standard_normal(int(length * rate))
            made = extractor([wave.astype(np.float32)], sampling_rate=rate, return_tensors="pt")
            if "input_values" in made and made["input_values"].ndim == 2:
                break  # raw samples, and no features such as a spectrogram
    except Exception:  # each feature extractor raises errors of its own
        return None
    taken = inspect.signature(model.forward).parameters
    # An attention mask of ones is left out.
    return {
        name: value
        for name, value in made.items()
        if name in taken and (name != "attention_mask" or not bool((value == 1).all()))
    }


def _has_files(place: Location) -> bool:
    return any(place.file(name) is not None for name in _FILES)


def _pair(value: Any) -> tuple[int, int] | None:
    """Return (height, width) for a number or a pair in a configuration, and None for any other value."""
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(v, int) and v > 0 for v in pair):
        return pair[0], pair[1]
    return None
