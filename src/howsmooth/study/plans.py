"""Define plans, which say what to measure or bound, as dataclasses of options.

The fields of a plan are its arguments in Python, its keys in a plan file and its options on the command line
(:mod:`howsmooth.study.options`). A plan does not say how it is carried out; an
:class:`~howsmooth.study.execution_options.Execution` does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.errors import ArgumentError, TextError
from howsmooth.model_folders import BUILTIN_MODELS
from howsmooth.scopes import CROSS_SCOPE
from howsmooth.study.options import (
    HOW,
    LATER,
    Integer,
    Real,
    Selection,
    Told,
    Word,
    Words,
    listed,
    once,
    options,
    renamed,
    shown,
    some_of,
    token_counts,
    word,
)
from howsmooth.study.ranges import ALL, Ranges
from howsmooth.words import counted, encodable

if TYPE_CHECKING:
    ByteSize = int
    Scope = str
else:
    from pydantic import ByteSize

    Scope = Literal["head", "heads", "attention", "residual", "block", "model", "cross-attention"]

__all__ = [
    "DEFAULT_TEXT", "FEWER", "INFLUENCE_RTOL", "KINDS", "PROFILE_RTOL", "PROFILE_TOKENS", "PUBLISHED_ITEMS",
    "RADIUS_TOKENS", "SPAN", "BoundPlan", "InputPlan", "InputSpec", "ModelSpec", "Plan", "check_output",
    "check_text",
]  # fmt: skip

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

FEWER = "fewer samples, or fewer or shorter lengths"
"""What to give for a text that is too short."""

_DEFAULT_LENGTHS = tuple(range(2, 101, 2))
_USUAL_LAYERS = 12

# SQLite stores seeds and step counts as signed 64-bit integers.
_MOST_SEED = 2**63 - 1
_MOST_ITERATIONS = 10**9
_MOST_SEARCH_STEPS = 1_000_000


# ---- Options that several plans share


def _one_word(value: Any, info: Any) -> str | None:
    if value is None:
        return None
    values = listed(value)
    if len(values) != 1:
        raise ArgumentError(info.field_name, expected="one value", got=", ".join(map(shown, values)))
    return word(values[0], info)


def _whole_size(value: Any) -> Any:
    """Return a size such as "2 GiB" unchanged. Quote any other string, so that pydantic refuses it."""
    return value if not isinstance(value, str) or re.fullmatch(r"\s*[\d.]+\s*\w*\s*", value) else shown(value)


def _span(value: Any, info: Any) -> str | None:
    if value is None:
        return None
    start, colon, end = (part.strip() for part in word(value, info).partition(":"))
    digits = all(re.fullmatch(r"\d{0,9}", part) for part in (start, end))
    if not (colon and digits and int(start or 0) < int(end or 10**9)):
        expected, remedy = "start:end with 0 <= start < end", "Give 0:16, for example."
        raise ArgumentError(info.field_name, expected=expected, got=repr(value), remedy=remedy)
    return f"{start}:{end}"


Source = Annotated[
    Word,
    Told("MODEL", positional=True),
    "A built-in model, a local folder or a Hub id; with --random-init also a model type.",
]
Text = Annotated[
    str | None,
    PlainValidator(_one_word),
    Told("NAME|PATH", several=True),
    "The text that a model reads: a .txt or .csv file, alice, ag_news, or - for standard input. "
    f"Default: {DEFAULT_TEXT}.",
]
Texts = Annotated[
    Words,
    Told("NAME|PATH", flag="text", several=True),
    "A text: a .txt file, a .csv file in AG_NEWS format, alice, ag_news, or - (standard input). May be "
    f"repeated. Default: {DEFAULT_TEXT}.",
]
Images = Annotated[
    Words,
    Told("builtin|PATH", several=True),
    "Images instead of a text: a file, a folder, or builtin (generated). May be repeated. The length of "
    "an image is the number of its patches and of the tokens that the model adds, such as a class token.",
]
Tokens = Annotated[
    Words,
    Told("FILE", several=True),
    "Token ids instead of a text: a .npy file of an integer array (tokens) or (sequences, tokens).",
]
Embeddings = Annotated[
    Words,
    Told("FILE", several=True),
    "Embedded tokens instead of a text: a .npy file of an array (n, d) or (sequences, n, d), which "
    "stands for the model's embedding of ids; with --part encoder, what its first layer reads.",
]
Layers = Annotated[
    Selection, "Layers: all, or a list such as 0,6 or 0:4 (with the layer 4) or -1 (the last layer)."
]
Heads = Annotated[Selection, "Heads, in the format of --layers; only with --scope head."]
Lengths = Annotated[
    tuple[int, ...],
    PlainValidator(token_counts()),
    Told("RANGES"),
    "Numbers of tokens: start:stop:step with the stop included, or a list such as 8,16,32. "
    "Default: the even numbers from 2 to 100; for images, some lengths of the model.",
]
Samples = Annotated[
    Integer,
    Field(ge=1),
    "Number of sequences for each length. They are windows of the text that do not overlap.",
]
Output = Annotated[
    Literal["hidden", "logits", "margin"],
    "With the scope model: the last hidden state of all tokens, the logits, or the margin, the largest "
    "logit minus the second largest (of a language model at the last token). The last two need a model "
    "with a head.",
]
SpecialTokens = Annotated[
    bool,
    "Put the tokenizer's special tokens, such as [CLS] or a start token, around each sequence of a text. "
    "They count as tokens.",
]
RandomInit = Annotated[bool, "Build the architecture with untrained weights."]
AsDecoder = Annotated[bool, "Run an encoder as a decoder, with its causal mask."]
Part = Annotated[
    Word | None,
    Told("PART"),
    "One part of a model with several: text, vision, audio, or a module path such as encoder.",
]
Span = Annotated[str | None, PlainValidator(_span), Told("START:END"), SPAN.format(PROFILE_TOKENS)]
Rtol = Annotated[Real, HOW, "Relative width of an interval at convergence."]
Confidence = Annotated[Real, HOW, "Probability that an interval contains what is measured."]
Iterations = Annotated[Integer, Field(ge=1, le=_MOST_ITERATIONS), HOW, "Largest number of Lanczos steps."]
Memory = Annotated[
    Annotated[ByteSize, Field(ge=1), BeforeValidator(_whole_size)] | None,
    Told("SIZE", panel=HOW.panel),
    "Memory that one measurement may use, such as 8GiB. For sequences whose attention probabilities "
    "do not fit, they are recomputed in blocks. The scopes block and model take what they need. Default: "
    "half of the free memory.",
]
Seed = Annotated[Integer, Field(ge=0, le=_MOST_SEED), HOW, "Seed of all random numbers."]
Device = Annotated[Word, HOW, "PyTorch device, such as cpu, cuda or cuda:1."]
Dtype = Annotated[
    Literal["float32", "float64"],
    Told(
        panel=HOW.panel,
        elsewhere=tuple(
            (name, "A model in half precision is measured in float32.")
            for name in ("float16", "bfloat16", "half")
        ),
    ),
    "Floating-point precision.",
]
Bounds = Annotated[
    Literal["auto", "all", "none"],
    HOW,
    "Bounds to compute beside the constants. auto: those that take little time. all: also the sharper ones "
    "that take longer.",
]


def check_output(output: str, scopes: tuple[str, ...]) -> None:
    """Raise ArgumentError if ``output`` is not "hidden" and the scope ``model`` is not measured."""
    if output != "hidden" and "model" not in scopes:
        got = f"{output} with the scope {', '.join(scopes)}"
        raise ArgumentError("output", expected="hidden unless the scope is model", got=got)


def check_text(name: str, content: str, samples: int, lengths: Sequence[int]) -> None:
    """Raise TextError if a text has too few bytes for the sequences. No model or tokenizer is needed."""
    needed = samples * sum(lengths)
    # A token has at least one byte of the text, but for the few characters that a tokenizer spells out.
    if needed > (most := 4 * len(content.encode("utf-8", "replace"))):
        each = f"{lengths[0]} tokens" if len(lengths) == 1 else f"each of {len(lengths)} lengths"
        single = needed == max(lengths)
        raise TextError(
            f"text {name!r} is too short for {counted(samples, 'sequence')} of {each}"
            f"{'' if single else f', {needed} tokens without overlap'}: it has "
            f"{counted(len(content), 'character')}, at most {most} tokens. "
            f"Use {'a smaller length' if single else FEWER}, or a longer text."
        )


def _check_special_tokens(asked: bool, kinds: set[str]) -> None:
    if asked and "text" not in kinds:
        raise ArgumentError("special_tokens", expected="them around a text", got=", ".join(sorted(kinds)))


def _check_heads(heads: Ranges, scopes: tuple[str, ...]) -> None:
    if heads.items and "head" not in scopes:
        expected = "heads only together with the scope head"
        got = f"{heads.text!r} with the scope {', '.join(scopes)}"
        remedy = "Add the scope head, or leave heads out."
        raise ArgumentError("heads", expected=expected, got=got, remedy=remedy)


# ---- Constants


class InputSpec(NamedTuple):
    """An input of a study as the user gave it: its kind, one of :data:`KINDS`, and its name or paths."""

    kind: str
    places: tuple[str, ...]


@options
class ModelSpec:
    """A model of a study as the user gave it, before it is loaded."""

    name: Annotated[Word, "A built-in model, a local folder, or a Hub id."]
    random_init: RandomInit = False
    as_decoder: AsDecoder = False
    layers: Annotated[Layers | None, "The layers of this model."] = None
    heads: Annotated[Heads | None, "The heads of this model."] = None
    lengths: Annotated[Lengths | None, "The numbers of tokens for this model."] = None
    part: Part = None

    @property
    def label(self) -> str:
        """The name of the model in results; it differs between variants of one model."""
        # os.path.isdir returns False for names that are no valid paths; Path.is_dir raises an error.
        base = Path(self.name).resolve().name if os.path.isdir(self.name) else self.name  # noqa: PTH112
        named = {self.part: self.part, "random init": self.random_init, "as decoder": self.as_decoder}
        variants = [str(words) for words, on in named.items() if on]
        return encodable(f"{base} ({', '.join(variants)})" if variants else base)


def _models(value: Any, info: Any) -> tuple[Any, ...]:
    entries = []
    for entry in listed(value):
        if not isinstance(entry, str | os.PathLike | ModelSpec | Mapping):
            raise ArgumentError(
                info.field_name,
                expected="names or tables with a name",
                got=shown(entry),
                remedy="A torch.nn.Module is measured with hs.profile, or hs.capture and hs.local_lipschitz: "
                'see "From Python" on the page "See how constants grow with the length".'
                if callable(entry)
                else "",
            )
        entries.append(entry if isinstance(entry, ModelSpec | Mapping) else {"name": entry})
    return tuple(entries)


@options
class Plan:
    """The plan of a study: which constants to measure, of which models and on which inputs.

    Constants are measured at all combinations of models, texts, lengths, samples, scopes and layers, and also
    of heads for the scope ``head``.

    Selections are strings as on the command line, such as ``layers="0,-1"`` or ``lengths="2:100:2"``, or
    lists.

    An entry of ``models`` is a name, a table or a :class:`ModelSpec`. Names and tables inherit
    ``random_init``, ``as_decoder`` and ``part`` from the plan; a :class:`ModelSpec` does not. The inputs of a
    plan are either all text input (texts, token ids, embedded tokens) or all images.
    """

    models: Annotated[
        tuple[ModelSpec, ...],
        PlainValidator(_models),
        Told("MODEL", positional=True, several=True),
        "A built-in model, a local folder, or a Hub id; several are measured into one store. "
        "Default: " + " ".join(BUILTIN_MODELS) + ".",
    ] = LATER
    texts: Texts = LATER
    lengths: Lengths = LATER
    samples: Samples = 10
    special_tokens: SpecialTokens = False
    images: Images = ()
    tokens: Tokens = ()
    embeddings: Embeddings = ()
    scopes: Annotated[
        tuple[Scope, ...],
        BeforeValidator(listed),
        AfterValidator(once),
        Told("SCOPE", flag="scope", several=True),
        "The map to measure. head: one head without output projection; heads: all heads without output "
        "projection; attention: all heads with output projection; residual: input plus attention; "
        "block: residual with the norm layer; model: the whole model from its embeddings, one constant "
        "for all layers; cross-attention: attention to another sequence, the memory. May be repeated.",
    ] = ("attention",)
    output: Output = "hidden"
    side: Annotated[
        Literal["queries", "memory", "joint"] | None,
        "With the scope cross-attention, which sequence moves: the tokens of the queries, the memory, or "
        "both (joint, the default). With the scope model of an encoder-decoder: queries, from the "
        "embeddings of its decoder, or memory, from those of its encoder.",
    ] = None
    layers: Layers = ALL
    heads: Heads = ALL
    random_init: RandomInit = False
    as_decoder: AsDecoder = False
    part: Part = None
    as_published: Annotated[
        str,
        PlainValidator(some_of(*PUBLISHED_ITEMS, elsewhere=_PUBLISHED_ELSEWHERE)),
        Told("all|ITEMS"),
        "Also measure what the paper's published code computes, and write it to published.csv. Choose "
        "some of its differences from the corrected constant: output, block, unmasked, dropout, "
        "stopping; or all, for those that apply.",
    ] = ""
    rtol: Rtol = 1e-4
    confidence: Confidence = 0.999
    max_iterations: Iterations = 200
    seed: Seed = 0
    device: Device = "cpu"
    dtype: Dtype = "float32"
    bounds: Bounds = "auto"
    memory: Memory = None

    def __post_init__(self) -> None:
        others = self.tokens or self.embeddings or self.images
        if self.models is None:
            if others:
                expected = "the name of a model together with images, token ids or embeddings"
                remedy = "The default models are measured on texts only."
                raise ArgumentError("models", expected=expected, got="none", remedy=remedy)
            self._set(models=tuple({"name": name} for name in BUILTIN_MODELS))
        if self.texts is None:
            self._set(texts=() if others else (DEFAULT_TEXT,))
        if self.lengths is None:
            self._set(lengths=() if self._senses() <= {"images"} else _DEFAULT_LENGTHS)
        self._set(models=tuple(self._model(entry) for entry in self.models))
        self._check_inputs()
        self._check_models()
        _check_special_tokens(self.special_tokens, {source.kind for source in self.sources})
        _check_heads(self.heads, self.scopes)
        check_output(self.output, self.scopes)
        if self.side is not None and not {"model", CROSS_SCOPE} & {*self.scopes}:
            expected = f"no side unless the scope is {CROSS_SCOPE} or model"
            got = f"{self.side} with the scope {', '.join(self.scopes)}"
            raise ArgumentError("side", expected=expected, got=got)
        check_accuracy(self.rtol, self.confidence, self.dtype)
        if self.as_published and "attention" not in self.scopes:
            expected = "the scope attention among the scopes, with which published values are compared"
            raise ArgumentError("as_published", expected=expected, got=", ".join(self.scopes))

    def _model(self, entry: ModelSpec | Mapping[str, Any]) -> ModelSpec:
        if isinstance(entry, ModelSpec):
            return entry
        usual = {name: getattr(self, name) for name in ("random_init", "as_decoder", "part")}
        with renamed(lambda name: f"models: {name}"):
            return ModelSpec(**(usual | dict(entry)))

    def _set(self, **values: Any) -> None:
        vars(self).update(values)  # a plan is frozen once it is made

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
            if (layers := self.layers_of(model)).items and self.scopes == ("model",):
                expected = "all layers with the scope model, which has one constant for the whole model"
                remedy = "Leave layers out, or choose another scope."
                raise ArgumentError("layers", expected=expected, got=repr(layers.text), remedy=remedy)

    @property
    def sources(self) -> tuple[InputSpec, ...]:
        """The inputs of the study, texts first. All images together are one input; each other file is one."""
        apart = {"text": self.texts, "tokens": self.tokens, "embeddings": self.embeddings}
        single = [InputSpec(kind, (place,)) for kind, places in apart.items() for place in places or ()]
        return (*single, *([InputSpec("images", self.images)] if self.images else []))

    def layers_of(self, model: ModelSpec) -> Ranges:
        """Return the selection of a model's layers to measure: the model's own, or else the plan's."""
        return self.layers if model.layers is None else model.layers

    def heads_of(self, model: ModelSpec) -> Ranges:
        """Return the selection of heads for the scope ``head``: the model's own, or else the plan's."""
        return self.heads if model.heads is None else model.heads

    def lengths_of(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the lengths at which to measure a model; an empty tuple stands for usual ones of images."""
        return self.lengths if model.lengths is None else model.lengths

    @property
    def constants(self) -> int:
        """About how many constants the plan measures. The exact number needs the loaded models."""
        layers = len(self.layers.items) or _USUAL_LAYERS
        sequences = sum(len(self.lengths_of(model)) or 1 for model in self.models) * self.samples
        return sequences * layers * len(self.sources) * len(self.scopes)

    def settings(self) -> dict[str, Any]:
        """Return the settings that all measurements in one store must share."""
        names = ("seed", "dtype", "rtol", "confidence", "max_iterations")
        given = {name: getattr(self, name) for name in names}
        usual = {"output": ("hidden",), "side": (None, "joint"), "special_tokens": (False,)}
        return given | {name: value for name in usual if (value := getattr(self, name)) not in usual[name]}


# ---- One model and one input


@options
class InputPlan:
    """The base class of plans that examine one model on one input."""

    source: Source
    text: Text = None
    tokens: Tokens = ()
    seed: Seed = 0

    def __post_init__(self) -> None:
        given = [f"--{kind}" for kind in self.inputs]
        if len(given) > 1 or any(len(self.inputs.get(kind, ())) > 1 for kind in ("tokens", "embeddings")):
            raise ArgumentError(
                "inputs", expected="one text, file of tokens or images", got=" and ".join(given)
            )
        _check_special_tokens(getattr(self, "special_tokens", False), {self.kind})

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs that the user gave, by kind; empty if the default text is used."""
        return {kind: given for kind in KINDS if (given := getattr(self, kind, None))}

    @property
    def kind(self) -> str:
        """The kind of the input, one of :data:`KINDS`."""
        return next(iter(self.inputs), "text")


def _radius(value: Any, info: Any) -> float | str:
    try:
        found = "auto" if value == "auto" else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if found != "auto" and (isinstance(value, bool) or not 0 < float(found) < math.inf):
        expected = "a finite number > 0, or auto"
        raise ArgumentError(info.field_name, expected=expected, got=shown(value))
    return found


@options
class BoundPlan(InputPlan):
    """A plan for bounds on layers and heads of a model, at some lengths, on a ball of tokens."""

    special_tokens: SpecialTokens = False
    images: Images = ()
    embeddings: Embeddings = ()
    layers: Layers = ALL
    heads: Heads = ALL
    scope: Annotated[
        Literal["head", "heads", "attention"],
        Told(
            "SCOPE",
            elsewhere=((CROSS_SCOPE, "No bound is known for it; howsmooth measure takes this scope."),),
        ),
        "The part of attention. head: one head without output projection; heads: all heads without "
        "output projection; attention: all heads with output projection.",
    ] = "attention"
    lengths: Annotated[
        Lengths,
        "Numbers of tokens: start:stop:step or a list. Default: 64, or fewer if the model or the input "
        "is shorter.",
    ] = ()
    radius: Annotated[
        float | str,
        PlainValidator(_radius),
        Told("R|auto"),
        "Radius of the ball that contains the tokens. auto: the largest norm that the norm layer before "
        "the attention can produce; without a norm layer, the largest norm of the given tokens.",
    ] = "auto"
    search: Annotated[
        bool,
        "Also search the ball for the tokens with the largest constant, by gradient ascent. Takes from "
        "seconds to minutes a table.",
    ] = False
    steps: Annotated[
        Integer,
        Field(ge=1, le=_MOST_SEARCH_STEPS),
        HOW,
        "Steps of the gradient ascent of --search; more take longer and may find more.",
    ] = 30
    random_init: RandomInit = False
    part: Part = None

    def __post_init__(self) -> None:
        _check_heads(self.heads, (self.scope,))
        super().__post_init__()
        if self.steps != BoundPlan.steps and not self.search:
            raise ArgumentError("steps", expected="no steps without --search", got=str(self.steps))
