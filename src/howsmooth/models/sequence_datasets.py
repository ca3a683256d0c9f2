"""Datasets of sequences for a model: token ids, embeddings and images, divided into sequences of a given
length.

The length of an image is its number of patches plus the tokens that the model adds. It is found by counting
the tokens of the captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from howsmooth.errors import ArgumentError, CaptureError, ModelError
from howsmooth.models.capture import capture
from howsmooth.models.float32_weights import computing_dtype, float32_layers
from howsmooth.models.inputs.image_sources import Images, load_images
from howsmooth.models.inputs.model_inputs import in_dtype
from howsmooth.models.inputs.submodels_by_modality import token_width
from howsmooth.models.inputs.token_files import TokenStream, load_embeddings, load_token_ids
from howsmooth.models.loading.load import LoadedModel
from howsmooth.models.loading.processors import ImagePreparation
from howsmooth.models.measurement_mode import measurement_mode

__all__ = [
    "Dataset",
    "ImageDataset",
    "TokenDataset",
    "dataset_of",
    "image_inputs",
    "open_input",
]

_MOST_LENGTHS = 8  # lengths of images that are measured by default
_LARGEST_GRID = 64  # patches along one side of an image

Opened = Images | TokenStream


def open_input(kind: str, places: Sequence[str]) -> Opened:
    """Read token ids, embedded tokens or images from files, or use the built-in images.

    Parameters
    ----------
    kind
        ``"tokens"``, ``"embeddings"`` or ``"images"``.
    places
        The paths: several for images, otherwise one. ``"builtin"`` stands for built-in images.

    Raises
    ------
    ArgumentError
        If a file cannot be read, or several are given for another kind than images.

    """
    if kind == "images":
        return load_images(list(places))
    if len(places) != 1:
        raise ArgumentError(kind, expected="one file", got=str(len(places)))
    return load_token_ids(places[0]) if kind == "tokens" else load_embeddings(places[0])


def dataset_of(opened: Opened, model: LoadedModel, layers: Sequence[int] | None = None) -> Dataset:
    """Return the Dataset that divides data from :func:`open_input` into sequences for a model.

    Parameters
    ----------
    opened
        The source, from :func:`open_input`.
    model
        The model.
    layers
        Indices of the layers that will be captured, which must have equal numbers of tokens; None for all.

    Raises
    ------
    ModelError
        If the model takes inputs of another kind.
    CaptureError
        If the layers have different numbers of tokens.

    """
    if isinstance(opened, TokenStream):
        return TokenDataset(opened, model)
    return ImageDataset(opened, model, layers)


def image_inputs(
    model: LoadedModel, images: object = "builtin", *, size: int | tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Return the inputs of a vision model for a sequence of images.

    Parameters
    ----------
    model
        A vision model, or the vision part of one, from :func:`~howsmooth.models.load_model`.
    images
        As for :func:`~howsmooth.models.inputs.image_sources.load_images`; the batch has all of these images.
    size
        Height and width in pixels, or one number for both; by default the size of the model. Not every model
        accepts other sizes.

    Returns
    -------
    dict
        ``pixel_values`` (batch, channels, height, width) in the dtype of the model, for
        :func:`~howsmooth.models.capture`.

    Raises
    ------
    ModelError
        If the model takes no images.
    ArgumentError
        If the images cannot be read.

    """
    preparation = _preparation(model)
    found = load_images(images)
    pair = (size, size) if isinstance(size, int) else size
    return in_dtype(model.model, preparation.prepared([found[index] for index in range(found.size)], pair))


def _preparation(model: LoadedModel) -> ImagePreparation:
    """Return the image processor of the model; raise ModelError if the model takes other inputs."""
    if not isinstance(model.preparation, ImagePreparation):
        raise ModelError(
            f"{model.name!r} ({type(model.model).__name__}) takes {_taken(model)}, not images. "
            "If it has a part for that, choose it with part (--part vision)."
        )
    return model.preparation


def _taken(model: LoadedModel) -> str:
    words = {"image": "images", "audio": "audio", "embeddings": "embedded tokens", "other": "other inputs"}
    return words.get(model.modality, model.modality)


def _tokens_at(model: LoadedModel, inputs: dict[str, Tensor], layers: Sequence[int] | None) -> int:
    """Return the number of tokens that each selected attention layer has for an image. Raise CaptureError if
    this number differs between the layers.
    """
    sites = capture(model, inputs, None if layers is None else list(layers))
    counts = {site.layer: site.x.shape[-2] for site in sites}
    if len(set(counts.values())) > 1:
        groups: dict[int, list[int]] = {}
        for layer, n in counts.items():
            groups.setdefault(n, []).append(layer)
        listed = "; ".join(f"{n} in layers {', '.join(map(str, of))}" for n, of in groups.items())
        raise CaptureError(
            f"{model.name!r} has different numbers of tokens in its layers for one image: {listed}. Choose "
            "layers that have the same number, with layers (--layers)."
        )
    return next(iter(counts.values()))


class Dataset:
    """The base class of datasets, which divide token ids, embedded tokens or images into sequences for one
    model.

    Attributes
    ----------
    count
        The number of tokens or images in the source.
    parts
        The stretches of the source in which a sequence may lie, as (first token, number of tokens); None if
        every sequence is a whole item, such as an image.
    lengths
        The possible lengths of a sequence; empty if every length is possible.
    usual
        The lengths that are used by default; empty if the model does not suggest any.
    preparation
        A phrase that says how the source becomes inputs of the model.

    """

    count: int
    parts: tuple[tuple[int, int], ...] | None = None
    lengths: tuple[int, ...] = ()
    usual: tuple[int, ...] = ()
    preparation: str

    def inputs(self, starts: Sequence[int], n: int) -> Tensor | dict[str, Tensor]:
        """Return the model inputs for some sequences of n tokens each.

        Parameters
        ----------
        starts
            The first token of each sequence, or the index of each image.
        n
            The number of tokens in each sequence.

        """
        raise NotImplementedError

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return a label for each of n tokens. The label is the index of the token in the data."""
        return tuple(str(index) for index in range(start, start + n))


class TokenDataset(Dataset):
    """Sequences of token ids, or of embedded tokens."""

    def __init__(self, stream: TokenStream, model: LoadedModel) -> None:
        self._tokens, self._model = stream.tokens, model
        self.count, self.parts = len(stream.tokens), stream.parts
        self._of_transformers = isinstance(model.model, PreTrainedModel)
        if stream.tokens.is_floating_point():
            self._check_embedded()
            in_place = ", in place of the model's embedding of ids" if self._of_transformers else ""
            self.preparation = f"embedded tokens as given{in_place}"
        else:
            self._check_ids()
            self.preparation = "token ids as given"

    def _check_ids(self) -> None:
        size, largest, name = self._model.vocab_size, int(self._tokens.max()), self._model.name
        if size is None:
            raise ModelError(f"{name!r} takes {_taken(self._model)}, not token ids.")
        if largest >= size:
            raise ArgumentError(
                "tokens",
                expected=f"ids from 0 to {size - 1}, the embedding table of {name}",
                got=f"id {largest}",
            )

    def _check_embedded(self) -> None:
        name, d, given = self._model.name, token_width(self._model.model), self._tokens.shape[1]
        if self._model.modality not in ("text", "embeddings"):
            raise ModelError(f"{name!r} takes {_taken(self._model)}, not embedded tokens.")
        if d is not None and given != d:
            raise ArgumentError("embeddings", expected=f"tokens of dimension {d}, as {name}", got=str(given))

    def inputs(self, starts: Sequence[int], n: int) -> Tensor | dict[str, Tensor]:
        """Return the model inputs of some sequences: token ids (batch, n) or tokens (batch, n, d)."""
        windows = torch.stack([self._tokens[start : start + n] for start in starts])
        if not windows.is_floating_point():
            return windows
        embedded = windows.to(computing_dtype(self._model.model))
        return {"inputs_embeds": embedded} if self._of_transformers else embedded

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return the text of each of n tokens, or the indices of embedded tokens, which have no text."""
        if self._tokens.is_floating_point():
            return super().words(start, n)
        return tuple(self._model.tokenizer.decoded(self._tokens[start : start + n].tolist()))


class ImageDataset(Dataset):
    """Images as sequences of patches, resized so that they have the requested number of patches."""

    def __init__(self, images: Images, model: LoadedModel, layers: Sequence[int] | None) -> None:
        self._images, self._model, self.count = images, model, len(images)
        self._preparation = made = _preparation(model)
        self._own = n = _tokens_at(model, self._inputs([0], made.size), layers)
        self._sizes = {n: made.size}
        self._added: int | None = None
        patch = made.patch
        if patch is not None and all(side % p == 0 for side, p in zip(made.size, patch, strict=True)):
            rows, columns = (side // p for side, p in zip(made.size, patch, strict=True))
            added = n - rows * columns
            # Only then do the layers have a token for each patch, plus a few added tokens.
            if 0 <= added < rows * columns:
                self._added = added
                if self._takes((max(1, rows // 2) * patch[0], max(1, columns // 2) * patch[1])):
                    self._sizes |= {
                        side * side + added: (side * patch[0], side * patch[1])
                        for side in range(1, _LARGEST_GRID + 1)
                        if side * side + added != n
                    }
        self.lengths = tuple(sorted(self._sizes))
        others = ", other lengths by other sizes" if len(self.lengths) > 1 else ""
        own = " x ".join(map(str, made.size))
        self.preparation = f"images of {own} pixels for {n} tokens{others}; {made.sentence}"

    def _takes(self, size: tuple[int, int]) -> bool:
        """Return whether the processor can produce images of this size (height, width) and the model runs on
        them.
        """
        model = self._model.model
        device = next(model.parameters()).device
        try:
            inputs = {name: value.to(device) for name, value in self._inputs([0], size).items()}
            with measurement_mode(model), float32_layers(model), torch.no_grad():
                model(**inputs)
        except Exception:  # any error means that the model does not accept this size
            return False
        return True

    def _inputs(self, starts: Sequence[int], size: tuple[int, int]) -> dict[str, Tensor]:
        return in_dtype(
            self._model.model, self._preparation.prepared([self._images[one] for one in starts], size)
        )

    @cached_property
    def usual(self) -> tuple[int, ...]:  # type: ignore[override]
        """The default numbers of tokens: the number for the usual image size of the model, and smaller
        numbers.
        """
        shorter = [n for n in self.lengths if 2 <= n <= self._own]
        if len(shorter) > _MOST_LENGTHS:
            wished = np.geomspace(shorter[0], shorter[-1], _MOST_LENGTHS)
            shorter = sorted({min(shorter, key=lambda n: abs(n - one)) for one in wished})
        return tuple(n for n in shorter if n == self._own or self._takes(self._sizes[n]))

    def inputs(self, starts: Sequence[int], n: int) -> dict[str, Tensor]:
        """Return the pixel values of some images, each resized so that it gives n tokens.

        ``starts`` holds the indices of the images.
        """
        return self._inputs(starts, self._sizes[n])

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return a label for each of n tokens of an image. The label is the row and column of the token's
        patch.

        The labels are indices if the model adds more than one token to the patches.
        """
        if self._added not in (0, 1) or self._preparation.patch is None:
            return super().words(0, n)
        columns = self._sizes[n][1] // self._preparation.patch[1]
        patches = [f"{1 + i // columns},{1 + i % columns}" for i in range(n - self._added)]
        return (*["class"] * self._added, *patches)
