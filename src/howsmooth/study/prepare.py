"""Everything that can be refused, refused before anything is measured.

Texts (or images, sound, token ids, embedded tokens) are read, models loaded, texts tokenised, layers,
heads, lengths and samples held against what there is, and every model is captured once at the shortest
length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from howsmooth.errors import ArgumentError, CaptureError, ModelError, TextError
from howsmooth.study.feeds import Feed, Inputs, Source, feed_of, open_source, place_in
from howsmooth.study.names import encodable
from howsmooth.study.plan import ModelSpec, Plan, derive_seed
from howsmooth.study.sequences import APART_BY_LENGTH, Sequences, pick_windows
from howsmooth.study.store import ModelRecord, TextRecord
from howsmooth.study.tools import Model, SiteLike, Tools

__all__ = ["Models", "Subject", "capture_sites", "counted", "on_device", "place_sequences", "prepare"]


@dataclass(frozen=True)
class Subject:
    """A model on a text, or on what else it takes, checked.

    ``layers``, ``heads`` and ``lengths`` are the chosen ones; ``heads`` is used by the scope ``head`` only.
    ``content`` is the text, and empty for other kinds.
    """

    spec: ModelSpec
    model: ModelRecord
    text: TextRecord
    content: str = field(repr=False)
    fingerprint: str
    tokenizer_source: str
    feed: Feed = field(repr=False)
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
        key = (spec, content if spec.random_init and content else None)
        if self._model is None or self._key != key:
            self._model = None  # let go of the old one before the new one needs the memory
            self._model = self._tools.load_model(
                spec.name,
                random_init=spec.random_init,
                as_decoder=spec.as_decoder,
                part=spec.part,
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
    """Load and check every model on every text, or on what else there is.

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
    sources = [open_source(spec, tools) for spec in plan.sources]
    _check_sources(sources)
    subjects: list[Subject] = []
    for spec in plan.models:
        for source in sources:
            reached: str | None = None
            try:
                model = models.load(spec, source.content)
                reached = encodable(source.name)
                subject = _subject(plan, spec, source, model, tools)
                if impossible is not None:
                    _check_room(plan, subject)
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
        _check_room(plan, subject)
        if subject.spec not in seen:
            seen.add(subject.spec)
            model = models.load_for(subject)
            n = min(subject.lengths)
            shortest = on_device(subject.feed.inputs([0], n), plan.device)
            try:
                for scope in plan.scopes:
                    capture_sites(tools, model, shortest, subject, scope, subject.layers, n)
            except CaptureError as error:
                others = _self_attention(error, tools, model, shortest)
                if not others or plan.layers_of(subject.spec).items:
                    raise
                listed = ",".join(map(str, others))
                raise CaptureError(f"{error} Choose the others with --layers {listed}.") from error


def _self_attention(error: CaptureError, tools: Tools, model: Model, inputs: Inputs) -> list[int]:
    """List the layers of self-attention if a layer was refused as cross-attention."""
    from howsmooth.models.owners import CrossAttention

    if not isinstance(error, CrossAttention):
        return []
    return sorted({site.layer for site in tools.capture(model, inputs)})


def capture_sites(
    tools: Tools,
    model: Model,
    inputs: Inputs,
    subject: Subject,
    scope: str,
    layers: tuple[int, ...],
    n: int | None = None,
) -> list[SiteLike]:
    """Capture the attention layers of one forward pass, in the order of layer and head.

    Parameters
    ----------
    tools, model, subject
        What is captured, and how.
    inputs
        Input ids (batch, n), or what else the model takes.
    scope
        Of :data:`howsmooth.study.plan.SCOPES`.
    layers
        Which ones.
    n
        How many tokens each layer must have been given; None if that is not known.

    Raises
    ------
    CaptureError
        If other layers or heads come back than were asked for, or tokens of another number.

    """
    by_head = scope == "head"
    sites = tools.capture(
        model, inputs, layers=list(layers), scope=scope, heads=list(subject.heads) if by_head else None
    )
    wanted = [(layer, head) for layer in layers for head in (subject.heads if by_head else (None,))]
    found = sorted(sites, key=lambda site: (site.layer, -1 if site.head is None else site.head))
    if [(site.layer, site.head) for site in found] != wanted:
        raise CaptureError(
            f"{subject.model.label}: capturing the scope {scope!r} of layers {list(layers)} gave "
            f"{[(site.layer, site.head) for site in found]} as (layer, head), so results could not be told "
            "apart."
        )
    for site in found:
        there = site.x.shape[-2]
        if n is not None and there != n:
            raise CaptureError(
                f"{subject.model.label}: layer {site.layer} was given {there} tokens where {n} were "
                "expected, so its constant would stand under a wrong length."
            )
    return [cast("SiteLike", site) for site in found]


def on_device(inputs: Inputs, device: str) -> Inputs:
    """Move inputs to a device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    return {name: value.to(device) for name, value in inputs.items()}


def counted(model: Model, label: str) -> tuple[int, int]:
    """Return the numbers of layers and heads of a model.

    Raises
    ------
    CaptureError
        If no attention of it could be seen.

    """
    if model.layers is None or model.heads is None:
        raise CaptureError(f"{label}: {model.obstacle}")
    return model.layers, model.heads


def _check_sources(sources: list[Source]) -> None:
    names: set[str] = set()
    for source in sources:
        if source.kind == "text" and not source.content.strip():
            raise TextError(f"text {source.name!r} is empty. Give a text with words in it.")
        if source.name in names:
            raise ArgumentError(
                source.kind,
                expected=f"{'texts' if source.kind == 'text' else 'files'} of different names",
                got=f"{source.name!r} twice",
                remedy="Rename one of the files, since results stand under the name.",
            )
        names.add(source.name)


def _subject(plan: Plan, spec: ModelSpec, source: Source, model: Model, tools: Tools) -> Subject:
    label = spec.label
    layer_count, head_count = counted(model, label)
    layers = plan.layers_of(spec).resolve(layer_count, label, "layers")
    heads = plan.heads_of(spec).resolve(head_count, label, "heads") if "head" in plan.scopes else ()
    feed = feed_of(source, model, layers, tools)
    lengths = plan.lengths_of(spec) or feed.usual
    missing = next((n for n in lengths if feed.lengths and n not in feed.lengths), None)
    if missing is not None:
        near = sorted(sorted(feed.lengths, key=lambda n: abs(n - missing))[:4])
        raise ArgumentError(
            "lengths",
            expected=f"numbers of tokens that {label} makes of {source.name}"
            + (f", such as {', '.join(map(str, near))}" if len(feed.lengths) > 1 else f": {near[0]}"),
            got=str(missing),
            remedy="Leave --lengths out for the usual ones.",
        )
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
        layers=layer_count,
        heads=head_count,
        max_length=model.max_length,
    )
    return Subject(
        spec=spec,
        model=record,
        text=TextRecord(
            encodable(source.name), source.digest, encodable(source.source), source.size, source.kind
        ),
        content=source.content,
        fingerprint=model.fingerprint,
        tokenizer_source=feed.preparation,
        feed=feed,
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
    axes: dict[str, str | int] = {
        "seed": plan.seed,
        "text": subject.text.digest,
        "model": subject.fingerprint,
    }
    if plan.windows == APART_BY_LENGTH and subject.text.kind == "text":
        starts: dict[tuple[int, int], int] = {}
        for n in subject.lengths:
            draw = derive_seed(purpose="windows", n=n, **axes)
            picked = pick_windows(subject.feed.count, n, plan.samples, draw)
            starts |= {(n, sample): start for sample, start in enumerate(picked)}
        return starts
    try:
        draw = derive_seed(purpose="sequences", **axes)
        return place_in(subject.feed, subject.lengths, plan.samples, draw, held)
    except ValueError as error:
        name = f"{subject.text.kind} {subject.text.name!r}"
        where = f"between the sequences that the store has of {subject.model.label}, " if held else ""
        raise TextError(
            f"{name} is too short{' for more' if held else ''}: {where}{error}. Use fewer --samples, or "
            "fewer or shorter --lengths, or another --out with a longer text."
        ) from error


def _check_room(plan: Plan, subject: Subject) -> None:
    """Refuse more sequences than there is room for, were nothing measured yet."""
    feed, name = subject.feed, f"{subject.text.kind} {subject.text.name!r}"
    if feed.parts is None:
        if plan.samples > feed.count:
            raise TextError(
                f"{name} has {feed.count} for {subject.model.label}, fewer than {plan.samples} samples. Use "
                f"--samples {feed.count} or fewer, or give more."
            )
        return
    tokens = feed.count
    apart_by_length = plan.windows == APART_BY_LENGTH and subject.text.kind == "text"
    lengths = [n + feed.beyond for n in subject.lengths]
    longest = max(size for _, size in feed.parts)
    if len(feed.parts) > 1 and max(lengths) > longest:
        raise TextError(
            f"{name} is too short: its longest sequence has {longest - feed.beyond} tokens, and "
            f"{max(subject.lengths)} are needed. Use shorter --lengths."
        )
    sample = max(lengths) if apart_by_length else sum(lengths)
    needed = plan.samples * sample
    if needed > tokens:
        one = apart_by_length or len(subject.lengths) == 1
        of_lengths = f"{sample} tokens" if one else f"each of {len(subject.lengths)} lengths"
        fitting = tokens // sample
        choices = [f"--samples {fitting} or fewer"] if fitting else []
        is_text = subject.text.kind == "text"
        choices += ["fewer or shorter --lengths", "a longer text" if is_text else "more of it"]
        raise TextError(
            f"{name} is too short: {plan.samples} sequences of {of_lengths} without "
            f"overlap need {needed} tokens, and it has {tokens} "
            f"{'with the tokenizer of' if is_text else 'for'} {subject.model.label}. "
            f"Use {', or '.join(choices)}."
        )
