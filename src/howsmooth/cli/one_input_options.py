"""The options of commands that look at one model and one input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from howsmooth.errors import ArgumentError
from howsmooth.study.options import Options, option, words
from howsmooth.study.plans import shared
from howsmooth.study.ranges import Ranges

__all__ = ["OneInputPlan"]


@dataclass(frozen=True)
class OneInputPlan(Options):
    """The options that name one model and one input of it, for commands that look at both."""

    model: str = option(
        ...,
        words(place=True),
        "A built-in model, a local folder or a Hub id; with --random-init also a model type.",
        metavar="MODEL",
        positional=True,
    )
    text: str = shared("text")
    tokens: str | None = option(
        None, words(place=True), "Token ids instead of a text: a .npy, .json or text file.", metavar="FILE"
    )
    span: str | None = option(
        None,
        words(),
        "Which tokens of a text or of token ids, counted from 0, such as 0:128. Default: all, or the first "
        "512 of a longer input, or as many as the model takes.",
        metavar="START:END",
    )
    layers: Ranges = shared("layers")
    random_init: bool = shared("random_init")
    as_decoder: bool = shared("as_decoder")
    part: str | None = shared("part")
    seed: int = shared("seed")
    device: str = shared("device")

    def loaded(self, load: Callable[..., Any], **more: Any) -> Any:
        """Load the model with :func:`~howsmooth.models.load_model` or another loader, given as ``load``."""
        return load(
            self.model,
            random_init=self.random_init,
            as_decoder=self.as_decoder,
            part=self.part,
            seed=self.seed,
            device=self.device,
            dtype=None,
            **more,
        )

    def layers_of(self, loaded: Any) -> tuple[int, ...] | None:
        """Return the indices of the chosen layers, or None for all self-attention layers."""
        if loaded.layers is None or not self.layers.items:
            return None
        return self.layers.resolve(loaded.layers, self.model, "layers")

    def input_of(self, loaded: Any) -> Any:
        """Return the input of a loaded model, as :func:`howsmooth.profile` takes it."""
        from howsmooth.models import load_token_ids
        from howsmooth.texts import load_text

        if self.tokens is not None:
            return load_token_ids(self.tokens).tokens
        if loaded.modality != "text":
            raise ArgumentError(
                "text",
                expected=f"an input that the model takes: {loaded.modality}",
                got="a text",
                remedy="howsmooth profile takes --images and --audio.",
            )
        return load_text(self.text).content
