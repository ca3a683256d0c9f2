"""What the user asks of a figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from howsmooth.errors import ArgumentError
from howsmooth.study.options import Kind, Options, flag, option, several, token_counts, whole, words
from howsmooth.study.plan import (
    DEFAULT_TEXT,
    ModelSpec,
    as_decoder_option,
    device_option,
    dtype_option,
    layers_option,
    random_init_option,
    seed_option,
)
from howsmooth.study.ranges import Ranges

__all__ = ["Request"]

_VARIANTS = {"random-init": "random_init", "as-decoder": "as_decoder"}


def _model(name: str, value: Any) -> ModelSpec:
    """Read a model with the variants behind its name, such as ``gpt2,random-init``."""
    if isinstance(value, ModelSpec):
        return value
    base, variants = words().read(name, value), dict[str, Any]()
    while (variant := base.rpartition(",")[2]) in _VARIANTS and "," in base:
        base = base.rpartition(",")[0]
        variants[_VARIANTS[variant]] = True
    return ModelSpec(base, **variants)


@dataclass(frozen=True)
class Request(Options):
    """What the user asks of a figure; what is left out, the figure decides."""

    PANEL: ClassVar[str] = "What to reproduce"

    models: tuple[ModelSpec, ...] = option(
        (),
        several(Kind(str, _model, place=True), once=False),
        "A built-in model, a local folder, or a Hub id, instead of the figure's own; with ,random-init or "
        ",as-decoder behind it for this model alone. May be repeated.",
        metavar="NAME",
        flag="model",
    )
    as_decoder: bool = as_decoder_option()
    random_init: bool = random_init_option()
    texts: tuple[str, ...] = option(
        (DEFAULT_TEXT,),
        several(words(place=True)),
        "A path (.txt, or AG_NEWS-format .csv), alice or ag_news. May be repeated.",
        metavar="NAME|PATH",
        flag="text",
    )
    layers: Ranges | None = layers_option(None)
    lengths: tuple[int, ...] | None = option(
        None,
        token_counts(),
        "Numbers of tokens, start:stop:step or a list, instead of the figure's own.",
        metavar="RANGES",
    )
    samples: int | None = option(None, whole(1), "Sequences a length, instead of the figure's own.")
    as_published: bool = option(
        False,
        flag(),
        "Show beside it what the paper's published code computes. Takes several times as long.",
    )
    seed: int = seed_option()
    device: str = device_option()
    dtype: str = dtype_option()

    def check(self) -> None:
        """Make the variants those of each model, and refuse a model that is there twice, or none for them."""
        if not self.models and (self.as_decoder or self.random_init):
            raise ArgumentError(
                "models",
                expected="a --model together with --as-decoder or --random-init",
                got="none",
                remedy="Give --model, or leave them out.",
            )
        found: list[ModelSpec] = []
        for one in self.models:
            both = {name: getattr(one, name) or getattr(self, name) for name in _VARIANTS.values()}
            spec = replace(one, **both)
            if spec in found:
                raise ArgumentError("models", expected="each only once", got=f"{spec.label!r} twice")
            found.append(spec)
        self._set("models", tuple(found))
