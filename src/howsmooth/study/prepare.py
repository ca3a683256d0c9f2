"""Everything that can be refused, refused before anything is measured.

Texts are read, models loaded, texts tokenised, layers, heads, lengths and samples held against
what there is, and every model is captured once at the shortest length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from howsmooth.errors import ArgumentError, CaptureError, ModelError, TextError
from howsmooth.study.names import encodable
from howsmooth.study.plan import ModelSpec, Plan, derive_seed
from howsmooth.study.sequences import APART_BY_LENGTH, Sequences, arrange, pick_windows
from howsmooth.study.store import ModelRecord, TextRecord
from howsmooth.study.tools import Model, SiteLike, TextLike, Tools

__all__ = ["Models", "Subject", "capture_sites", "place_sequences", "prepare"]


@dataclass(frozen=True)
class Subject:
    """A model on a text, checked.

    ``layers``, ``heads`` and ``lengths`` are the chosen ones; ``heads`` is used by the scope ``head`` only.
    ``places`` says at which letter of the text each token begins; empty if the tokenizer cannot tell.
    """

    spec: ModelSpec
    model: ModelRecord
    text: TextRecord
    content: str = field(repr=False)
    fingerprint: str
    tokenizer_source: str
    tokens: torch.Tensor = field(repr=False)
    places: torch.Tensor = field(repr=False)
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    lengths: tuple[int, ...]


class Models:
    """Loads models, keeping the last one only: a study may hold more of them than memory does."""

    def __init__(self, plan: Plan, tools: Tools) -> None:
        self._plan = plan
        self._tools = tools
        self._key: tuple[ModelSpec, str | None] | None = None
        self._model: Model | None = None

    def load(self, spec: ModelSpec, content: str) -> Model:
        """Load a model; ``content`` is the text that a missing tokenizer is trained on."""
        key = (spec, content if spec.random_init else None)
        if self._model is None or self._key != key:
            self._model = None  # let go of the old one before the new one needs the memory
            self._model = self._tools.load_model(
                spec.name,
                random_init=spec.random_init,
                as_decoder=spec.as_decoder,
                seed=self._plan.seed,
                device=self._plan.device,
                dtype=getattr(torch, self._plan.dtype),
                tokenizer_text=key[1],
            )
            self._key = key
        return self._model

    def load_for(self, subject: Subject) -> Model:
        """Load the model of a subject, the same as when it was checked.

        Raises
        ------
        ModelError
            If its fingerprint is another one now.

        """
        model = self.load(subject.spec, subject.content)
        if model.fingerprint != subject.fingerprint:
            raise ModelError(
                f"{subject.model.label} changed while it was measured: its weights differ between two loads. "
                "Let its files rest, and run the same command again."
            )
        return model


def prepare(
    plan: Plan,
    tools: Tools,
    models: Models,
    impossible: list[tuple[ModelSpec, str | None, Exception]] | None = None,
) -> list[Subject]:
    """Load and check every model on every text.

    Parameters
    ----------
    plan, tools, models
        What to measure, and with what.
    impossible
        Takes the models, or the texts with a model, that cannot be used, with the reason; what is left is
        returned. By default the first reason is raised.

    Returns
    -------
    list of Subject
        Model by model, text by text within it, in the order of the plan.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        For whatever makes the plan impossible, one sentence each.

    """
    texts = [tools.load_text(name) for name in plan.texts]
    _check_texts(texts)
    subjects: list[Subject] = []
    for spec in plan.models:
        for text in texts:
            reached: str | None = None
            try:
                model = models.load(spec, text.content)
                reached = encodable(text.name)
                subject = _subject(plan, spec, text, model)
                if impossible is not None:
                    _check_tokens(plan, subject)
            except Exception as error:
                if impossible is None:
                    raise
                impossible.append((spec, reached, error))
                if reached is None:
                    break  # a model that cannot be loaded cannot be for another text
            else:
                subjects.append(subject)
    if impossible is None:
        _check(plan, tools, models, subjects)
    return subjects


def _check(plan: Plan, tools: Tools, models: Models, subjects: list[Subject]) -> None:
    """Refuse now what would fail later."""
    seen: set[ModelSpec] = set()
    for subject in subjects:
        _check_tokens(plan, subject)
        if subject.spec not in seen:
            seen.add(subject.spec)
            model = models.load_for(subject)
            shortest = subject.tokens[: min(subject.lengths)].unsqueeze(0)
            for scope in plan.scopes:
                capture_sites(tools, model, shortest, subject, scope, subject.layers)


def capture_sites(
    tools: Tools, model: Model, tokens: torch.Tensor, subject: Subject, scope: str, layers: tuple[int, ...]
) -> list[SiteLike]:
    """Capture the attention layers of one forward pass, in the order of layer and head.

    Parameters
    ----------
    tools, model, subject
        What is captured, and how.
    tokens
        Input ids (batch, n), int64.
    scope
        Of :data:`howsmooth.study.plan.SCOPES`.
    layers
        Which ones.

    Raises
    ------
    CaptureError
        If other layers or heads come back than were asked for.

    """
    by_head = scope == "head"
    sites = tools.capture(
        model, tokens, layers=list(layers), scope=scope, heads=list(subject.heads) if by_head else None
    )
    wanted = [(layer, head) for layer in layers for head in (subject.heads if by_head else (None,))]
    found = sorted(sites, key=lambda site: (site.layer, -1 if site.head is None else site.head))
    if [(site.layer, site.head) for site in found] != wanted:
        raise CaptureError(
            f"{subject.model.label}: capturing the scope {scope!r} of layers {list(layers)} gave "
            f"{[(site.layer, site.head) for site in found]} as (layer, head), so results could not be told "
            "apart."
        )
    return [cast("SiteLike", site) for site in found]


def _check_texts(texts: list[TextLike]) -> None:
    by_name: dict[str, TextLike] = {}
    for text in texts:
        if not text.content.strip():
            raise TextError(f"text {text.name!r} is empty. Give a text with words in it.")
        if text.name in by_name:
            raise ArgumentError(
                "text",
                expected="texts of different names",
                got=f"{text.name!r} twice",
                remedy="Rename one of the files, since results stand under the name.",
            )
        by_name[text.name] = text


def _subject(plan: Plan, spec: ModelSpec, text: TextLike, model: Model) -> Subject:
    label = spec.label
    layers = plan.layers_of(spec).resolve(model.layers, label, "layers")
    heads = plan.heads_of(spec).resolve(model.heads, label, "heads") if "head" in plan.scopes else ()
    lengths = plan.lengths_of(spec)
    if model.max_length is not None and max(lengths) > model.max_length:
        raise ArgumentError(
            "lengths",
            expected=f"at most {model.max_length} tokens, the positions of {label}",
            got=str(max(lengths)),
            remedy="Shorten --lengths.",
        )
    record = ModelRecord(
        label=label,
        name=encodable(spec.name),
        random_init=spec.random_init,
        as_decoder=spec.as_decoder,
        source=model.source,
        layers=model.layers,
        heads=model.heads,
        max_length=model.max_length,
    )
    tokens, places = model.tokenizer.located(text.content)
    return Subject(
        spec=spec,
        model=record,
        text=TextRecord(encodable(text.name), text.digest, text.source, len(text.content)),
        content=text.content,
        fingerprint=model.fingerprint,
        tokenizer_source=model.tokenizer_source,
        tokens=torch.tensor(tokens, dtype=torch.int64),
        places=torch.tensor(places, dtype=torch.int64),
        layers=layers,
        heads=heads,
        lengths=lengths,
    )


def place_sequences(plan: Plan, subject: Subject, held: Sequences) -> dict[tuple[int, int], int]:
    """Place the sequences of a plan on a text.

    Parameters
    ----------
    plan, subject
        What is to be measured.
    held
        The sequences that the store has of this model on this text; they stay where they are.

    Returns
    -------
    dict
        The first token of each (length, sample).

    Raises
    ------
    TextError
        If there is no room left between those that the store has.

    """
    tokens = len(subject.tokens)
    axes: dict[str, str | int] = {
        "seed": plan.seed,
        "text": subject.text.digest,
        "model": subject.fingerprint,
    }
    if plan.windows == APART_BY_LENGTH:
        starts: dict[tuple[int, int], int] = {}
        for n in subject.lengths:
            draw = derive_seed(purpose="windows", n=n, **axes)
            picked = pick_windows(tokens, n, plan.samples, draw)
            starts |= {(n, sample): start for sample, start in enumerate(picked)}
        return starts
    try:
        draw = derive_seed(purpose="sequences", **axes)
        return arrange(tokens, subject.lengths, plan.samples, draw, held)
    except ValueError as error:
        raise TextError(
            f"text {subject.text.name!r} is too short for more: between the sequences that the store has of "
            f"{subject.model.label}, {error}. Use fewer --samples, or fewer or shorter --lengths, or another "
            "--out with a longer text."
        ) from error


def _check_tokens(plan: Plan, subject: Subject) -> None:
    tokens = len(subject.tokens)
    apart_by_length = plan.windows == APART_BY_LENGTH
    sample = max(subject.lengths) if apart_by_length else sum(subject.lengths)
    needed = plan.samples * sample
    if needed > tokens:
        one = apart_by_length or len(subject.lengths) == 1
        of_lengths = f"{sample} tokens" if one else f"each of {len(subject.lengths)} lengths"
        fitting = tokens // sample
        choices = [f"--samples {fitting} or fewer"] if fitting else []
        choices += ["fewer or shorter --lengths", "a longer text"]
        raise TextError(
            f"text {subject.text.name!r} is too short: {plan.samples} sequences of {of_lengths} without "
            f"overlap need {needed} tokens, and it has {tokens} with the tokenizer of {subject.model.label}. "
            f"Use {', or '.join(choices)}."
        )
