"""A model of an experiment at its texts, at the sequences that a study of the same plan would measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pandas as pd
import torch

from howsmooth.attention import SelfAttention
from howsmooth.attention.plain_scores import require_plain_scores
from howsmooth.errors import ArgumentError
from howsmooth.reproduce.experiment import Request
from howsmooth.reproduce.words import made_of
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.prepare import Models, Subject, capture_sites, place_sequences, prepare
from howsmooth.study.ranges import Ranges
from howsmooth.study.sequences import Sequences
from howsmooth.study.tools import Model, SiteLike, Tools

__all__ = ["Setting", "bilinear", "loaded", "setting", "usual_length"]

_USUAL = 64


@dataclass(frozen=True, eq=False)
class Setting:
    """One model at all texts of a request, loaded and checked."""

    plan: Plan
    models: Models
    subjects: list[Subject]
    tools: Tools

    def sequences(
        self, subject: Subject, held: Sequences | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Give the tokens (samples, n) at each length, those that a study of this plan measures."""
        places = place_sequences(self.plan, subject, held or {})
        for n in self.plan.lengths:
            starts = [places[n, sample] for sample in range(self.plan.samples)]
            tokens = subject.feed.inputs(starts, n)
            assert isinstance(tokens, torch.Tensor)  # of a text
            yield n, tokens

    def sites(self, subject: Subject, tokens: torch.Tensor, scope: str = "attention") -> list[SiteLike]:
        """Capture the chosen layers at tokens (samples, n)."""
        model = self.models.load_for(subject)
        inputs = tokens.to(self.plan.device)
        return capture_sites(self.tools, model, inputs, subject, scope, subject.layers)

    def made(self) -> dict[str, str]:
        """Say where the model and the texts come from, for the part of the page that says how it was made."""
        models = pd.DataFrame([asdict(one.model) for one in self.subjects[:1]])
        texts = pd.DataFrame([asdict(one.text) for one in self.subjects])
        inputs = pd.DataFrame(
            [
                {
                    "text": one.text.name,
                    "model": one.model.label,
                    "tokens": one.feed.count,
                    "tokenizer_source": one.tokenizer_source,
                    "fingerprint": one.fingerprint,
                }
                for one in self.subjects
            ]
        )
        plan = self.plan
        lengths = ", ".join(str(n) for n in plan.lengths)
        settings = (
            f"{plan.samples} sequences of each text at n = {lengths}, none overlapping another of the same "
            f"model and text; seed {plan.seed}, {plan.dtype}."
        )
        return dict(made_of(models, texts, inputs)) | {f"Sequences for {plan.models[0].label}": settings}


def setting(
    request: Request,
    spec: ModelSpec,
    tools: Tools,
    *,
    lengths: tuple[int, ...],
    samples: int,
    layers: Ranges,
    scopes: tuple[str, ...] = ("attention",),
) -> Setting:
    """Load a model and the texts, and check everything against them.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model, a text, a length or a layer cannot be had.

    """
    plan = Plan(
        models=(spec,),
        texts=request.texts,
        lengths=lengths,
        samples=samples,
        scopes=scopes,
        layers=layers,
        seed=request.seed,
        device=request.device,
        dtype=request.dtype,
        bounds=False,
    )
    models = Models(plan, tools)
    return Setting(plan, models, prepare(plan, tools, models), tools)


def loaded(request: Request, spec: ModelSpec, tools: Tools) -> Model:
    """Load a model as a study of the first text does, to see what it has."""
    plan = Plan((spec,), request.texts, seed=request.seed, device=request.device, dtype=request.dtype)
    return Models(plan, tools).load(spec, tools.load_text(request.texts[0]).content)


def usual_length(request: Request, spec: ModelSpec, tools: Tools) -> int:
    """Return 64, or the positions of the model if it has fewer: enough tokens to see how long they are."""
    longest = loaded(request, spec, tools).max_length
    return _USUAL if longest is None else min(_USUAL, longest)


def bilinear(site: SiteLike, label: str) -> SelfAttention:
    """Return the attention of a site in float64, if its scores are ⟨A x_i + b, x_j⟩ under a simple mask.

    Raises
    ------
    ArgumentError
        If it has rotary positions or a mask that is not causal: constructed tokens belong to one matrix A,
        and to a mask that does not depend on the length.

    """
    f = site.map
    require_plain_scores(f, "constructed tokens", argument="model")
    if not isinstance(f, SelfAttention) or f.rotary is not None or f.mask is not None or f.window:
        got = "rotary positions" if isinstance(f, SelfAttention) and f.rotary is not None else site.masking
        raise ArgumentError(
            "model",
            expected="models whose scores are ⟨A x_i + b, x_j⟩ with one matrix A, unmasked or causal",
            got=f"{label}, with {got}",
            remedy="Choose another --model for this experiment; howsmooth attack searches such models.",
        )
    return f.to(dtype=torch.float64, device="cpu")
