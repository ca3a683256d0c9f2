"""From what was typed to a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from howsmooth.errors import ArgumentError
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.ranges import Ranges

__all__ = ["DEFAULT_MODELS", "DEFAULT_TEXTS", "build_plan", "parse_radius", "use_threads"]

DEFAULT_MODELS = ("builtin-encoder", "builtin-decoder")
DEFAULT_TEXTS = ("python-docs",)

# PyTorch takes what fits into an int, and then tries to start them.
_MOST_THREADS = 4096


def build_plan(
    *,
    models: Sequence[str] | None,
    texts: Sequence[str] | None,
    layers: str,
    heads: str,
    lengths: str,
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
) -> Plan:
    """Build a plan of the command line's words; what was left out (``None`` or empty) gets its default.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If a word cannot be read or a value is impossible.

    """
    return Plan(
        models=tuple(
            ModelSpec(name, random_init=random_init, as_decoder=as_decoder)
            for name in models or DEFAULT_MODELS
        ),
        texts=tuple(texts or DEFAULT_TEXTS),
        layers=Ranges.parse(layers, "layers"),
        heads=Ranges.parse(heads, "heads"),
        lengths=Ranges.parse(lengths, "lengths").values(),
        samples=samples,
        scopes=tuple(scopes or ("attention",)),
        rtol=rtol,
        confidence=confidence,
        max_iterations=max_iterations,
        seed=seed,
        device=device,
        dtype=dtype,
        bounds=bounds,
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
            "radius", expected=f"a finite number > 0, or {' or '.join(words)}", got=repr(text)
        )
    return value


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
