"""Define plans, which say what to measure or bound, as dataclasses of options.

The fields of a plan are its arguments in Python, its keys in a plan file and its options on the command line
(:mod:`howsmooth.study.options`). A plan does not say how it is carried out; an
:class:`~howsmooth.study.execution_options.Execution` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.errors import ArgumentError
from howsmooth.scopes import ATTENTION_SCOPES, CROSS_SCOPE, OUTPUTS, SCOPES, SIDES
from howsmooth.study.options import (
    HOW,
    OUTPUT,
    Kind,
    Options,
    check_keys,
    choice,
    flag,
    number,
    one_of,
    option,
    options_of,
    renamed,
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
from howsmooth.words import encodable

__all__ = [
    "BOUNDS",
    "DEFAULT_TEXT",
    "FIGURES",
    "INFLUENCE_RTOL",
    "KINDS",
    "PROFILE_RTOL",
    "PROFILE_TOKENS",
    "PUBLISHED_ITEMS",
    "RADIUS_TOKENS",
    "SPAN",
    "BoundPlan",
    "InputPlan",
    "InputSpec",
    "ModelSpec",
    "Plan",
    "check_output",
    "shared",
]

BOUNDS = ("auto", "all", "none")
"""Which bounds to compute beside constants: those that take little time, all, or none."""

FIGURES = ("page", "all")
"""Which figures a study draws: one overview of each model, or also one of each layer and head."""

KINDS = ("text", "tokens", "embeddings", "images")
"""The kinds of input: text, token ids, embedded tokens and images."""

DEFAULT_TEXT = "alice"

PROFILE_TOKENS, RADIUS_TOKENS = 512, 32
"""How many tokens of a longer input are taken without a span: time and memory grow with the square."""

SPAN = (
    "Which tokens of a text or of token ids, counted from 0, such as 0:16, which leaves 16 out; the model "
    "reads these alone, without what comes before. Default: all, or the first {} of a longer input, or as "
    "many as the model takes."
)
"""The help of the option ``--span``, with a gap for the number of tokens."""

PROFILE_RTOL, INFLUENCE_RTOL = 1e-3, 1e-2
"""The relative widths of intervals in a profile and an influence, which are coarser than in a study."""

PUBLISHED_ITEMS = {
    "output": "the result is the square root of ‖Jᵀ f(X)‖, with the output f(X) in place of a tangent",
    "block": "the residual connection and the norm layer of a post-norm model count as attention",
    "unmasked": "an encoder run as a decoder is measured without its mask",
    "dropout": "dropout stays on in an untrained model, drawn anew in each product",
    "stopping": "the iteration stops when the square of the constant moves by less than 0.0001, or after 100 "
    "steps",
}
"""The items in which the code published with the paper differs from ‖D_X f‖, each with what it changes."""

_PUBLISHED_ELSEWHERE = {
    "slices": "It changes adversarial tokens; use howsmooth reproduce adversarial --as-published.",
    "c-3": "It changes a bound; use howsmooth reproduce bounds --as-published.",
}

_CROSS_ELSEWHERE = "No bound is known for it; howsmooth measure takes this scope."

_DEFAULT_MODELS = ("builtin-encoder", "builtin-decoder")
_DEFAULT_LENGTHS = tuple(range(2, 101, 2))

# SQLite stores seeds and step counts as signed 64-bit integers.
_MOST_SEED = 2**63 - 1
_MOST_ITERATIONS = 10**9
_MOST_SEARCH_STEPS = 1_000_000


# ---- Options that several plans share


def _parquet(name: str, value: Any) -> bool:
    """Read a flag; if it is true, refuse it where pandas has no engine for parquet."""
    if flag().read(name, value):
        from howsmooth.files import check_parquet  # imports pandas, which takes a while

        check_parquet(name)
    return bool(value)


_SHARED: dict[str, Any] = {
    "source": option(
        ...,
        words(place=True),
        "A built-in model, a local folder or a Hub id; with --random-init also a model type.",
        metavar="MODEL",
        positional=True,
    ),
    "text": option(
        DEFAULT_TEXT,
        words(place=True),
        "The text that a model reads: a .txt or .csv file, alice, ag_news, or - for standard input.",
        metavar="NAME|PATH",
    ),
    "images": option(
        (),
        several(words(place=True)),
        "Images instead of a text: a file, a folder, or builtin (generated). May be repeated. The length of "
        "an image is the number of its patches and of the tokens that the model adds, such as a class token.",
        metavar="builtin|PATH",
    ),
    "tokens": option(
        (),
        several(words(place=True)),
        "Token ids instead of a text: a .npy file of an integer array (tokens) or (sequences, tokens).",
        metavar="FILE",
    ),
    "embeddings": option(
        (),
        several(words(place=True)),
        "Embedded tokens instead of a text: a .npy file of an array (n, d) or (sequences, n, d), which "
        "stands for the model's embedding of ids; with --part encoder, what its first layer reads.",
        metavar="FILE",
    ),
    "layers": option(
        "all",
        selection(),
        "Layers: all, or a list such as 0,6 or 0:4 (with the layer 4) or -1 (the last layer).",
        metavar="RANGES",
    ),
    "heads": option(
        "all", selection(), "Heads, in the format of --layers; only with --scope head.", metavar="RANGES"
    ),
    "scope": option(
        "attention",
        choice(*ATTENTION_SCOPES, elsewhere={CROSS_SCOPE: _CROSS_ELSEWHERE}),
        "The part of attention. head: one head without output projection; heads: all heads without output "
        "projection; attention: all heads with output projection.",
        metavar="SCOPE",
    ),
    "output": option(
        "hidden",
        choice(*OUTPUTS),
        "With the scope model: the last hidden state of all tokens, the logits, or the margin, the largest "
        "logit minus the second largest (of a language model at the last token). The last two need a model "
        "with a head.",
        metavar="|".join(OUTPUTS),
    ),
    "special_tokens": option(
        False,
        flag(),
        "Put the tokenizer's special tokens, such as [CLS] or a start token, around each sequence of a text. "
        "They count as tokens.",
    ),
    "random_init": option(False, flag(), "Build the architecture with untrained weights."),
    "as_decoder": option(False, flag(), "Run an encoder as a decoder, with its causal mask."),
    "part": option(
        None,
        words(),
        "One part of a model with several: text, vision, audio, or a module path such as encoder.",
        metavar="PART",
    ),
    "span": option(
        None,
        words(),
        SPAN.format(PROFILE_TOKENS),
        metavar="START:END",
    ),
    "rtol": option(1e-4, number(), "Relative width of an interval at convergence.", panel=HOW),
    "confidence": option(
        0.999, number(), "Probability that an interval contains what is measured.", panel=HOW
    ),
    "max_iterations": option(200, whole(1, _MOST_ITERATIONS), "Largest number of Lanczos steps.", panel=HOW),
    "memory": option(
        None,
        size(),
        "Memory that one measurement may use, such as 8GiB. For sequences whose attention probabilities "
        "do not fit, they are recomputed in blocks. The scopes block and model take what they need. Default: "
        "half of the free memory.",
        metavar="SIZE",
        panel=HOW,
    ),
    "seed": option(0, whole(0, _MOST_SEED), "Seed of all random numbers.", panel=HOW),
    "device": option("cpu", words(), "PyTorch device, such as cpu, cuda or cuda:1.", panel=HOW),
    "parquet": option(
        False,
        Kind(bool, _parquet),
        "Also write the tables as parquet, with the line to cite.",
        panel=OUTPUT,
    ),
    "dtype": option(
        "float32",
        choice(
            "float32",
            "float64",
            elsewhere=dict.fromkeys(
                ("float16", "bfloat16", "half"), "A model in half precision is measured in float32."
            ),
        ),
        "Floating-point precision.",
        metavar="float32|float64",
        panel=HOW,
    ),
}


def shared(name: str, **changed: Any) -> Any:
    """Define a field that several plans have, such as ``text``, possibly with changes for one plan.

    ``changed`` has the changed arguments of :func:`howsmooth.study.options.option`.
    """
    usual = _SHARED[name]
    default = ... if usual.default is MISSING else usual.default
    return option(**({"default": default} | vars(usual.metadata["option"]) | changed))


def check_output(output: str, scopes: tuple[str, ...]) -> None:
    """Raise ArgumentError if the plan has an ``output`` other than "hidden" without the scope ``model``."""
    if output != "hidden" and "model" not in scopes:
        got = f"{output} with the scope {', '.join(scopes)}"
        raise ArgumentError("output", expected="hidden unless the scope is model", got=got)


def _check_special_tokens(asked: bool, kinds: set[str]) -> None:
    if asked and "text" not in kinds:
        raise ArgumentError("special_tokens", expected="them around a text", got=", ".join(sorted(kinds)))


def _check_heads(heads: Ranges, scopes: tuple[str, ...]) -> None:
    if heads.items and "head" not in scopes:
        raise ArgumentError(
            "heads",
            expected="heads only together with the scope head",
            got=f"{heads.text!r} with the scope {', '.join(scopes)}",
            remedy="Add the scope head, or leave heads out.",
        )


def _check_layers(layers: Ranges, scopes: tuple[str, ...]) -> None:
    if layers.items and scopes == ("model",):
        raise ArgumentError(
            "layers",
            expected="all layers with the scope model, which has one constant for the whole model",
            got=f"{layers.text!r}",
            remedy="Leave layers out, or choose another scope.",
        )


# ---- Constants


class InputSpec(NamedTuple):
    """An input of a study as the user gave it: the kind of data, one of :data:`KINDS`, and the name or path.

    Images can have several paths.
    """

    kind: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class ModelSpec(Options):
    """A model of a study as the user gave it, before it is loaded."""

    name: str = option(..., words(place=True), "A built-in model, a local folder, or a Hub id.")
    random_init: bool = shared("random_init")
    as_decoder: bool = shared("as_decoder")
    layers: Ranges | None = shared("layers", default=None)
    heads: Ranges | None = shared("heads", default=None)
    lengths: tuple[int, ...] | None = option(None, token_counts(), "Numbers of tokens.")
    part: str | None = shared("part")

    @property
    def label(self) -> str:
        """The name of the model in results; it differs between variants of one model."""
        # os.path.isdir returns False for names that are no valid paths; Path.is_dir raises an error.
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
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(
            name,
            expected="names or tables with a name",
            got=shown(value),
            remedy="A torch.nn.Module is measured with hs.profile, or hs.capture and hs.local_lipschitz: "
            'see "A module of your own" in the guide "Measure a model".'
            if callable(value)
            else "",
        )
    return {"name": value}


@dataclass(frozen=True)
class Plan(Options):
    """The plan of a study: which constants to measure, of which models and on which inputs.

    Constants are measured at all combinations of models, texts, lengths, samples, scopes and layers, and also
    of heads for the scope ``head``.

    Selections are strings as on the command line, such as ``layers="0,-1"`` or ``lengths="2:100:2"``, or
    lists.

    An entry of ``models`` is a name, a table or a :class:`ModelSpec`. Names and tables inherit
    ``random_init``, ``as_decoder`` and ``part`` from the plan; a :class:`ModelSpec` does not. The inputs of a
    plan are either all text input (texts, token ids, embedded tokens) or all images.
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
        "A text: a .txt file, a .csv file in AG_NEWS format, alice, ag_news, or - (standard input). May be "
        "repeated. "
        f"Default: {DEFAULT_TEXT}.",
        metavar="NAME|PATH",
        flag="text",
    )
    lengths: tuple[int, ...] = option(
        None,
        token_counts(),
        "Numbers of tokens: start:stop:step with the stop included, or a list such as 8,16,32. "
        "Default: the even numbers from 2 to 100; for images, some lengths of the model.",
        metavar="RANGES",
    )
    samples: int = option(
        10,
        whole(1),
        "Number of sequences for each length. They are windows of the text that do not overlap.",
    )
    special_tokens: bool = shared("special_tokens")
    images: tuple[str, ...] = shared("images")
    tokens: tuple[str, ...] = shared("tokens")
    embeddings: tuple[str, ...] = shared("embeddings")
    scopes: tuple[str, ...] = option(
        ("attention",),
        several(choice(*SCOPES, "model", CROSS_SCOPE)),
        "The map to measure. head: one head without output projection; heads: all heads without output "
        "projection; attention: all heads with output projection; residual: input plus attention; "
        "block: residual with the norm layer; model: the whole model from its embeddings, one constant for "
        "all layers; cross-attention: attention to another sequence, the memory. May be repeated.",
        metavar="SCOPE",
        flag="scope",
    )
    output: str = shared("output")
    side: str | None = option(
        None,
        choice(*SIDES),
        "With the scope cross-attention, which sequence moves: the tokens of the queries, the memory, or "
        "both (joint, the default). With the scope model of an encoder-decoder: queries, from the embeddings "
        "of its decoder, or memory, from those of its encoder.",
        metavar="|".join(SIDES),
    )
    layers: Ranges = shared("layers")
    heads: Ranges = shared("heads")
    random_init: bool = shared("random_init")
    as_decoder: bool = shared("as_decoder")
    part: str | None = shared("part")
    as_published: str = option(
        "",
        some_of(*PUBLISHED_ITEMS, elsewhere=_PUBLISHED_ELSEWHERE),
        "Also measure what the paper's published code computes, and write it to published.csv. Choose some "
        "of its differences from the corrected constant: output, block, unmasked, dropout, stopping; or "
        "all, for those that apply.",
        metavar="all|ITEMS",
    )
    rtol: float = shared("rtol")
    confidence: float = shared("confidence")
    max_iterations: int = shared("max_iterations")
    seed: int = shared("seed")
    device: str = shared("device")
    dtype: str = shared("dtype")
    bounds: str = option(
        "auto",
        choice(*BOUNDS),
        "Bounds to compute beside the constants. auto: those that take little time. all: also the sharper "
        "ones that take longer.",
        metavar="|".join(BOUNDS),
        panel=HOW,
    )
    memory: int | None = shared("memory")

    def check(self) -> None:
        """Choose defaults that depend on other fields, and refuse plans that no model or text can satisfy."""
        others = self.tokens or self.embeddings or self.images
        if self.models is None:
            if others:
                raise ArgumentError(
                    "models",
                    expected="the name of a model together with images, token ids or embeddings",
                    got="none",
                    remedy="The default models are measured on texts only.",
                )
            self._set("models", tuple({"name": name} for name in _DEFAULT_MODELS))
        if self.texts is None:
            self._set("texts", () if others else (DEFAULT_TEXT,))
        if self.lengths is None:
            self._set("lengths", () if self._senses() <= {"images"} else _DEFAULT_LENGTHS)
        self._set("models", tuple(self._model(entry) for entry in self.models))
        self._check_inputs()
        self._check_models()
        _check_special_tokens(self.special_tokens, {source.kind for source in self.sources})
        _check_heads(self.heads, self.scopes)
        check_output(self.output, self.scopes)
        if self.side is not None and not {"model", CROSS_SCOPE} & {*self.scopes}:
            raise ArgumentError(
                "side",
                expected=f"no side unless the scope is {CROSS_SCOPE} or model",
                got=f"{self.side} with the scope {', '.join(self.scopes)}",
            )
        check_accuracy(self.rtol, self.confidence, self.dtype)
        if self.as_published and "attention" not in self.scopes:
            raise ArgumentError(
                "as_published",
                expected="the scope attention among the scopes, with which published values are compared",
                got=", ".join(self.scopes),
            )

    def _model(self, entry: ModelSpec | Mapping[str, Any]) -> ModelSpec:
        if isinstance(entry, ModelSpec):
            return entry
        usual = {name: getattr(self, name) for name in ("random_init", "as_decoder", "part")}
        table = usual | dict(entry)
        with renamed(lambda name: f"models: {name}"):
            check_keys(table, list(options_of(ModelSpec)))
            if "name" not in table:
                raise ArgumentError("name", expected="a name in every table", got="none")
            return ModelSpec(**table)

    def _senses(self) -> set[str]:
        return {"images" if source.kind == "images" else "text" for source in self.sources}

    def _check_inputs(self) -> None:
        if len(senses := sorted(self._senses())) > 1:
            raise ArgumentError(
                "inputs",
                expected="only text input or only images",
                got=" and ".join(senses),
                remedy="Measure each with its own command, into another folder if the models differ. Of a "
                "model that takes both, such as CLIP, choose a part: text or vision.",
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
            _check_layers(self.layers_of(model), self.scopes)

    @property
    def sources(self) -> tuple[InputSpec, ...]:
        """The inputs of the study, texts first.

        All images together are one input. Every other file is one input.
        """
        apart = {
            "text": self.texts,
            "tokens": self.tokens,
            "embeddings": self.embeddings,
        }
        single = [InputSpec(kind, (place,)) for kind, places in apart.items() for place in places or ()]
        return (*single, *([InputSpec("images", self.images)] if self.images else []))

    def layers_of(self, model: ModelSpec) -> Ranges:
        """Return which layers of a model to measure, as the model or else the plan selects them."""
        return self.layers if model.layers is None else model.layers

    def heads_of(self, model: ModelSpec) -> Ranges:
        """Return which heads of a model to measure, as the model or else the plan selects them.

        The selection applies to the scope ``head``, which measures single heads.
        """
        return self.heads if model.heads is None else model.heads

    def lengths_of(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the lengths at which to measure a model.

        An empty result stands for the default lengths of a model of images.
        """
        return self.lengths if model.lengths is None else model.lengths

    def settings(self) -> dict[str, Any]:
        """Return the settings that all measurements of one store must share.

        Lengths, samples, layers, heads, scopes, models and texts are not among them, so they can be added
        later.
        """
        names = ("seed", "dtype", "rtol", "confidence", "max_iterations")
        given = {name: getattr(self, name) for name in names}
        usual = {"output": ("hidden",), "side": (None, "joint"), "special_tokens": (False,)}
        return given | {name: value for name in usual if (value := getattr(self, name)) not in usual[name]}


# ---- One model and one input


@dataclass(frozen=True)
class InputPlan(Options):
    """The base class of plans that examine one model on one input."""

    source: str = shared("source")
    text: str | None = shared(
        "text",
        default=None,
        kind=one_of(words(place=True)),
        help=f"{_SHARED['text'].metadata['option'].help} Default: {DEFAULT_TEXT}.",
    )
    images: tuple[str, ...] = shared("images")
    tokens: tuple[str, ...] = shared("tokens")
    embeddings: tuple[str, ...] = shared("embeddings")
    special_tokens: bool = shared("special_tokens")
    layers: Ranges = shared("layers")
    random_init: bool = shared("random_init")
    as_decoder: bool = shared("as_decoder")
    part: str | None = shared("part")
    seed: int = shared("seed")

    def check(self) -> None:
        """Raise ArgumentError if the plan names more than one input."""
        given = [f"--{kind}" for kind in KINDS if getattr(self, kind)]
        if len(given) > 1 or any(len(getattr(self, kind)) > 1 for kind in ("tokens", "embeddings")):
            raise ArgumentError(
                "inputs", expected="one text, file of tokens or images", got=" and ".join(given)
            )
        _check_special_tokens(self.special_tokens, {self.kind})

    @property
    def kind(self) -> str:
        """The kind of the input, one of :data:`KINDS`."""
        return next((kind for kind in KINDS if getattr(self, kind)), "text")


@dataclass(frozen=True)
class BoundPlan(InputPlan):
    """A plan for bounds: the layers and heads of a model to bound, the lengths, the radius of the ball of
    tokens, and whether to search this ball.
    """

    heads: Ranges = shared("heads")
    scope: str = shared("scope")

    lengths: tuple[int, ...] = option(
        (),
        token_counts(),
        "Numbers of tokens: start:stop:step or a list. Default: 64, or fewer if the model or the input is "
        "shorter.",
        metavar="RANGES",
    )
    radius: float | str = option(
        "auto",
        number(positive=True, among=("auto",)),
        "Radius of the ball that contains the tokens. auto: the largest norm that the norm layer before the "
        "attention can produce; without a norm layer, the largest norm of the given tokens.",
        metavar="R|auto",
    )
    search: bool = option(
        False,
        flag(),
        "Also search the ball for the tokens with the largest constant, by gradient ascent. Takes from "
        "seconds to minutes a table.",
    )
    steps: int = option(
        30,
        whole(1, _MOST_SEARCH_STEPS),
        "Steps of the gradient ascent of --search; more take longer and may find more.",
        panel=HOW,
    )

    def check(self) -> None:
        """Raise ArgumentError if the plan names more than one input, or chooses heads in a scope other than
        ``head``.
        """
        _check_heads(self.heads, (self.scope,))
        super().check()
        if self.steps != BoundPlan.steps and not self.search:
            raise ArgumentError("steps", expected="no steps without --search", got=str(self.steps))

    @property
    def inputs(self) -> dict[str, Any]:
        """The fields of :class:`Plan` that name the inputs, with their values; empty for the default text."""
        given = {kind: getattr(self, kind) for kind in KINDS[1:] if getattr(self, kind)}
        return given if self.text is None else given | {"texts": (self.text,)}
