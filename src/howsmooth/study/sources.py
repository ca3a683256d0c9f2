"""Attentions to bound or to attack: those of a model at a text, or that of a parameter file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.bounds.norm_layers import norm_radius
from howsmooth.errors import ArgumentError
from howsmooth.models.parameter_files import ParameterFile, is_parameter_file, read_parameter_file
from howsmooth.study.feeds import Inputs
from howsmooth.study.feeds import open_source as open_text
from howsmooth.study.names import encodable, place_in_words
from howsmooth.study.plan import ModelSpec, Plan, SourcePlan
from howsmooth.study.subjects import (
    Models,
    capture_sites,
    check_fits,
    check_sources,
    place_sequences,
    subject_of,
)

__all__ = ["Ball", "FileSource", "FoundLayer", "ModelSource", "Source", "Target", "open_source", "shortened"]

_USUAL = 64


@dataclass(frozen=True)
class Ball:
    """The ball that tokens lie in: its radius, and in words where that comes from."""

    radius: float
    origin: str


@dataclass(frozen=True, eq=False)
class Target:
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
        return place_in_words(self.layer, self.head)

    def ball(self, radius: float | str) -> Ball:
        """Return the ball of a radius, a number or ``"auto"`` or ``"data"`` as in an attack's plan.

        Raises
        ------
        ArgumentError
            If nothing says how long tokens can be.

        """
        if not isinstance(radius, str):
            return Ball(float(radius), "given")
        if radius == "auto" and self.norm is not None:
            return Ball(norm_radius(self.norm), f"the {type(self.norm).__name__} before the attention")
        if self.x is None:
            raise ArgumentError(
                "radius",
                expected="a number, as neither a norm layer nor tokens say how long tokens can be",
                got=repr(radius),
                remedy="Give --radius.",
            )
        return Ball(longest(self.x), f"the longest of {self.x.shape[0]} tokens")


def longest(x: Tensor) -> float:
    """Return the largest norm of a token of x, (n, d)."""
    return float(torch.linalg.vector_norm(x.double(), dim=-1).max())


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


class FileSource:
    """The attention of a parameter file: one layer, all its heads or some of them.

    Its properties are those of :class:`ModelSource`.
    """

    text = ""

    def __init__(self, request: SourcePlan) -> None:
        for option, on in (("--random-init", request.random_init), ("--as-decoder", request.as_decoder)):
            if on:
                raise ArgumentError(
                    "source", expected=f"a model with {option}", got=f"the parameter file {request.source!r}"
                )
        self._scope = request.scope
        self._file: ParameterFile = read_parameter_file(request.source)
        self.label = encodable(Path(request.source).name)
        f = self._file.attention
        request.layers.resolve(1, self.label, "layers")
        self._heads = request.heads.resolve(f.heads, self.label, "heads") if request.scope == "head" else ()
        self.description = f"parameters of {encodable(str(self._file.path))}: {f.describe()}"
        self.longest = None if self._file.x is None else int(self._file.x.shape[0])
        self.usual_length = self.longest

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self._file.path.read_bytes()).hexdigest()

    def attentions(self, length: int) -> list[Target]:
        """List the heads asked for, or the whole; with the file's tokens if they have this length."""
        f, x = self._file.attention, self._file.x if self.longest == length else None
        masking = "mask of the file" if f.mask is not None else "causal" if f.causal else "none"
        if f.window is not None and f.mask is None:
            masking = f"sliding window {f.window}" + (", causal" if f.causal else "")
        parts: list[tuple[int | None, SelfAttention]] = [(None, f)]
        if self._scope == "heads":
            parts = [(None, f.without_output())]
        elif self._scope == "head":
            parts = [(h, f.head(h)) for h in self._heads]
        return [Target(0, h, self._scope, masking, shortened(part, length), None, x) for h, part in parts]

    def everywhere(self) -> list[Target]:
        """List the whole attention of the file."""
        return [Target(0, None, "attention", "", self._file.attention, None, self._file.x)]


class ModelSource:
    """The attention layers of a model at sequences of a text.

    Each length has one, the one that ``howsmooth measure`` takes for this length and one sample. It does not
    depend on what other lengths are asked for, so lengths can be added to an attack.

    Attributes
    ----------
    label
        The name under which results stand.
    description
        Where the model comes from, in words.
    text
        Name of the text that tokens come from; empty for a parameter file.
    fingerprint
        SHA-256 of all that results depend on but the options: weights, tokenizer, text.
    longest
        The largest length at which there are tokens: what the model's positions and the text allow. ``None``
        for a parameter file without tokens.
    usual_length
        The length to take if none is asked for: 64, or less if the model or the text is shorter. ``None`` if
        one must be asked for.

    """

    def __init__(self, request: SourcePlan) -> None:
        spec = ModelSpec(request.source, random_init=request.random_init, as_decoder=request.as_decoder)
        self._plan = Plan(
            models=(spec,),
            texts=(request.text,),
            samples=1,
            scopes=(request.scope,),
            layers=request.layers,
            heads=request.heads,
            seed=request.seed,
        )
        text = open_text(self._plan.sources[0])
        check_sources([text])
        self._model = Models(self._plan).load(spec, text.content)
        self._subject, self._feed = subject_of(self._plan, spec, text, self._model)
        self.label, self.text = self._subject.model.label, self._subject.text.name
        self.description = self._subject.model.source
        both = f"{self._subject.fingerprint} {self._subject.text.digest}"
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()
        most = self._subject.model.max_length
        self.longest = self._feed.count if most is None else min(self._feed.count, most)
        self.usual_length = max(1, min(_USUAL, self.longest))

    def attentions(self, length: int) -> list[Target]:
        """Run the model on the text and list its attentions with the tokens that they are given."""
        return [_target(site) for site in self._sites(length, self._plan.scopes[0])]

    def blocks(self, length: int) -> list[FoundLayer]:
        """Run the model on the text and list its layers with their norms and the tokens that these are given.

        Raises
        ------
        CaptureError
            If a layer is neither pre-norm nor post-norm; the message says what it is.

        """
        return [
            FoundLayer(
                s.layer,
                s.layout,
                s.map.inner if isinstance(s.map, Residual) else s.map,
                s.x[0].detach().cpu(),
            )
            for s in self._sites(length, "block")
        ]

    def everywhere(self) -> list[Target]:
        """List the attention of every layer at the usual length."""
        from howsmooth.models import capture  # it brings transformers, which takes seconds

        return [_target(site) for site in capture(self._model, self._inputs(self.usual_length))]

    def _sites(self, length: int, scope: str) -> Sequence[Any]:
        inputs = self._inputs(length)
        return capture_sites(self._model, inputs, self._subject, scope, self._subject.layers, length)

    def _inputs(self, length: int) -> Inputs:
        """Place the sequence of a length: seed, text and model decide where it begins."""
        subject = replace(self._subject, lengths=(length,))
        check_fits(self._plan, subject, self._feed)
        start = place_sequences(self._plan, subject, self._feed, {})[length, 0]
        return self._feed.inputs([start], length)


Source = FileSource | ModelSource
"""Where attentions come from."""


def open_source(request: SourcePlan) -> Source:
    """Open a parameter file or load a model.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If it cannot be had, or has no such layers or heads.

    """
    return FileSource(request) if is_parameter_file(request.source) else ModelSource(request)


def shortened(attention: SelfAttention, length: int) -> SelfAttention:
    """Return the attention at ``length`` tokens: mask and score bias cut to the first of them.

    Raises
    ------
    ArgumentError
        If its mask, score bias or rotary positions are for fewer tokens.

    """
    mask, bias = attention.mask, attention.score_bias
    most = max((t.shape[-1] for t in (mask, bias) if t is not None), default=0)
    if most <= length:
        attention.check_length(length)
        return attention
    return attention._rebuilt(
        mask=None if mask is None else mask[:length, :length],
        score_bias=None if bias is None else bias[:, :length, :length],
    )


def _target(site: Any) -> Target:
    return Target(
        site.layer, site.head, site.scope, site.masking, site.map, site.norm, site.x[0].detach().cpu()
    )
