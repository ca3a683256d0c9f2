"""Read a model and one input, go through the model's layers with a progress bar, and define the base class of
results at one input.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import LoadedModel, load_model
from howsmooth.models.capture import module_of, self_attention_layers
from howsmooth.models.float32_weights import computing_dtype, fingerprint, stored_dtype
from howsmooth.models.identification.layer_identification import VerifiedLayer
from howsmooth.models.inputs.model_inputs import check_ids, check_value, max_length
from howsmooth.models.loading.load import as_it_is_now
from howsmooth.models.loading.tokenizers import Tokenizer
from howsmooth.results.page import parts
from howsmooth.results.result import Result, made_by
from howsmooth.study.plans import PROFILE_TOKENS
from howsmooth.study.records import plain_rows
from howsmooth.texts import Text
from howsmooth.words import counted

__all__ = [
    "GivenInputs", "InputResult", "Inputs", "Layers", "Model", "chosen_words", "given_inputs", "layers_of",
    "loaded_if_named", "shown_progress",
]  # fmt: skip

Model = nn.Module | LoadedModel | str | os.PathLike[str]
"""A model that the user gives: a module, a loaded model, or the name or folder of one."""

Inputs = str | Text | Tensor | Sequence[int] | Mapping[str, Any]
"""An input that the user gives: a text, also with its origin; token ids; a floating-point tensor; a dict."""

Layers = int | str | slice | Sequence[int] | None
"""The layers that the user chooses."""

_LONGEST_PATH = 1024


@contextmanager
def shown_progress(
    on_step: Callable[..., None] | None, total: int, unit: str = "layer"
) -> Iterator[Callable[..., None]]:
    """Yield a function of the numbers of finished and of all steps that shows the progress: ``on_step`` or,
    if it is None, a function that moves a progress bar.
    """
    if on_step is not None:
        yield on_step
        return
    # Neither a terminal nor a notebook: a bar would fill a log with lines.
    hidden = not sys.stderr.isatty() and "ipykernel" not in sys.modules
    with tqdm(total=total or None, unit=unit, leave=False, disable=hidden) as bar:

        def move(done: int, of: int) -> None:
            if of != (bar.total or 0):
                bar.reset(of)  # the bar of a notebook keeps a total that is only assigned
            bar.update(done - bar.n)

        yield move


def loaded_if_named(model: Any, **options: Any) -> Any:
    """Load a model given by its name or folder, in the dtype of its weights; return a module unchanged, and
    a loaded model with the fingerprint of its weights now.
    """
    if isinstance(model, str | os.PathLike):
        return as_it_is_now(load_model(model, dtype=None, **options), changed=False)
    return as_it_is_now(model) if isinstance(model, LoadedModel) else model


def chosen_words(name: str, given: object, words: Sequence[str], remedy: str = "") -> tuple[str, ...]:
    """Return the given words, each once; raise ArgumentError if there are none or one is not allowed."""
    chosen = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not chosen or any(one not in words for one in chosen):
        expected = f"some of {', '.join(words)}"
        raise ArgumentError(name, expected=expected, got=repr(given), remedy=remedy)
    return tuple(dict.fromkeys(chosen))


@dataclass(frozen=True, eq=False)
class GivenInputs:
    """A model, its inputs, the texts of the tokens if they are known, and a description of the inputs."""

    model: nn.Module | LoadedModel
    inputs: Any
    words: list[str] | None
    description: str

    @property
    def module(self) -> nn.Module:
        """The model as a PyTorch module."""
        return module_of(self.model)

    @property
    def computed(self) -> str:
        """The dtype in which the model is computed."""
        return str(computing_dtype(self.module)).removeprefix("torch.")

    def origin(self) -> dict[str, Any]:
        """Return the fields of a result that describe the model and the input."""
        model, module = self.model, self.module
        if isinstance(model, LoadedModel):
            label, source, digest, stored = model.label, model.source, model.fingerprint, model.stored
        else:
            label, source = type(module).__name__, ""
            digest, stored = fingerprint(module), stored_dtype(module)
        return {
            "model": label,
            "source": source,
            "fingerprint": digest,
            "input": self.description,
            "stored": str(stored).removeprefix("torch."),
            "computed": self.computed,
        }


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class InputResult(Result):
    """Base class of results at one input of a model."""

    WHAT: ClassVar[str]  # what is told, as the first words of the page
    ALT: ClassVar[str]  # the picture in words
    LEFT_OUT: ClassVar[str] = "not measured"
    ONE: ClassVar[str] = "one input: "

    #: What was found, row by row.
    table: pd.DataFrame
    #: The name of the model or of its folder, or the name of its class.
    model: str
    #: Where the weights come from; empty for a model that was not loaded by its name.
    source: str
    #: SHA-256 of the model.
    fingerprint: str
    #: The input in words.
    input: str
    #: Number of tokens.
    n: int
    #: The dtype in which the weights are stored.
    stored: str
    #: The dtype in which the model was computed.
    computed: str
    #: The text of each token; empty for inputs without token ids.
    words: tuple[str, ...] = ()
    #: What was left out, with the reasons.
    refused: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"{self.TITLE} of {self.model}"

    @property
    def length(self) -> str:
        """The number of tokens in words, such as "3 tokens"."""
        return counted(self.n, "token")

    @property
    def precision(self) -> str:
        """A phrase that names the dtype of the stored weights and the dtype of the computation."""
        computed = "" if self.stored == self.computed else f", computed in {self.computed}"
        return f"weights in {self.stored}{computed}"

    @property
    def _made_by(self) -> str:
        versions = made_by("torch", "transformers")
        weights = " / ".join(one[:12] for one in self.fingerprint.split(" / "))
        return f"{self.precision}; {versions}; weights {weights}, digest {self.digest}."

    def _in_latex(self) -> tuple[pd.DataFrame, str]:
        return self.table, f"{self.title} at one input of {self.length}"

    def __repr__(self) -> str:
        left_out = (f"  {self.LEFT_OUT}: {reason}" for reason in self.refused)
        return "\n".join([*self._lines(), *left_out])

    def _lines(self) -> Sequence[str]:
        """Return the printed lines, except those on what was left out."""
        raise NotImplementedError

    def _parts(self, images: Mapping[str, str], most: int) -> list[str]:
        said = f"{self.WHAT} at {self.ONE}{self.input}, {self.length}. {self.precision.capitalize()}."
        if hasattr(self, "confidence"):
            said += f" Each interval holds with probability {self.confidence:.4g}."
        refused = (
            parts().words(f"{self.LEFT_OUT.capitalize()}: {reason}", "note") for reason in self.refused
        )
        picture = parts().picture(images[self.NAME], self.ALT)
        return [parts().words(said), *refused, picture, *self._body(images, most)]

    def _body(self, images: Mapping[str, str], most: int) -> list[str]:
        """Return the HTML parts of the page below the picture."""
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """Return the model, the input, what was found and the citation, as a dict for JSON."""
        names = ("model", "source", "fingerprint", "input", "n", "stored", "computed", "citation")
        return {name: getattr(self, name) for name in names} | self._told()

    def _told(self) -> dict[str, Any]:
        """Return the settings and the rows of the table as a dict for JSON."""
        return {"rows": plain_rows(self.table)}


def layers_of(
    given: GivenInputs, layers: Layers, on_layer: Callable[[int, int], None] | None
) -> Iterator[tuple[int, VerifiedLayer | CaptureError]]:
    """Yield the index of each self-attention layer of a model, with the layer or, if it cannot be captured,
    the error. Call ``on_layer`` with the numbers of finished and of all layers; 0 if these are not yet known.
    """
    if layers is None or isinstance(layers, str | slice):
        every = (given.model.layers or 0) if isinstance(given.model, LoadedModel) else 0
        total = len(range(every)[layers if isinstance(layers, slice) else slice(None)])
    else:
        total = len(layers) if isinstance(layers, Sequence) else 1
    done = 0
    with shown_progress(on_layer, total) as told:
        for index, layer in self_attention_layers(given.module, given.inputs, layers):
            told(done, total)
            yield index, layer
            done += 1
        told(done, done)


def given_inputs(
    model: nn.Module | LoadedModel,
    inputs: object,
    span: object,
    tokenizer: Any,
    *,
    special: bool = False,
    longest: int = PROFILE_TOKENS,
) -> GivenInputs:
    """Return the inputs of a model, cut to the tokens of ``span`` or to at most ``longest`` tokens.

    ``special`` says whether the tokenizer adds its special tokens to a text.
    """
    module = module_of(model)
    if tokenizer is None and isinstance(model, LoadedModel):
        tokenizer = model.tokenizer
    own, what = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer), "a text"
    floats = isinstance(inputs, Tensor) and inputs.is_floating_point()
    if isinstance(inputs, Text):
        what, special = inputs.source.removesuffix("."), special or inputs.special_tokens
        inputs = inputs.content
    if isinstance(inputs, str):
        if not inputs.strip():
            raise ArgumentError("inputs", expected="a text with at least one token", got=repr(inputs))
        if _names_a_file(inputs):
            got, remedy = f"the path of a file, {inputs!r}", "Give pathlib.Path(path).read_text()."
            raise ArgumentError("inputs", expected="the text itself", got=got, remedy=remedy)
        ids = torch.tensor(_encoded(tokenizer, inputs, special), dtype=torch.int64)
        what += f", {'with' if special else 'without'} special tokens"
    elif span is not None and (floats or isinstance(inputs, Mapping)):
        expected = f"None beside {'inputs without token ids' if floats else 'a dict of inputs'}"
        raise ArgumentError("span", expected=expected, got=repr(span))
    elif isinstance(inputs, Mapping):
        named = {str(name): value for name, value in inputs.items()}
        for name, value in named.items():
            check_value(name, value)
        found = named.get("input_ids")
        if isinstance(found, Tensor) and found.numel():
            check_ids(module, found)
        words = own.decoded(found[0].tolist()) if isinstance(found, Tensor) and found.shape[0] == 1 else None
        given = (k if isinstance(v, Tensor) else f"{k}={v!r}" for k, v in named.items() if v is not None)
        digest = _digest(*(value for value in named.values() if isinstance(value, Tensor)))
        described = f"inputs {', '.join(given)}, SHA-256 of the numbers {digest}"
        return GivenInputs(model, named, words, described)
    elif isinstance(inputs, Tensor) and floats:  # as the model takes it
        described = f"a tensor {tuple(inputs.shape)}, SHA-256 of the numbers {_digest(inputs)}"
        return GivenInputs(model, inputs, None, described)
    else:
        ids, what = _ids(inputs), "token ids"
        check_ids(module, ids)
    limit = max_length(module) or len(ids)
    first, end = _bounds(span, len(ids), min(longest, limit))
    if end - first > limit:
        expected, got = f"at most {limit} tokens, the model's positions", f"{span!r}, {end - first} tokens"
        remedy = f"Give {first}:{first + limit}, for example."
        raise ArgumentError("span", expected=expected, got=got, remedy=remedy)
    cut = "" if end - first == len(ids) else f"tokens {first} to {end - 1} of {len(ids)}, "
    described = f"{what}, {cut}SHA-256 of the ids {_digest(ids[first:end])}"
    return GivenInputs(model, ids[None, first:end], own.decoded(ids[first:end].tolist()), described)


def _digest(*tensors: Tensor) -> str:
    parts = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors)
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:12]


def _names_a_file(text: str) -> bool:
    try:
        return len(text) < _LONGEST_PATH and Path(text).is_file()
    except (OSError, ValueError):  # too long a name, or a null character
        return False


def _encoded(tokenizer: Any, text: str, special: bool) -> list[int]:
    if tokenizer is None:
        expected = "token ids or a dict of tensors, for a model without a tokenizer"
        remedy = "Give tokenizer=AutoTokenizer.from_pretrained(...), or load the model with hs.load_model."
        raise ArgumentError("inputs", expected=expected, got="a text", remedy=remedy)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text, special=special)
    if callable(tokenizer):
        return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]
    if callable(encode := getattr(tokenizer, "encode", None)) and not isinstance(tokenizer, str):
        found = encode(text)
        if isinstance(found, Sequence | Tensor):
            return [int(i) for i in found]
    expected = "a tokenizer of transformers, or an object with encode(text) and decode(ids)"
    remedy = "Give AutoTokenizer.from_pretrained(...) of transformers."
    raise ArgumentError("tokenizer", expected=expected, got=type(tokenizer).__name__, remedy=remedy)


def _ids(inputs: object) -> Tensor:
    expected = "a text, token ids (n,) or (1, n), or a dict of tensors"
    try:
        ids = torch.as_tensor(inputs)
    except (TypeError, ValueError, RuntimeError):
        got, remedy = type(inputs).__name__, ""
        if isinstance(inputs, Sequence) and any(isinstance(one, str) for one in inputs):
            got, remedy = "a list of texts", "Give one text at a time."
        raise ArgumentError("inputs", expected=expected, got=got, remedy=remedy) from None
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or not ids.numel() or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        empty = isinstance(inputs, list | tuple) and not inputs
        got = "an empty list" if empty else f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ArgumentError("inputs", expected=expected, got=got, remedy="Profile one sequence at a time.")
    return ids.to("cpu", torch.int64)


def _bounds(span: object, length: int, most: int) -> tuple[int, int]:
    expected = f"start:end with 0 <= start < end <= {length}, the number of tokens"
    remedy = f"Give 0:{min(length, most)}, for example."
    if span is None:
        return 0, min(length, most)
    parts: Any = span
    if isinstance(span, str):
        parts = [int(part) if part.strip().isdecimal() else part.strip() or None for part in span.split(":")]
    elif isinstance(span, slice):
        parts = (span.start, span.stop) if span.step in (None, 1) else ()
    known = isinstance(parts, tuple | list) and all(one is None or isinstance(one, int) for one in parts)
    first, end = parts if known and len(parts) == 2 else (-1, -1)
    first, end = first or 0, length if end is None else end
    if not 0 <= first < end <= length:
        raise ArgumentError("span", expected=expected, got=repr(span), remedy=remedy)
    return first, end
