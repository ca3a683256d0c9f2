"""Define the options of the command ``howsmooth reproduce``, which apply to all figures."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator

from howsmooth.study.options import LATER, Told, listed, once, options, word
from howsmooth.study.plans import DEFAULT_TEXT, Device, Layers, Lengths, ModelSpec, Samples, Seed, Texts

__all__ = ["FigureOptions"]

_VARIANTS = {"random-init": "random_init", "as-decoder": "as_decoder"}


def _model(value: Any, info: Any) -> ModelSpec:
    """Parse the name of a model, which may be followed by variants, such as ``gpt2,random-init``."""
    if isinstance(value, ModelSpec):
        return value
    base, variants = word(value, info), dict[str, Any]()
    while (variant := base.rpartition(",")[2]) in _VARIANTS and "," in base:
        base = base.rpartition(",")[0]
        variants[_VARIANTS[variant]] = True
    return ModelSpec(base, **variants)


def _models(value: Any, info: Any) -> tuple[ModelSpec, ...]:
    models = tuple(_model(one, info) for one in listed(value))
    once(tuple(model.label for model in models), info)
    return models


@options
class FigureOptions:
    """The options of the command ``howsmooth reproduce``; each figure has defaults of its own."""

    PANEL: ClassVar[str] = "What to reproduce"

    models: Annotated[
        tuple[ModelSpec, ...],
        PlainValidator(_models),
        Told("NAME", flag="model", several=True),
        "A built-in model, a local folder, or a Hub id, in place of the figure's models. Append "
        ",random-init or ,as-decoder for a variant of it. May be repeated.",
    ] = ()
    texts: Texts = LATER
    layers: Annotated[
        Layers | None, "Layers: all, or a list such as 0,6, in place of the figure's layers."
    ] = None
    lengths: Annotated[
        Lengths | None, "Numbers of tokens: start:stop:step or a list, in place of the figure's lengths."
    ] = None
    samples: Annotated[
        Samples | None, "Number of sequences for each length, in place of the figure's number."
    ] = None
    search: Annotated[
        bool,
        "For figure-2, also search for tokens that are worse than the paper's, by gradient ascent. Takes "
        "many minutes.",
    ] = False
    as_published: Annotated[
        bool, "Also show what the paper's published code computes. This takes several times as long."
    ] = False
    seed: Seed = 0
    device: Device = "cpu"
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if self.texts is None:
            vars(self)["texts"] = (DEFAULT_TEXT,)
