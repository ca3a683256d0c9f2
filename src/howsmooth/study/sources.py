"""Attentions to bound or to attack: those of a model at a text, or that of a parameter file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.errors import ArgumentError, TextError
from howsmooth.models.parameter_files import ParameterFile, is_parameter_file, read_parameter_file
from howsmooth.study.names import encodable
from howsmooth.study.plan import ModelSpec, derive_seed
from howsmooth.study.prepare import counted
from howsmooth.study.ranges import Ranges
from howsmooth.study.sequences import DISJOINT, arrange, windows_in
from howsmooth.study.tools import Model, TextLike, Tools

__all__ = [
    "SCOPES",
    "FileSource",
    "Found",
    "FoundLayer",
    "ModelSource",
    "Request",
    "Source",
    "open_source",
    "shortened",
]

SCOPES = ("head", "heads", "attention")
"""The scopes that are attention alone: the only ones that the theorems speak of."""

_USUAL = 64


@dataclass(frozen=True)
class Request:
    """Which attentions are asked for.

    Attributes
    ----------
    name
        A model as for ``howsmooth measure``, or a ``.safetensors`` or ``.npz`` file.
    text
        Of the tokens that a model is given; a name or a path for :func:`howsmooth.texts.load_text`.
    layers, heads
        Selections; heads only with the scope ``head``.
    scope
        Of :data:`SCOPES`.
    random_init, as_decoder
        As for :func:`howsmooth.models.load_model`.
    seed
        Of the random weights and of the sequence that is picked.

    """

    name: str
    text: str
    layers: Ranges
    heads: Ranges
    scope: str
    random_init: bool = False
    as_decoder: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no model could make right."""
        if self.scope not in SCOPES:
            raise ArgumentError("scope", expected=f"one of {', '.join(SCOPES)}", got=repr(self.scope))
        if self.heads.items and self.scope != "head":
            raise ArgumentError(
                "heads",
                expected="heads only with the scope head",
                got=f"{self.heads.text!r} with the scope {self.scope}",
                remedy="Add --scope head, or leave --heads out.",
            )
        if not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", expected="an integer from 0 to 2^63 - 1", got=str(self.seed))


@dataclass(frozen=True, eq=False)
class Found:
    """One attention, and what is known of the tokens that it may be given.

    Attributes
    ----------
    layer, head
        Where it stands in its model; layer 0 and ``None`` for a parameter file of several heads.
    scope, masking
        What it is, in words.
    attention
        The map.
    norm
        The norm layer whose outputs its tokens are, if there is one.
    x
        Tokens (n, d) that the model gives it at the text, or those of the file; None if there are none.

    """

    layer: int
    head: int | None
    scope: str
    masking: str
    attention: SelfAttention
    norm: LayerNorm | RMSNorm | None
    x: Tensor | None

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        return f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")


@dataclass(frozen=True, eq=False)
class FoundLayer:
    """What one layer of a model, or a file, adds to its tokens.

    Attributes
    ----------
    layer
        Where it stands.
    layout
        How the model arranges residual and norm, ``pre-norm`` or ``post-norm``; empty for attention alone.
    map
        Attention alone; behind its norm layer for ``pre-norm``; the whole block for ``post-norm``.
    x
        Tokens (n, d) that the model gives the map at the text, or those of the file; None if there are none.

    """

    layer: int
    layout: str
    map: TokenMap
    x: Tensor | None

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        return f"layer {self.layer}"


@runtime_checkable
class Source(Protocol):
    """Where attentions come from."""

    @property
    def label(self) -> str:
        """The name under which results stand."""

    @property
    def description(self) -> str:
        """Where it comes from, in words."""

    @property
    def text(self) -> str:
        """Name of the text that its tokens come from; empty without one."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that the results depend on but the options: weights, tokenizer, text."""

    def attentions(self, length: int) -> list[Found]:
        """List the attentions asked for, at ``length`` tokens."""

    def everywhere(self) -> list[Found]:
        """List all heads of all layers, together layer by layer, at the usual length."""

    @property
    def windows(self) -> str:
        """How sequences are cut from the text, as in a plan; empty without one."""

    @property
    def longest(self) -> int | None:
        """The largest length at which there are tokens; None without any."""

    @property
    def usual_length(self) -> int | None:
        """The length to take if none is asked for; None if one must be asked for."""


def open_source(request: Request, tools: Tools) -> Source:
    """Open a parameter file or load a model.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If it cannot be had, or has no such layers or heads.

    """
    if is_parameter_file(request.name):
        return FileSource(request)
    return ModelSource(request, tools)


class FileSource:
    """The attention of a parameter file: one layer, all its heads or some of them."""

    def __init__(self, request: Request) -> None:
        for option, on in (("--random-init", request.random_init), ("--as-decoder", request.as_decoder)):
            if on:
                raise ArgumentError(
                    "source", expected=f"a model with {option}", got=f"the parameter file {request.name!r}"
                )
        self._request = request
        self._file: ParameterFile = read_parameter_file(request.name)
        f = self._file.attention
        request.layers.resolve(1, self.label, "layers")
        self._heads = request.heads.resolve(f.heads, self.label, "heads") if request.scope == "head" else ()
        self.description = f"parameters of {encodable(str(self._file.path))}: {f.describe()}"
        self.text = ""
        self.windows = ""

    @property
    def label(self) -> str:
        """The name of the file."""
        return encodable(Path(self._request.name).name)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self._file.path.read_bytes()).hexdigest()

    @property
    def longest(self) -> int | None:
        """The length of the file's tokens."""
        return None if self._file.x is None else self._file.x.shape[0]

    @property
    def usual_length(self) -> int | None:
        """The length of the file's tokens."""
        return self.longest

    def attentions(self, length: int) -> list[Found]:
        """List the heads asked for, or the whole; with the file's tokens if they have this length."""
        f, x, scope = self._file.attention, self._file.x, self._request.scope
        if x is not None and x.shape[0] != length:
            x = None
        masking = "mask of the file" if f.mask is not None else "causal" if f.causal else "none"
        if f.window is not None and f.mask is None:
            masking = f"sliding window {f.window}" + (", causal" if f.causal else "")
        parts: list[tuple[int | None, SelfAttention]] = [(None, f)]
        if scope == "heads":
            parts = [(None, f.without_output())]
        elif scope == "head":
            parts = [(h, f.head(h)) for h in self._heads]
        return [Found(0, h, scope, masking, shortened(part, length), None, x) for h, part in parts]

    def everywhere(self) -> list[Found]:
        """List the whole attention of the file."""
        f = self._file.attention
        return [Found(0, None, "attention", "", f, None, self._file.x)]


class ModelSource:
    """The attention layers of a model at sequences of a text.

    Each length has one, the one that ``howsmooth measure`` takes for this length and one sample. It does not
    depend on what other lengths are asked for, so lengths can be added to an attack.
    """

    windows = DISJOINT

    def __init__(self, request: Request, tools: Tools) -> None:
        self._request = request
        self._tools = tools
        self._spec = ModelSpec(request.name, random_init=request.random_init, as_decoder=request.as_decoder)
        text: TextLike = tools.load_text(request.text)
        if not text.content.strip():
            raise TextError(f"text {text.name!r} is empty. Give a text with words in it.")
        self._text = text
        self._model: Model = tools.load_model(
            request.name,
            random_init=request.random_init,
            as_decoder=request.as_decoder,
            seed=request.seed,
            dtype=torch.float32,
            tokenizer_text=text.content if request.random_init else None,
        )
        layers, heads = counted(self._model, self.label)
        self._layers = request.layers.resolve(layers, self.label, "layers")
        by_head = request.scope == "head"
        self._heads = request.heads.resolve(heads, self.label, "heads") if by_head else None
        self._tokens = torch.tensor(self._model.tokenizer(text.content), dtype=torch.int64)

    @property
    def label(self) -> str:
        """The model's name, with its variants."""
        return self._spec.label

    @property
    def description(self) -> str:
        """Where the model comes from."""
        return self._model.source

    @property
    def text(self) -> str:
        """The name of the text."""
        return encodable(self._text.name)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the model's fingerprint and the text's digest."""
        return hashlib.sha256(f"{self._model.fingerprint} {self._text.digest}".encode()).hexdigest()

    @property
    def longest(self) -> int | None:
        """The largest length that the model's positions and the text allow."""
        tokens = len(self._tokens)
        return tokens if self._model.max_length is None else min(tokens, self._model.max_length)

    @property
    def usual_length(self) -> int | None:
        """64, or less if the model or the text is shorter."""
        return max(1, min(_USUAL, self.longest or 1))

    def attentions(self, length: int) -> list[Found]:
        """Run the model on the text and list its attentions with the tokens that they are given."""
        start = self._start(length)
        heads = None if self._heads is None else list(self._heads)
        return self._captured(start, length, list(self._layers), self._request.scope, heads)

    def blocks(self, length: int) -> list[FoundLayer]:
        """Run the model on the text and list its layers with their norms and the tokens that these are given.

        Raises
        ------
        CaptureError
            If a layer is neither pre-norm nor post-norm; the message says what it is.

        """
        sites = self._sites(self._start(length), length, list(self._layers), "block", None)
        return [
            FoundLayer(
                s.layer,
                s.layout,
                s.map.inner if isinstance(s.map, Residual) else s.map,
                s.x[0].detach().cpu(),
            )
            for s in sites
        ]

    def everywhere(self) -> list[Found]:
        """List the attention of every layer at the usual length."""
        usual = self.usual_length or 1
        return self._captured(self._start(usual), usual, None, "attention", None)

    def _start(self, length: int) -> int:
        """Place the sequence: seed, text and model decide where it begins."""
        label, most = self.label, self._model.max_length
        if most is not None and length > most:
            raise ArgumentError(
                "lengths",
                expected=f"at most {most} tokens, the positions of {label}",
                got=str(length),
                remedy="Shorten --lengths.",
            )
        if windows_in(len(self._tokens), length) < 1:
            raise TextError(
                f"text {self._text.name!r} is too short: it has {len(self._tokens)} tokens with the "
                f"tokenizer of {label}, and {length} are needed. Use shorter --lengths, or a longer text."
            )
        draw = derive_seed(
            purpose="sequences",
            seed=self._request.seed,
            text=self._text.digest,
            model=self._model.fingerprint,
        )
        return arrange(len(self._tokens), [length], 1, draw)[length, 0]

    def _captured(
        self, start: int, length: int, layers: list[int] | None, scope: str, heads: list[int] | None
    ) -> list[Found]:
        sites = self._sites(start, length, layers, scope, heads)
        return [
            Found(s.layer, s.head, s.scope, s.masking, s.map, s.norm, s.x[0].detach().cpu()) for s in sites
        ]

    def _sites(
        self, start: int, length: int, layers: list[int] | None, scope: str, heads: list[int] | None
    ) -> Sequence[Any]:
        tokens = self._tokens[start : start + length].unsqueeze(0)
        sites: Sequence[Any] = self._tools.capture(
            self._model, tokens, layers=layers, scope=scope, heads=heads
        )
        return sites


def shortened(attention: SelfAttention, length: int) -> SelfAttention:
    """Return the attention at ``length`` tokens: mask and score bias cut to the first of them.

    Raises
    ------
    ArgumentError
        If its mask, score bias or rotary positions are for fewer tokens.

    """
    mask, bias = attention.mask, attention.score_bias
    longest = max((t.shape[-1] for t in (mask, bias) if t is not None), default=0)
    if longest <= length:
        attention.check_length(length)
        return attention
    return attention._rebuilt(
        mask=None if mask is None else mask[:length, :length],
        score_bias=None if bias is None else bias[:, :length, :length],
    )
