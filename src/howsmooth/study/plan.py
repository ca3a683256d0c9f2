"""What is asked for: constants, bounds and attacks, each a dataclass whose fields are options.

A plan is data. Its fields give the arguments in Python, the keys of a plan file and the options of the
command line, so that each is written once (:mod:`howsmooth.study.options`). How a plan is carried out
is not part of it: that is an :class:`Execution`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from howsmooth.accuracy import check_accuracy
from howsmooth.errors import ArgumentError
from howsmooth.scopes import ATTENTION_SCOPES, SCOPES
from howsmooth.study.names import encodable
from howsmooth.study.options import (
    HOW,
    OUTPUT,
    Kind,
    Options,
    choice,
    flag,
    from_table,
    number,
    option,
    path,
    selection,
    several,
    shown,
    size,
    some_of,
    token_counts,
    whole,
    words,
)
from howsmooth.study.ranges import Ranges

__all__ = [
    "BOUNDS",
    "DEFAULT_TEXT",
    "KINDS",
    "PUBLISHED_ITEMS",
    "AttackPlan",
    "BoundPlan",
    "CertificationPlan",
    "Execution",
    "InputSpec",
    "LocalExecution",
    "ModelSpec",
    "Plan",
    "SourcePlan",
    "as_decoder_option",
    "derive_seed",
    "device_option",
    "dtype_option",
    "layers_option",
    "part_option",
    "random_init_option",
    "seed_option",
    "source_option",
    "text_option",
]

BOUNDS = ("auto", "all", "none")
"""Which bounds are computed beside constants: as far as they take little of the time, all, or none."""

KINDS = ("text", "tokens", "embeddings", "images", "audio")
"""What sequences can come from: a text, token ids, embedded tokens, images or sound."""

DEFAULT_TEXT = "alice"

PUBLISHED_ITEMS = ("output", "block", "unmasked", "dropout", "stopping")
"""Items of the code published with the paper; `howsmooth.paper.published.items` explains each."""

_PUBLISHED_ELSEWHERE = {
    "slices": "It changes adversarial tokens: howsmooth reproduce adversarial --as-published shows it.",
    "c-3": "It changes a bound: howsmooth reproduce bounds --as-published shows it.",
}

_DEFAULT_MODELS = ("builtin-encoder", "builtin-decoder")
_DEFAULT_LENGTHS = tuple(range(2, 101, 2))

# A model is given one of these; the first three are all texts to it.
_SENSES = {"text": "text", "tokens": "text", "embeddings": "text", "images": "images", "audio": "audio"}

# A store keeps seeds and steps in 64 bits; nobody waits for so many steps.
_MOST_SEED = 2**63 - 1
_MOST_ITERATIONS = 10**9
_MOST_ATTACK_STEPS = 1_000_000

# PyTorch takes what fits into an int, and then tries to start them.
_MOST_THREADS = 4096
_MOST_WORKERS = 1024

_MOST_RADII = 100
_MOST_INPUTS = 2**31


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


# ---- options of several plans


def source_option(help: str) -> Any:
    """Make the option of where attention comes from."""
    return option(..., words(place=True), help, metavar="SOURCE", positional=True)


def text_option(panel: str = "") -> Any:
    """Make the option of the text whose tokens a model is given."""
    told = "The text whose tokens a model is given, as for howsmooth measure."
    return option(DEFAULT_TEXT, words(place=True), told, metavar="NAME|PATH", panel=panel)


def layers_option(default: str | None = "all", panel: str = "") -> Any:
    """Make the option of the layers."""
    told = "all, or a list such as 0,6 or 0:4 or -1 (the last)."
    return option(default, selection(), told, metavar="RANGES", panel=panel)


def _heads_option(default: str | None = "all", more: str = "") -> Any:
    return option(default, selection(), f"Like --layers; only with --scope head.{more}", metavar="RANGES")


def _scope_option(default: str) -> Any:
    told = "head: one head, values only; heads: all, before the output projection; attention: with it."
    return option(default, choice(*ATTENTION_SCOPES), told, metavar="SCOPE")


def random_init_option(panel: str = "") -> Any:
    """Make the option of untrained weights."""
    return option(False, flag(), "Build the architecture with untrained weights.", panel=panel)


def as_decoder_option(panel: str = "") -> Any:
    """Make the option of a causal mask for an encoder."""
    return option(False, flag(), "Run an encoder as a decoder, with its causal mask.", panel=panel)


def part_option() -> Any:
    """Make the option of a part of a model."""
    told = "Of a model made of several: text, vision or audio, or the path of a module such as encoder."
    return option(None, words(), told, metavar="PART")


def seed_option(help: str = "From which all randomness derives.") -> Any:
    """Make the option of the seed."""
    return option(0, whole(0, _MOST_SEED), help, panel=HOW)


def device_option() -> Any:
    """Make the option of where to compute."""
    return option("cpu", words(), "Such as cpu, cuda or cuda:1.", panel=HOW)


def dtype_option() -> Any:
    """Make the option of the precision."""
    floats = choice("float32", "float64")
    return option("float32", floats, "Precision.", metavar="float32|float64", panel=HOW)


def _check_heads(heads: Ranges, scopes: tuple[str, ...]) -> None:
    if heads.items and "head" not in scopes:
        raise ArgumentError(
            "heads",
            expected="heads only together with the scope head",
            got=f"{heads.text!r} with the scope {', '.join(scopes)}",
            remedy="Add the scope head, or leave heads out.",
        )


# ---- constants


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


@dataclass(frozen=True)
class ModelSpec(Options):
    """A model as the user asks for it."""

    name: str = option(..., words(place=True), "A built-in model, a local folder, or a Hub id.")
    random_init: bool = random_init_option()
    as_decoder: bool = as_decoder_option()
    layers: Ranges | None = layers_option(None)
    heads: Ranges | None = _heads_option(None)
    lengths: tuple[int, ...] | None = option(None, token_counts(), "Numbers of tokens.")
    part: str | None = part_option()

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


def _model_entry(name: str, value: Any) -> Any:
    if isinstance(value, ModelSpec | Mapping):
        return value
    if not isinstance(value, str):
        raise ArgumentError(name, expected="names or tables with a name", got=shown(value))
    return {"name": value}


@dataclass(frozen=True)
class Plan(Options):
    """A study of constants: models × texts × lengths × samples × scopes × layers (× heads).

    Selections are written as on the command line, ``layers="0,-1"`` or ``lengths="2:100:2"``, or as lists.

    A name or a table of ``models`` has what it does not say from the plan; a :class:`ModelSpec` stands as it
    is. All that a plan measures on is text to a model (texts, token ids, embedded tokens), or all images,
    or all sound.

    """

    models: tuple[ModelSpec, ...] = option(
        None,
        several(Kind(str, _model_entry, place=True), once=False),
        "A built-in model, a local folder, or a Hub id; several are measured into one store. "
        f"Default: {' '.join(_DEFAULT_MODELS)}.",
        metavar="MODEL",
        positional=True,
    )
    texts: tuple[str, ...] = option(
        None,
        several(words(place=True)),
        f"A path (.txt, or AG_NEWS-format .csv), alice or ag_news. May be repeated. Default: {DEFAULT_TEXT}.",
        metavar="NAME|PATH",
        flag="text",
    )
    lengths: tuple[int, ...] = option(
        None,
        token_counts(),
        "Numbers of tokens: start:stop:step with the stop included, or a list such as 8,16,32. "
        "Default: the even numbers from 2 to 100; of images and sound some that the model has.",
        metavar="RANGES",
    )
    samples: int = option(
        10, whole(1), "Sequences a length: windows of the text that do not overlap, without special tokens."
    )
    images: tuple[str, ...] = option(
        (),
        several(words(place=True)),
        "Measure on images: a file, a folder, or builtin (made by code). May be repeated. The "
        "length of an image is the number of its patches.",
        metavar="builtin|PATH",
    )
    audio: tuple[str, ...] = option(
        (),
        several(words(place=True)),
        "Measure on sound: a .wav or .npy file, or builtin (made by code).",
        metavar="builtin|FILE",
    )
    tokens: tuple[str, ...] = option(
        (),
        several(words(place=True)),
        "Measure on token ids: a .npy or .json file, or numbers between spaces, a sequence a line.",
        metavar="FILE",
    )
    embeddings: tuple[str, ...] = option(
        (),
        several(words(place=True)),
        "Measure on tokens that were embedded elsewhere: a .safetensors file of tensors (n, d).",
        metavar="FILE",
    )
    scopes: tuple[str, ...] = option(
        ("attention",),
        several(choice(*SCOPES)),
        "What is called attention. head: one head, values only; heads: all, before the output "
        "projection; attention: with it; residual: input plus attention; block: with the norm too. "
        "May be repeated.",
        metavar="SCOPE",
        flag="scope",
    )
    layers: Ranges = layers_option()
    heads: Ranges = _heads_option()
    random_init: bool = random_init_option()
    as_decoder: bool = as_decoder_option()
    part: str | None = part_option()
    as_published: str = option(
        "",
        some_of(*PUBLISHED_ITEMS, elsewhere=_PUBLISHED_ELSEWHERE),
        "Measure what the paper's published code computes beside the corrected constant, into "
        "published.csv. Items: output, block, unmasked, dropout, stopping; all takes those that apply.",
        metavar="all|ITEMS",
    )
    rtol: float = option(1e-4, number(), "Relative width of the interval to reach.", panel=HOW)
    confidence: float = option(
        0.999, number(), "Probability that the interval holds the constant.", panel=HOW
    )
    max_iterations: int = option(200, whole(1, _MOST_ITERATIONS), "Golub-Kahan steps at most.", panel=HOW)
    seed: int = seed_option()
    device: str = device_option()
    dtype: str = dtype_option()
    bounds: str = option(
        "auto",
        choice(*BOUNDS),
        "Bounds beside the constants. auto: as far as they take at most a fifth of the time of the "
        "measurements.",
        metavar="|".join(BOUNDS),
        panel=HOW,
    )
    memory: int | None = option(
        None,
        size(),
        "Memory that one measurement may use, such as 8GiB. Sequences whose attention probabilities "
        "do not fit are measured without them. Default: half of what is free.",
        metavar="SIZE",
        panel=HOW,
    )

    def check(self) -> None:
        """Choose what was left open, and refuse what no model or text could make right."""
        others = self.tokens or self.embeddings or self.images or self.audio
        if self.models is None:
            self._set("models", self._usual_models(bool(others)))
        if self.texts is None:
            self._set("texts", () if others else (DEFAULT_TEXT,))
        if self.lengths is None:
            self._set("lengths", () if self._senses() <= {"images", "audio"} else _DEFAULT_LENGTHS)
        self._set("models", tuple(self._model(entry) for entry in self.models))
        self._check_inputs()
        self._check_models()
        _check_heads(self.heads, self.scopes)
        check_accuracy(self.rtol, self.confidence, self.dtype)
        if self.as_published and "attention" not in self.scopes:
            raise ArgumentError(
                "as_published",
                expected="the scope attention beside it, that of the corrected quantity",
                got=", ".join(self.scopes),
            )

    def _usual_models(self, others: bool) -> tuple[Mapping[str, Any], ...]:
        if others:
            raise ArgumentError(
                "models",
                expected="the name of a model together with images, sound, token ids or embeddings",
                got="none",
                remedy="The built-in models are measured on texts.",
            )
        return tuple({"name": name} for name in _DEFAULT_MODELS)

    def _model(self, entry: ModelSpec | Mapping[str, Any]) -> ModelSpec:
        if isinstance(entry, ModelSpec):
            return entry
        usual = {name: getattr(self, name) for name in ("random_init", "as_decoder", "part")}
        return from_table(ModelSpec, usual | dict(entry), "models")

    def _senses(self) -> set[str]:
        return {_SENSES[source.kind] for source in self.sources}

    def _check_inputs(self) -> None:
        if len(senses := sorted(self._senses())) > 1:
            raise ArgumentError(
                "inputs",
                expected="texts alone, images alone or sound alone",
                got=" and ".join(senses),
                remedy="Measure each by itself, into a folder of its own if the models differ.",
            )
        needed = {"models": self.models, "texts": self.sources, "scopes": self.scopes}
        if senses == ["text"]:
            needed["lengths"] = self.lengths
        for name, values in needed.items():
            if not values:
                raise ArgumentError(name, expected="at least one", got="none")

    def _check_models(self) -> None:
        labels = [model.label for model in self.models]
        doubled = next((label for label in labels if labels.count(label) > 1), None)
        if doubled is not None:
            raise ArgumentError("models", expected="each only once", got=f"{doubled!r} twice")
        for model in self.models:
            _check_heads(self.heads_of(model), self.scopes)

    @property
    def sources(self) -> tuple[InputSpec, ...]:
        """All to measure on, texts first; all images together are one source, each other file is one."""
        one_each = {
            "text": self.texts,
            "tokens": self.tokens,
            "embeddings": self.embeddings,
            "audio": self.audio,
        }
        single = tuple(
            InputSpec(kind, (place,)) for kind, places in one_each.items() for place in places or ()
        )
        return (*single, InputSpec("images", self.images)) if self.images else single

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
        return replace(self, models=models, scopes=("attention",), heads=Ranges.parse("all", "heads"))

    def settings(self) -> dict[str, Any]:
        """Return what all measurements of one store must have in common for its numbers to be comparable.

        Lengths, samples, layers, heads, scopes, models and texts are not part of it: they may grow.
        """
        names = ("seed", "dtype", "rtol", "confidence", "max_iterations")
        return {name: getattr(self, name) for name in names} | {"method": "auto", "special_tokens": "none"}


# ---- attention of one source: bounds, attacks


@dataclass(frozen=True)
class SourcePlan(Options):
    """Which attentions of one source are asked for."""

    source: str = source_option(
        "A built-in model, a local folder, a Hub id, or a .safetensors or .npz file of parameters."
    )
    text: str = text_option()
    layers: Ranges = layers_option()
    heads: Ranges = _heads_option()
    scope: str = _scope_option("attention")
    random_init: bool = random_init_option()
    as_decoder: bool = as_decoder_option()
    seed: int = seed_option()

    def check(self) -> None:
        """Refuse heads without the scope ``head``."""
        _check_heads(self.heads, (self.scope,))


@dataclass(frozen=True)
class BoundPlan(SourcePlan):
    """Which attentions to bound, at what lengths and in what ball."""

    lengths: tuple[int, ...] = option(
        (),
        token_counts(),
        "Numbers of tokens: start:stop:step or a list. Default: 64, or that of the X of a file.",
        metavar="RANGES",
    )
    radius: float | str = option(
        "auto",
        number(positive=True, among=("auto",)),
        "Of the ball that the tokens lie in. auto: the largest norm that the norm layer before the "
        "attention can give, or else that of the tokens at hand.",
        metavar="R|auto",
    )


@dataclass(frozen=True)
class AttackPlan(SourcePlan):
    """Which attentions to attack, and how hard."""

    PANEL: ClassVar[str] = "What to attack"

    heads: Ranges = _heads_option(None, " Default: 0.")
    scope: str = _scope_option("head")
    lengths: tuple[int, ...] = option(
        "12:392:76",
        # One token alone is always V x.
        token_counts(2),
        "Numbers of tokens, at least 2: start:stop:step or a list.",
        metavar="RANGES",
    )
    radius: float | str = option(
        "auto",
        number(positive=True, among=("auto", "data")),
        "Of the ball in which tokens are sought. auto: the largest norm that the norm layer before "
        "the attention can give, or else as data; data: the norm of the longest token at hand.",
        metavar="R|auto|data",
    )
    steps: int = option(
        30,
        whole(1, _MOST_ATTACK_STEPS),
        "Steps of gradient ascent over whole inputs; three times as many among inputs of few distinct "
        "tokens.",
        panel=HOW,
    )
    restarts: int = option(
        48, whole(0, _MOST_ATTACK_STEPS), "Random restarts among inputs of few distinct tokens.", panel=HOW
    )

    def check(self) -> None:
        """Choose the heads if none were, and refuse what no attention could make right."""
        if self.heads is None:
            self._set("heads", Ranges.parse("0" if self.scope == "head" else "all", "heads"))
        if not self.lengths:
            raise ArgumentError("lengths", expected="at least one", got="none")
        super().check()

    def settings(self) -> dict[str, Any]:
        """Return what all attacks of one store must have in common, apart from the source."""
        return {name: getattr(self, name) for name in ("scope", "radius", "steps", "restarts", "seed")}


# ---- certificates of a saved model


def _distances(name: str, value: Any) -> tuple[float, ...]:
    """Read distances, a list of numbers with commas between them; they come in order, each once."""
    try:
        values = {float(word) for word in value.split(",")}
    except ValueError:
        values = {math.nan}
    if not all(math.isfinite(one) and one >= 0 for one in values) or len(values) > _MOST_RADII:
        raise ArgumentError(
            name,
            expected=f"finite numbers >= 0 with commas between them, at most {_MOST_RADII}",
            got=repr(value[:80]),
        )
    return tuple(sorted(abs(one) for one in values))


@dataclass(frozen=True)
class CertificationPlan(Options):
    """Which saved model to certify, and on what data."""

    PANEL: ClassVar[str] = "What to certify"

    model: Path = option(
        ..., path(), "A file that howsmooth.nn.save wrote.", metavar="MODEL", positional=True
    )
    data: Path | None = option(
        None,
        path(),
        "Inputs, as the model takes them: .npy, .npz or .safetensors. Of several arrays, X are the "
        "inputs and y the labels.",
        metavar="FILE",
    )
    labels: Path | None = option(None, path(), "Their classes, in such a file.", metavar="FILE")
    radii: tuple[float, ...] = option(
        "0.1,0.25,0.5,1",
        Kind(str, _distances),
        "Distances at which to tell the certified accuracy, in the norm of the whole input.",
        metavar="LIST",
    )
    length: int | None = option(
        None,
        whole(1),
        "Number of tokens of an input; of patches, for images. Default: as saved, or of the data.",
        metavar="N",
    )
    radius: float | None = option(
        None, number(positive=True), "Largest norm of a token. Default: as saved.", metavar="R"
    )
    clip: bool = option(
        False,
        flag(),
        "Project tokens beyond the radius on its ball, where they are refused otherwise. The "
        "certificate is then that of the model that does so, for all inputs.",
    )
    batch: int = option(256, whole(1, _MOST_INPUTS), "How many inputs are run at a time.", panel=HOW)


# ---- how a plan is carried out


@dataclass(frozen=True)
class Execution(Options):
    """How a plan is carried out; it changes no number."""

    out: Path = option(
        "howsmooth-out", path(), "Folder for the store, tables, figures and report.", panel=OUTPUT
    )
    executor: str | None = option(
        None,
        choice("processes", "dask"),
        "Measure on workers: processes of this machine, or those of a Dask cluster.",
        metavar="processes|dask",
        panel=HOW,
    )
    workers: int | None = option(
        None, whole(1, _MOST_WORKERS), "How many processes. Default: one a CPU core.", panel=HOW
    )
    scheduler: str | None = option(
        None,
        words(),
        "Of the scheduler of the Dask cluster, such as tcp://10.0.0.1:8786.",
        metavar="ADDRESS",
        panel=HOW,
    )
    threads: int | None = option(
        None,
        whole(1, _MOST_THREADS),
        "CPU threads; with workers, of each. Fewer can be faster on a busy machine. "
        "Default: what PyTorch chooses, or the cores shared out among the workers.",
        panel=HOW,
    )

    def check(self) -> None:
        """Refuse workers or a scheduler without the executor that has them."""
        got = f"the executor {self.executor}" if self.executor else "no executor"
        for name, executor in (("workers", "processes"), ("scheduler", "dask")):
            if getattr(self, name) is not None and self.executor != executor:
                raise ArgumentError(name, expected=f"the executor {executor} beside it", got=got)
        if self.executor == "dask" and self.scheduler is None:
            raise ArgumentError(
                "scheduler",
                expected="the address of a Dask scheduler",
                got="none",
                remedy="Start one with dask scheduler, and workers with dask worker ADDRESS.",
            )


@dataclass(frozen=True)
class LocalExecution(Execution):
    """The same on this machine alone, for work whose workers write into the folder themselves."""

    executor: str | None = option(
        None,
        choice("processes"),
        "Work on processes of this machine, which write the tokens found into its folder.",
        metavar="processes",
        panel=HOW,
    )
