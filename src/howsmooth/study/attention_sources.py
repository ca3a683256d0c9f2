"""Load attention layers and heads from a model or a parameter file, for bounds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.bounds.norm_layer_outputs import norm_radius
from howsmooth.errors import ArgumentError
from howsmooth.models.attention_parameter_files import ParameterFile, is_parameter_file, read_parameter_file
from howsmooth.study.plans import KINDS, BoundPlan, ModelSpec, Plan
from howsmooth.study.study_preparation import (
    Models,
    capture_sites,
    open_sources,
    place_sequences,
    subject_of,
)
from howsmooth.study.text_formatting import encodable, place_in_words

__all__ = ["AttentionSource", "Ball", "FileSource", "ModelSource", "Target", "open_attention_source"]

_USUAL = 64


class Ball(NamedTuple):
    """A ball of tokens around zero: its radius, and a phrase that says where the radius comes from."""

    radius: float
    origin: str


@dataclass(frozen=True, eq=False)
class Target:
    """An attention layer or head to bound, with its input tokens and the norm layer before it.

    Attributes
    ----------
    layer, head
        The indices of the layer and the head. ``head`` is ``None`` for an attention with all heads; ``layer``
        is 0 for a parameter file.
    scope, masking
        The names of the scope and the mask.
    attention
        The attention map.
    norm
        The norm layer whose outputs are the tokens; None if there is none.
    x
        Tokens of shape (n, d): the inputs of the attention when the model reads the text, or the tokens of
        the file; None if there are no tokens.

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
        """A phrase that names the layer and the head of this attention, such as "layer 3, head 1"."""
        return place_in_words(self.layer, self.head)

    def ball(self, radius: float | str) -> Ball:
        """Return the ball of tokens around zero on which to bound the attention.

        A number is the radius itself; the ball may then be too small for the tokens. ``"auto"`` takes the
        radius from the norm layer before the attention, if there is one. Otherwise the radius is the norm of
        the longest token.

        Raises
        ------
        ArgumentError
            If there is neither a norm layer nor tokens to take the radius from.

        """
        if not isinstance(radius, str):
            return Ball(float(radius), "given")
        if self.norm is not None:
            return Ball(norm_radius(self.norm), f"the {type(self.norm).__name__} before the attention")
        if self.x is None:
            raise ArgumentError(
                "radius",
                expected="a number, as no norm layer and no tokens of this length give it",
                got=repr(radius),
                remedy="Give --radius.",
            )
        return Ball(largest_norm(self.x), f"the longest of {self.x.shape[0]} tokens")


def largest_norm(x: Tensor) -> float:
    """Return the largest Euclidean norm of a token in x, of shape (n, d)."""
    return float(torch.linalg.vector_norm(x.double(), dim=-1).max())


class FileSource:
    """The attention of a parameter file: one layer, with all its heads or some of them.

    It has the attributes of :class:`ModelSource`.
    """

    text = ""

    def __init__(self, plan: BoundPlan) -> None:
        for name in (*KINDS, "random_init", "as_decoder", "part"):
            if getattr(plan, name):
                option = f"--{name.replace('_', '-')}"
                raise ArgumentError(
                    "source", expected=f"a model with {option}", got=f"the parameter file {plan.source!r}"
                )
        self._scope = plan.scope
        self._file: ParameterFile = read_parameter_file(plan.source)
        self.label = encodable(Path(plan.source).name)
        f = self._file.attention
        plan.layers.resolve(1, self.label, "layers")
        self._heads = plan.heads.resolve(f.heads, self.label, "heads") if plan.scope == "head" else ()
        self.description = f"parameters of {encodable(str(self._file.path))}: {f.describe()}"
        self.longest = None if self._file.x is None else int(self._file.x.shape[0])
        self.usual_length = self.longest

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 digest of the parameter file."""
        return hashlib.sha256(self._file.path.read_bytes()).hexdigest()

    @property
    def identity(self) -> str:
        """The SHA-256 digest of the parameter file, which holds the tokens too."""
        return self.fingerprint

    def attentions(self, length: int) -> list[Target]:
        """Return the attention with all its heads, or each chosen head by itself, for ``length`` tokens.

        The input tokens are the tokens of the file if it has ``length`` tokens; otherwise there are none.
        """
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


class ModelSource:
    """The attention layers of a model, each with the tokens that it receives when the model reads a text.

    For each length there is one sequence, the one that ``howsmooth measure`` takes for this length and one
    sample. It does not depend on the other lengths, so lengths can be added.

    Attributes
    ----------
    label
        The name of the model in results.
    description
        A description of where the model comes from.
    text
        The name of the text; empty for a parameter file.
    fingerprint
        The SHA-256 of the model, as in :class:`~howsmooth.models.LoadedModel`.
    identity
        The SHA-256 of the model and the text.
    longest
        The largest length for which there are tokens. The positions of the model and the text limit it.
        ``None`` for a parameter file without tokens.
    usual_length
        The default length: 64, or less if the model or the text is shorter. ``None`` if there is no default.

    """

    def __init__(self, plan: BoundPlan) -> None:
        spec = ModelSpec(
            plan.source, random_init=plan.random_init, as_decoder=plan.as_decoder, part=plan.part
        )
        self._plan = Plan(
            models=(spec,),
            samples=1,
            scopes=(plan.scope,),
            layers=plan.layers,
            heads=plan.heads,
            seed=plan.seed,
            **plan.inputs,
        )
        (text,) = open_sources(self._plan)
        self._model = Models(self._plan).load(spec, text.content)
        self._subject = subject_of(self._plan, spec, text, self._model)
        self.label, self.text = self._subject.model.label, self._subject.text.name
        self.description = self._subject.model.source
        both = f"{self._subject.fingerprint} {self._subject.text.digest}"
        self.identity = hashlib.sha256(both.encode()).hexdigest()
        self.fingerprint = self._subject.fingerprint
        most = self._subject.model.max_length
        feed = self._subject.feed
        if feed.parts is None:  # whole images
            self.longest = max(feed.lengths)
            self.usual_length = max(feed.usual)
            return
        tokens = max(length for _, length in feed.parts)
        self.longest = tokens if most is None else min(tokens, most)
        possible = [n for n in feed.lengths if n <= self.longest]
        usual = max(1, min(_USUAL, self.longest))
        self.usual_length = min(possible, key=lambda n: abs(n - usual)) if possible else usual

    def attentions(self, length: int) -> list[Target]:
        """Run the model on ``length`` tokens; return its layers or heads with the tokens they receive.

        The length, the seed, the text and the model determine where in the text the sequence begins.
        """
        subject = replace(self._subject, lengths=(length,))
        inputs = subject.feed.inputs([place_sequences(self._plan, subject, {})[length, 0]], length)
        sites = capture_sites(self._model, inputs, subject, self._plan.scopes[0], subject.layers, length)
        return [
            Target(s.layer, s.head, s.scope, s.masking, s.map, s.norm, s.x[0].detach().cpu()) for s in sites
        ]


AttentionSource = FileSource | ModelSource
"""A model or a parameter file with attentions."""


def open_attention_source(plan: BoundPlan) -> AttentionSource:
    """Open the parameter file or load the model that a plan names; return it as a source of attentions.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the file or model cannot be opened, or has no such layers or heads.

    """
    return FileSource(plan) if is_parameter_file(plan.source) else ModelSource(plan)


def shortened(attention: SelfAttention, length: int) -> SelfAttention:
    """Return the attention for ``length`` tokens: its mask and score bias are cut to the first tokens.

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
