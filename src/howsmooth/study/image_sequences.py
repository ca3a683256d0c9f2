"""Turn images into sequences of tokens: one for each patch, and those that a vision model adds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from howsmooth.errors import CaptureError
from howsmooth.models import LoadedModel, capture
from howsmooth.models.float32_weights import float32_layers
from howsmooth.models.inputs.image_sources import Images
from howsmooth.models.inputs.model_inputs import in_dtype, model_inputs
from howsmooth.models.loading.load import preparation_of
from howsmooth.models.measurement_mode import measurement_mode

__all__ = ["ImageFeed"]

_MOST_LENGTHS = 8  # lengths of images that are measured by default
_LARGEST_GRID = 64  # patches along one side of an image


class ImageFeed:
    """Images as sequences of tokens, resized to the requested length. Used in the same way as a TokenFeed.

    ``lengths`` are the possible numbers of tokens; the ``layers`` (None: all) must have the same number.
    """

    parts = None  # every image is a sequence
    special = 0

    def __init__(self, images: Images, model: LoadedModel, layers: Sequence[int] | None) -> None:
        self._images, self._model, self.count = images, model, len(images)
        self._preparation = made = preparation_of(model)
        self._own = n = self._tokens_at(layers)
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

    def _tokens_at(self, layers: Sequence[int] | None) -> int:
        chosen = None if layers is None else list(layers)
        groups: dict[int, list[int]] = {}
        for site in capture(self._model, self._inputs([0], self._preparation.size), chosen):
            groups.setdefault(site.x.shape[-2], []).append(site.layer)
        if len(groups) > 1:
            listed = "; ".join(f"{n} in layers {', '.join(map(str, of))}" for n, of in groups.items())
            raise CaptureError(
                f"{self._model.name!r} has different numbers of tokens in its layers for one image: "
                f"{listed}. Choose layers that have the same number."
            )
        return next(iter(groups))

    def _takes(self, size: tuple[int, int]) -> bool:
        model = self._model.model
        try:
            with measurement_mode(model), float32_layers(model):
                model(**model_inputs(model, self._inputs([0], size)).named)
        except Exception:  # any error means that the model does not accept this size
            return False
        return True

    def _inputs(self, starts: Sequence[int], size: tuple[int, int]) -> dict[str, Tensor]:
        pictures = [self._images[index] for index in starts]
        return in_dtype(self._model.model, self._preparation.prepared(pictures, size))

    @cached_property
    def usual(self) -> tuple[int, ...]:
        """The lengths measured by default: that of the model's usual image size, and some shorter ones."""
        shorter = [n for n in self.lengths if 2 <= n <= self._own]
        if len(shorter) > _MOST_LENGTHS:
            wished = np.geomspace(shorter[0], shorter[-1], _MOST_LENGTHS)
            shorter = sorted({min(shorter, key=lambda n: abs(n - one)) for one in wished})
        return tuple(n for n in shorter if n == self._own or self._takes(self._sizes[n]))

    def inputs(self, starts: Sequence[int], n: int) -> dict[str, Tensor]:
        """Return the model's inputs for the images with indices ``starts``, resized to n tokens each."""
        return self._inputs(starts, self._sizes[n])

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Label each token by its patch's row and column, or by its index if a model adds several tokens."""
        if self._added not in (0, 1) or self._preparation.patch is None:
            return tuple(map(str, range(n)))
        columns = self._sizes[n][1] // self._preparation.patch[1]
        patches = [f"{1 + i // columns},{1 + i % columns}" for i in range(n - self._added)]
        return (*["class"] * self._added, *patches)

    def place(self, start: int) -> None:
        """Return None: an image has no place in a text."""
