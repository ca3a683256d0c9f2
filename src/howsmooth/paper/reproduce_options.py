"""Define the options of the command ``howsmooth reproduce``, which apply to all figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from howsmooth.errors import ArgumentError
from howsmooth.study.options import Kind, Options, flag, option, options_of, several, words
from howsmooth.study.plans import DEFAULT_TEXT, ModelSpec, Plan, shared
from howsmooth.study.ranges import Ranges

__all__ = ["FigureOptions"]

_VARIANTS = {"random-init": "random_init", "as-decoder": "as_decoder"}


def _model(name: str, value: Any) -> ModelSpec:
    """Parse the name of a model, which may be followed by variants, such as ``gpt2,random-init``."""
    if isinstance(value, ModelSpec):
        return value
    base, variants = words(place=True).read(name, value), dict[str, Any]()
    while (variant := base.rpartition(",")[2]) in _VARIANTS and "," in base:
        base = base.rpartition(",")[0]
        variants[_VARIANTS[variant]] = True
    return ModelSpec(base, **variants)


def _of_plan(name: str, **changed: Any) -> Any:
    """Define an option like one of a measurement plan, with some arguments changed."""
    return option(**({"default": None} | vars(options_of(Plan)[name]) | changed))


@dataclass(frozen=True)
class FigureOptions(Options):
    """The options of the command ``howsmooth reproduce``.

    If the user omits an option, each figure uses a default of its own.
    """

    PANEL: ClassVar[str] = "What to reproduce"

    models: tuple[ModelSpec, ...] = option(
        (),
        several(Kind(str, _model, place=True), once=False),
        "A built-in model, a local folder, or a Hub id, in place of the figure's models. Append "
        ",random-init or ,as-decoder for this model alone. May be repeated.",
        metavar="NAME",
        flag="model",
    )
    as_decoder: bool = shared("as_decoder")
    random_init: bool = shared("random_init")
    texts: tuple[str, ...] = _of_plan("texts")
    layers: Ranges | None = shared("layers", default=None)
    lengths: tuple[int, ...] | None = _of_plan(
        "lengths", help="Numbers of tokens: start:stop:step or a list, in place of the figure's lengths."
    )
    samples: int | None = _of_plan(
        "samples", help="Number of sequences for each length, in place of the figure's number."
    )
    search: bool = option(
        False,
        flag(),
        "For figure-2, also search for tokens that are worse than the paper's, by gradient ascent. Takes "
        "many minutes.",
    )
    as_published: bool = option(
        False,
        flag(),
        "Also show what the paper's published code computes. This takes several times as long.",
    )
    seed: int = shared("seed")
    device: str = shared("device")
    dtype: str = shared("dtype")

    def check(self) -> None:
        """Choose the default text, apply the options ``as_decoder`` and ``random_init`` to each model, and
        refuse a model that is named twice.

        Both options are refused if no model is named.
        """
        if self.texts is None:
            self._set("texts", (DEFAULT_TEXT,))
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
