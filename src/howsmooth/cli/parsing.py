"""From what was typed to a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howsmooth.errors import ArgumentError
from howsmooth.memory import parse_bytes
from howsmooth.study.plan import InputSpec, ModelSpec, Plan
from howsmooth.study.ranges import Ranges

__all__ = [
    "DEFAULT_LENGTHS",
    "DEFAULT_MODELS",
    "DEFAULT_TEXTS",
    "build_inputs",
    "build_plan",
    "parse_radii",
    "parse_radius",
    "use_threads",
]

DEFAULT_MODELS = ("builtin-encoder", "builtin-decoder")
DEFAULT_TEXTS = ("python-docs",)
DEFAULT_LENGTHS = "2:100:2"

# PyTorch takes what fits into an int, and then tries to start them.
_MOST_THREADS = 4096
_MOST_RADII = 100


def build_inputs(
    *,
    tokens: Sequence[str] | None,
    embeddings: Sequence[str] | None,
    images: Sequence[str] | None,
    audio: Sequence[str] | None,
) -> tuple[InputSpec, ...]:
    """Say what is measured on besides texts; all images together are one source, each other file is one."""
    one_each = (("tokens", tokens), ("embeddings", embeddings), ("audio", audio))
    single = tuple(InputSpec(kind, (place,)) for kind, places in one_each for place in places or ())
    return (*single, InputSpec("images", tuple(images))) if images else single


def build_plan(
    *,
    models: Sequence[str] | None,
    texts: Sequence[str] | None,
    layers: str,
    heads: str,
    lengths: str | None,
    samples: int,
    scopes: Sequence[str] | None,
    random_init: bool,
    as_decoder: bool,
    rtol: float,
    confidence: float,
    max_iterations: int,
    seed: int,
    device: str,
    dtype: str,
    bounds: bool = True,
    inputs: tuple[InputSpec, ...] = (),
    part: str | None = None,
    memory: str | None = None,
) -> Plan:
    """Build a plan of the command line's words; what was left out (``None`` or empty) gets its default.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If a word cannot be read or a value is impossible.

    """
    if inputs and not models:
        raise ArgumentError(
            "models",
            expected="the name of a model together with images, sound, token ids or embeddings",
            got="none",
            remedy="The built-in models are measured on texts.",
        )
    chosen = tuple(texts or (() if inputs else DEFAULT_TEXTS))
    if lengths is None and (chosen or any(one.kind in ("tokens", "embeddings") for one in inputs)):
        lengths = DEFAULT_LENGTHS
    return Plan(
        models=tuple(
            ModelSpec(name, random_init=random_init, as_decoder=as_decoder, part=part)
            for name in models or DEFAULT_MODELS
        ),
        texts=chosen,
        inputs=inputs,
        layers=Ranges.parse(layers, "layers"),
        heads=Ranges.parse(heads, "heads"),
        lengths=() if lengths is None else Ranges.parse(lengths, "lengths").values(),
        samples=samples,
        scopes=tuple(scopes or ("attention",)),
        rtol=rtol,
        confidence=confidence,
        max_iterations=max_iterations,
        seed=seed,
        device=device,
        dtype=dtype,
        bounds=bounds,
        memory=None if memory is None else parse_bytes(memory),
    )


def parse_radius(text: str, words: Sequence[str]) -> float | str:
    """Read a radius: a number, or one of some words.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If it is neither, or no finite number above zero.

    """
    if text in words:
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(
            "radius",
            expected=f"a finite number > 0{', or ' if words else ''}{' or '.join(words)}",
            got=repr(text),
        )
    return value


def parse_radii(text: str) -> tuple[float, ...]:
    """Read distances, a list of numbers with commas between them; they come in order, each once.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If one is no finite number >= 0, or there are more than a hundred.

    """
    try:
        values = {float(word) for word in text.split(",")}
    except ValueError:
        values = {math.nan}
    if not all(math.isfinite(value) and value >= 0 for value in values) or len(values) > _MOST_RADII:
        raise ArgumentError(
            "radii",
            expected=f"finite numbers >= 0 with commas between them, at most {_MOST_RADII}",
            got=repr(text[:80]),
        )
    return tuple(sorted(abs(value) for value in values))


def use_threads(count: int | None) -> None:
    """Let PyTorch use so many threads; ``None`` leaves it as it is.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If no machine has so many.

    """
    if count is None:
        return
    if not 1 <= count <= _MOST_THREADS:
        raise ArgumentError("threads", expected=f"a number from 1 to {_MOST_THREADS}", got=str(count))
    import torch

    torch.set_num_threads(count)
