"""Load a model, and return the attention layers or heads on which to compute bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.bounds.norm_layer_outputs import norm_radius
from howsmooth.study.plans import BoundPlan, ModelSpec, Plan
from howsmooth.study.study_preparation import Models, capture_sites, open_sources, place_sequences, subject_of
from howsmooth.words import place_in_words

__all__ = ["AttentionSource", "Target", "TokenBall"]

_USUAL = 64


class TokenBall(NamedTuple):
    """A ball of tokens around zero: its radius, and a phrase that says where the radius comes from."""

    radius: float
    origin: str


@dataclass(frozen=True, eq=False)
class Target:
    """An attention layer or head to bound, with its input tokens and the norm layer before it."""

    layer: int
    head: int | None  #: None for an attention with all heads.
    scope: str
    masking: str  #: The name of the mask.
    attention: SelfAttention
    norm: LayerNorm | RMSNorm | None  #: The norm layer whose outputs are the tokens, if there is one.
    x: Tensor  #: The tokens (n, d) that the attention receives when the model reads the text.

    @property
    def place(self) -> str:
        """The layer and the head in words, such as "layer 3, head 1"."""
        return place_in_words(self.layer, self.head)

    def ball(self, radius: float | str) -> TokenBall:
        """Return the ball of tokens around zero for which to bound the attention. For the radius ``"auto"``,
        the norm layer before the attention determines the radius, or without such a layer the longest token.
        """
        if not isinstance(radius, str):
            return TokenBall(float(radius), "given")
        if self.norm is not None:
            return TokenBall(norm_radius(self.norm), f"the {type(self.norm).__name__} before the attention")
        return TokenBall(largest_norm(self.x), f"the longest of {self.x.shape[0]} tokens")


def largest_norm(x: Tensor) -> float:
    """Return the largest Euclidean norm of a token in x, of shape (n, d)."""
    return float(torch.linalg.vector_norm(x.double(), dim=-1).max())


class AttentionSource:
    """The attention layers of a model, each with the tokens that it receives when the model reads a text.

    For each length there is one sequence, the one that ``howsmooth measure`` takes for this length and one
    sample. ``usual_length`` is the default length: 64, or less if the model or the text is shorter.
    """

    def __init__(self, plan: BoundPlan) -> None:
        spec = ModelSpec(plan.source, random_init=plan.random_init, part=plan.part)
        self._plan = Plan(
            models=(spec,),
            samples=1,
            scopes=(plan.scope,),
            **{name: getattr(plan, name) for name in ("layers", "heads", "seed", "special_tokens")},
            **{"texts" if kind == "text" else kind: given for kind, given in plan.inputs.items()},
        )
        (text,) = open_sources(self._plan)
        self._model = Models(self._plan).load(spec, text.content)
        self._subject = subject = subject_of(self._plan, spec, text, self._model)
        self.label, self.text, self.description = subject.model.label, subject.text.name, subject.model.source
        self.fingerprint, most, feed = subject.fingerprint, subject.model.max_length, subject.feed
        if feed.parts is None:  # whole images
            self.usual_length = max(feed.usual)
            return
        tokens = max(length for _, length in feed.parts)
        longest = tokens if most is None else min(tokens, most)
        possible = [n for n in feed.lengths if n <= longest]
        usual = max(1, min(_USUAL, longest))
        self.usual_length = min(possible, key=lambda n: abs(n - usual)) if possible else usual

    def attentions(self, length: int) -> list[Target]:
        """Run the model on ``length`` tokens; return its layers or heads with the tokens they receive."""
        subject = replace(self._subject, lengths=(length,))
        inputs = subject.feed.inputs([place_sequences(self._plan, subject, {})[length, 0]], length)
        sites = capture_sites(self._model, inputs, subject, self._plan.scopes[0], subject.layers, length)
        return [
            Target(s.layer, s.head, s.scope, s.masking, s.map, s.norm, s.x[0].detach().cpu()) for s in sites
        ]
