"""What a study measures: its axes, and what gives each of its numbers a meaning.

A plan is data. It says nothing about how the work is done; :mod:`howsmooth.study.run` carries it
out, and the command line (or a plan file) only builds one.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from howsmooth.accuracy import check_accuracy
from howsmooth.errors import ArgumentError
from howsmooth.study.names import encodable
from howsmooth.study.ranges import Ranges
from howsmooth.study.sequences import DISJOINT

__all__ = ["KINDS", "SCOPES", "SCOPE_MEANINGS", "Identity", "InputSpec", "ModelSpec", "Plan", "derive_seed"]

SCOPES = ("head", "heads", "attention", "residual", "block")
"""The scopes a measurement can have; what each means is said in :data:`SCOPE_MEANINGS`."""

KINDS = ("text", "tokens", "embeddings", "images", "audio")
"""What sequences can come from: a text, token ids, embedded tokens, images or sound."""

# A model is given one of these; the first three are all texts to it.
_SENSES = {"text": "text", "tokens": "text", "embeddings": "text", "images": "images", "audio": "audio"}

_ALL_LAYERS = Ranges.parse("all", "layers")
_ALL_HEADS = Ranges.parse("all", "heads")

# A store keeps it in 64 bits; nobody waits for so many.
_MOST_ITERATIONS = 10**9

SCOPE_MEANINGS = {
    "head": "one attention head with its value projection only, the paper's single-head map",
    "heads": "all heads side by side, before the output projection",
    "attention": "all heads and the output projection, the paper's multi-head map",
    "residual": "the input plus the attention of the input",
    "block": "attention with its residual connection and normalisation, as the architecture has them",
}
"""What each scope means, in words for a report."""


def derive_seed(**axes: str | int | None) -> int:
    """Derive a seed that depends on the named axes only, so that adding a value to an axis moves no other.

    Parameters
    ----------
    **axes
        The names and values that the seed is for.

    Returns
    -------
    int
        In [0, 2^63): the first eight bytes of the SHA-256 of the sorted axes, halved.

    """
    written = json.dumps(axes, sort_keys=True, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(written.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class InputSpec:
    """Something to measure on, as the user asks for it.

    Attributes
    ----------
    kind
        Of :data:`KINDS`.
    places
        A name or a path; of images several.

    """

    kind: str
    places: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse what no file could make right."""
        if self.kind not in KINDS:
            raise ArgumentError("inputs", expected=f"one of {', '.join(KINDS)}", got=repr(self.kind))
        if not self.places or not all(place.strip() for place in self.places):
            raise ArgumentError(self.kind, expected="a name or a path", got="none")


@dataclass(frozen=True)
class ModelSpec:
    """A model as the user asks for it.

    Attributes
    ----------
    name
        A built-in model, a local folder, a Hub id, or with ``random_init`` a model type.
    random_init
        Build the architecture with untrained weights.
    as_decoder
        Run an encoder as a decoder, with its causal mask.
    layers, heads, lengths
        Of this model; ``None`` for those of the plan.
    part
        The part of the model that is measured; ``None`` for the whole.

    """

    name: str
    random_init: bool = False
    as_decoder: bool = False
    layers: Ranges | None = None
    heads: Ranges | None = None
    lengths: tuple[int, ...] | None = None
    part: str | None = None

    @property
    def label(self) -> str:
        """The name under which results stand; variants of one model never share it."""
        # Not Path.is_dir, which raises for names that no file system takes.
        base = Path(self.name).resolve().name if os.path.isdir(self.name) else self.name  # noqa: PTH112
        variants = [
            words
            for on, words in (
                (self.part, str(self.part)),
                (self.random_init, "random init"),
                (self.as_decoder, "as decoder"),
            )
            if on
        ]
        return encodable(f"{base} ({', '.join(variants)})" if variants else base)


@dataclass(frozen=True)
class Identity:
    """What every measurement of one store must share for its numbers to be comparable.

    Lengths, samples, layers, heads, scopes, models and texts are not part of it: they may grow.
    """

    seed: int
    dtype: str
    rtol: float
    confidence: float
    max_iterations: int
    method: str = "auto"
    windows: str = DISJOINT
    special_tokens: str = "none"


@dataclass(frozen=True)
class Plan:
    """A study: models × texts × lengths × samples × scopes × layers (× heads).

    Attributes
    ----------
    models
        At least one.
    texts
        Names or paths for :func:`howsmooth.texts.load_text`; at least one, unless there are ``inputs``.
    lengths
        Numbers of tokens, each at least 1. None on images and sound: those of the model that are usual.
    samples
        Sequences a length.
    scopes
        Of :data:`SCOPES`.
    layers, heads
        Selections; ``heads`` only with the scope ``head``.
    rtol, confidence, max_iterations
        For :func:`howsmooth.local_lipschitz`.
    seed
        From which every other seed derives.
    device, dtype
        Where and in what precision (``"float32"`` or ``"float64"``) to compute.
    bounds
        Whether bounds are computed beside the measurements.
    memory
        Bytes that one measurement may use, as for :func:`howsmooth.local_lipschitz`: by default half of what
        is free. It changes no number.
    inputs
        What else to measure on than texts. All that a plan measures on is text to a model (texts, token ids,
        embedded tokens), or all images, or all sound.
    windows
        How sequences are cut: of :data:`howsmooth.study.sequences.SCHEMES`. A store that was made in the
        earlier way keeps to it.

    Raises
    ------
    ArgumentError
        If a value can be refused before any model is loaded.

    """

    models: tuple[ModelSpec, ...]
    texts: tuple[str, ...] = ("python-docs",)
    lengths: tuple[int, ...] = tuple(range(2, 101, 2))
    samples: int = 10
    scopes: tuple[str, ...] = ("attention",)
    layers: Ranges = _ALL_LAYERS
    heads: Ranges = _ALL_HEADS
    rtol: float = 1e-4
    confidence: float = 0.999
    max_iterations: int = 200
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    windows: str = DISJOINT
    bounds: bool = True
    memory: int | None = None
    inputs: tuple[InputSpec, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no model or text could make right."""
        senses = sorted({_SENSES[source.kind] for source in self.sources})
        if len(senses) > 1:
            raise ArgumentError(
                "inputs",
                expected="texts alone, images alone or sound alone",
                got=" and ".join(senses),
                remedy="Measure each by itself, into a folder of its own if the models differ.",
            )
        for argument, values in (
            ("models", [model.label for model in self.models]),
            ("texts", self.sources),
            ("lengths", self.lengths),
            *(("lengths", model.lengths) for model in self.models if model.lengths is not None),
            ("scopes", self.scopes),
        ):
            if not values and argument == "lengths" and senses != ["text"]:
                continue
            if not values:
                raise ArgumentError(argument, expected="at least one", got="none")
            doubled = next((value for value in values if list(values).count(value) > 1), None)
            if isinstance(doubled, InputSpec):
                raise ArgumentError(
                    doubled.kind, expected="each only once", got=f"{', '.join(doubled.places)!r} twice"
                )
            if doubled is not None:
                raise ArgumentError(argument, expected="each only once", got=f"{str(doubled)!r} twice")
        for scope in self.scopes:
            if scope not in SCOPES:
                raise ArgumentError("scope", expected=f"one of {', '.join(SCOPES)}", got=repr(scope))
        for heads in (self.heads, *(model.heads for model in self.models if model.heads is not None)):
            if heads.items and "head" not in self.scopes:
                raise ArgumentError(
                    "heads",
                    expected="heads only together with the scope head",
                    got=f"{heads.text!r} with the scope {', '.join(self.scopes)}",
                    remedy="Add --scope head, or leave --heads out.",
                )
        for lengths in (self.lengths_of(model) for model in self.models):
            if min(lengths, default=1) < 1:
                raise ArgumentError("lengths", expected="numbers of at least 1", got=str(min(lengths)))
        if self.samples < 1:
            raise ArgumentError("samples", expected="at least 1", got=str(self.samples))
        if not 1 <= self.max_iterations <= _MOST_ITERATIONS:
            raise ArgumentError(
                "max-iterations",
                expected=f"a number from 1 to {_MOST_ITERATIONS}",
                got=str(self.max_iterations),
            )
        if not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", expected="an integer from 0 to 2^63 - 1", got=str(self.seed))
        if self.dtype not in ("float32", "float64"):
            raise ArgumentError("dtype", expected="float32 or float64", got=repr(self.dtype))
        check_accuracy(self.rtol, self.confidence, self.dtype)

    @property
    def sources(self) -> tuple[InputSpec, ...]:
        """All to measure on, texts first."""
        return (*(InputSpec("text", (text,)) for text in self.texts), *self.inputs)

    def layers_of(self, model: ModelSpec) -> Ranges:
        """Return the layers of a model."""
        return self.layers if model.layers is None else model.layers

    def heads_of(self, model: ModelSpec) -> Ranges:
        """Return the heads of a model, for the scope ``head``."""
        return self.heads if model.heads is None else model.heads

    def lengths_of(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the lengths that a model is measured at; none for those that it has for images or sound."""
        return self.lengths if model.lengths is None else model.lengths

    @property
    def of_attention(self) -> Plan:
        """The same with the scope ``attention`` alone, that of the quantity which the paper's code means."""
        models = tuple(replace(model, heads=None) for model in self.models)
        return replace(self, models=models, scopes=("attention",), heads=_ALL_HEADS)

    @property
    def identity(self) -> Identity:
        """What a store of this plan must have been made with."""
        return Identity(
            seed=self.seed,
            dtype=self.dtype,
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            windows=self.windows,
        )
