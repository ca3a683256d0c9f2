"""Load the models of a study, check what is to be measured, and capture layers with their inputs.

A plan that cannot be carried out is refused here, before anything is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from howsmooth.errors import ArgumentError, CaptureError, ModelError, StoreError, TextError
from howsmooth.model_folders import check_positions
from howsmooth.scopes import CROSS_SCOPE, layers_of_scope
from howsmooth.seeds import derive_seed
from howsmooth.study.input_sequences import (
    Inputs,
    OpenedInput,
    SequenceData,
    TokenFeed,
    feed_of,
    open_data,
    sequence_starts,
)
from howsmooth.study.plans import FEWER, ModelSpec, Plan, check_text
from howsmooth.study.records import MEASURE, InputRecord, ModelRecord, TextRecord
from howsmooth.study.store import Store
from howsmooth.words import encodable

if TYPE_CHECKING:
    from howsmooth.study.image_sequences import ImageFeed

__all__ = [
    "Impossible", "Models", "PreparedStudy", "Subject", "capture_sites", "layer_and_head_counts",
    "open_sources", "place_sequences", "placed", "prepared_study", "subject_of",
]  # fmt: skip

Impossible = list[tuple[ModelSpec, str | None, Exception]]
"""Models that cannot be used at all (None) or on a text (its name), each with the error."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, an input on which to measure it, and the layers, heads and lengths to measure."""

    spec: ModelSpec
    model: ModelRecord
    text: TextRecord
    #: The text on which the tokenizer of an untrained model is trained; empty for other models.
    content: str = field(repr=False)
    fingerprint: str
    tokenizer_source: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]  #: Used by the scope ``head`` alone.
    lengths: tuple[int, ...]
    feed: TokenFeed | ImageFeed = field(repr=False)
    #: The index of the first token, or of the image, by (length, sample), once the sequences are placed.
    starts: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the input out of the pickled state, since each task carries its own sequences."""
        return vars(self) | {"feed": None, "starts": {}}


class Models:
    """A loader of models that keeps only the last model, since memory may not hold all of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._key: tuple[ModelSpec, str] | None = None
        self._model: Any = None

    def load(self, spec: ModelSpec, content: str) -> Any:
        """Load a model unless it is loaded. The tokenizer of an untrained model is trained on ``content``."""
        from howsmooth.models import load_model  # imports transformers, which takes seconds

        key = (spec, content if spec.random_init else "")
        if self._model is None or self._key != key:
            self._model = None  # free the old model before loading the new one
            plan, given = self._plan, {n: getattr(spec, n) for n in ("random_init", "as_decoder", "part")}
            given |= {"seed": plan.seed, "device": plan.device, "dtype": getattr(torch, plan.dtype)}
            with_head = plan.output != "hidden"
            self._model = load_model(spec.name, **given, tokenizer_text=key[1] or None, head=with_head)
            self._key = key
        return self._model

    @property
    def bytes(self) -> int:
        """The size of the loaded model's parameters in bytes."""
        module = getattr(self._model, "model", None)
        return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())

    def load_for(self, subject: Subject) -> Any:
        """Load a model that was checked before; raise ModelError if its fingerprint has changed since."""
        model = self.load(subject.spec, subject.content)
        if model.fingerprint != subject.fingerprint:
            raise ModelError(
                f"{subject.model.label} changed during the study: its weights differ between two loads. "
                "Do not change its files while it is measured, and run the same command again."
            )
        return model


class PreparedStudy:
    """A study that was checked and is ready to run: its plan, its store, its models and its subjects.

    All models are loaded; layers, heads and lengths are checked on all inputs, and the sequences placed.
    Models and inputs in the store must be the same, and stored sequences keep their places. With
    ``keep_going``, models and inputs that cannot be used are left out and listed in ``impossible``, and work
    goes on after failures; otherwise the first error is raised.
    """

    def __init__(
        self, plan: Plan, store: Store, models: Models | None = None, *, keep_going: bool = False
    ) -> None:
        self.plan, self.store, self.keep_going = plan, store, keep_going
        self.models = models or Models(plan)
        self.impossible = Impossible()
        store.check(MEASURE, plan.settings())
        sources = open_sources(plan)
        self.subjects = [one for spec in plan.models for one in self._subjects(spec, sources)]
        if not self.subjects:
            raise self.impossible[0][2]

    def begin(self) -> None:
        """Create the study's store if needed, and record all models and texts there."""
        self.store.begin(MEASURE, self.plan.settings())
        with self.store.transaction():
            for one in self.subjects:
                where = (one.model.label, one.text.name, one.fingerprint, one.tokenizer_source)
                self.store.add([one.model, one.text, InputRecord(*where, one.feed.count)])

    def _subjects(self, spec: ModelSpec, sources: Sequence[OpenedInput]) -> Iterator[Subject]:
        for source in sources:
            reached: str | None = source.record.name
            try:
                if source.record.kind == "text":
                    check_text(
                        source.record.name, source.content, self.plan.samples, self.plan.lengths_of(spec)
                    )
                reached = None
                model = self.models.load(spec, source.content)
                reached = source.record.name
                subject = subject_of(self.plan, spec, source, model)
                self._check_unchanged(subject)
                held = self.store.sequences(subject.model.label, subject.text.name)
                subject = replace(subject, starts=place_sequences(self.plan, subject, held))
            except StoreError:
                raise
            except Exception as error:
                if not self.keep_going:
                    raise
                self.impossible.append((spec, reached, error))
                if reached is None:
                    return  # the model cannot be loaded, so do not try the other texts
            else:
                if not self.keep_going and source is sources[0]:
                    self._check_capture(subject, model)
                yield subject

    def _check_unchanged(self, subject: Subject) -> None:
        store, label, text = self.store, subject.model.label, subject.text
        for (digest,) in store.keys(TextRecord, ("digest",), name=text.name):
            if digest != text.digest:
                raise StoreError(
                    f"{store.path} belongs to another study: its text {text.name!r} has SHA-256 "
                    f"{digest[:12]}, not {text.digest[:12]}. Choose another --out, or give the text another "
                    "file name."
                )
        # The tokenizer of an untrained model may be trained on the text, so its fingerprint depends on the
        # text. Any other model has one fingerprint.
        where = {"model": label, "text": text.name} if subject.spec.random_init else {"model": label}
        for fingerprint, tokenizer in store.keys(InputRecord, ("fingerprint", "tokenizer_source"), **where):
            if fingerprint != subject.fingerprint:
                what = "the weights or the configuration"
                if tokenizer != subject.tokenizer_source:
                    what = f"the tokenizer ({tokenizer!r} then, {subject.tokenizer_source!r} now)"
                raise StoreError(
                    f"{store.path} belongs to another study: its model {label!r} has fingerprint "
                    f"{fingerprint[:12]}, not {subject.fingerprint[:12]}; {what} changed. Choose another "
                    "--out."
                )

    def _check_capture(self, subject: Subject, model: Any) -> None:
        plan, n = self.plan, min(subject.lengths)
        shortest = SequenceData.of(subject.feed, [0], n, worded=False).inputs(plan.device)
        try:
            for scope in plan.scopes:
                layers = layers_of_scope(scope, subject.layers)
                capture_sites(model, shortest, subject, scope, layers, n, plan.output, plan.side)
        except CaptureError as error:
            from howsmooth.models import capture
            from howsmooth.models.identification.cross_attention_layer import OneSequence
            from howsmooth.models.identification.self_attention_module import CrossAttention

            if plan.layers_of(subject.spec).items or not isinstance(error, CrossAttention | OneSequence):
                raise
            # Cross-attention was asked for where layers have self-attention, or the reverse.
            scope = CROSS_SCOPE if isinstance(error, OneSequence) else "attention"
            others = sorted({site.layer for site in capture(model, shortest, scope=scope)})
            if not others:
                raise
            listed = ",".join(map(str, others))
            raise CaptureError(f"{error} Choose the others: layers {listed}.") from error


@contextmanager
def prepared_study(
    plan: Plan, folder: str | os.PathLike[str], *, write: bool = True, keep_going: bool = False
) -> Iterator[PreparedStudy]:
    """Check that a plan can be carried out, and yield the study, with the store in ``folder``."""
    # Open an existing store before loading a model: an unusable store is then reported at once.
    with Store.open(folder, write=write, late=True) as store:
        yield PreparedStudy(plan, store, keep_going=keep_going)


# ---- Inputs and their sequences


def open_sources(plan: Plan) -> list[OpenedInput]:
    """Read the inputs of a plan; refuse an empty text, and two inputs with the same name."""
    sources = [open_data(spec) for spec in plan.sources]
    names: set[str] = set()
    for source in sources:
        name, kind = source.record.name, source.record.kind
        if kind == "text" and not source.content.strip():
            raise TextError(f"text {name!r} is empty. Give a text with words in it.")
        if name in names:
            expected = f"{'texts' if kind == 'text' else 'files'} of different names"
            remedy = "Rename one of the files, since results stand under the name."
            raise ArgumentError(kind, expected=expected, got=f"{name!r} twice", remedy=remedy)
        names.add(name)
    return sources


def subject_of(plan: Plan, spec: ModelSpec, source: OpenedInput, model: Any) -> Subject:
    """Determine which layers, heads and lengths of a model a plan measures, and prepare the input."""
    label = spec.label
    counts = layer_and_head_counts(model, label)
    layers = plan.layers_of(spec).resolve(counts[0], label, "layers")
    heads = plan.heads_of(spec).resolve(counts[1], label, "heads") if "head" in plan.scopes else ()
    feed = feed_of(source, model, layers, special_tokens=plan.special_tokens)
    return Subject(
        spec=placed(spec),
        model=ModelRecord(
            label,
            encodable(spec.name),
            spec.random_init,
            spec.as_decoder,
            model.source,
            *counts,
            model.max_length,
            stored=str(model.stored).removeprefix("torch."),
        ),
        text=source.record,
        content=source.content if spec.random_init else "",
        fingerprint=model.fingerprint,
        tokenizer_source=feed.preparation,
        layers=layers,
        heads=heads,
        lengths=plan.lengths_of(spec) or feed.usual,
        feed=feed,
    )


def placed(spec: ModelSpec) -> ModelSpec:
    """Make the path of a model's folder absolute, since a worker may have another working directory."""
    # Unlike Path.is_dir, os.path.isdir is False for a name that is too long for a path.
    folder = os.path.isdir(spec.name)  # noqa: PTH112
    return replace(spec, name=str(Path(spec.name).absolute())) if folder else spec


def layer_and_head_counts(model: Any, label: str) -> tuple[int, int]:
    """Return the number of attention layers of a model, and the number of heads of the first of them."""
    if model.layers is None or model.heads is None:
        raise CaptureError(f"{label}: {model.obstacle}")
    return model.layers, model.heads


def place_sequences(
    plan: Plan, subject: Subject, held: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Choose where the plan's sequences begin; those in the store (``held``) keep their places."""
    _check_lengths(subject)
    feed, text = subject.feed, subject.text
    draw = derive_seed(purpose="sequences", seed=plan.seed, text=text.digest, model=subject.fingerprint)
    try:
        return sequence_starts(feed, subject.lengths, plan.samples, draw, held)
    except ValueError as error:
        more, other = (" for more", ", or another output folder") if held else ("", "")
        longer = "a longer text" if text.kind == "text" else "more of it"
        fewer = FEWER
        if plan.samples == len(subject.lengths) == 1:
            longest = max(length for _, length in feed.parts or ((0, feed.count),))
            fewer = f"--lengths {longest}, or a smaller one"
        raise TextError(
            f"{text.kind} {text.name!r} is too short{more}: for {subject.model.label}, {error}. "
            f"Use {fewer}, or {longer}{other}."
        ) from error


def _check_lengths(subject: Subject) -> None:
    lengths, label, most = subject.lengths, subject.model.label, subject.model.max_length
    feed = subject.feed
    missing = next((n for n in lengths if feed.lengths and n not in feed.lengths), None)
    if missing is not None:
        near = sorted(sorted(feed.lengths, key=lambda n: abs(n - missing))[:4])
        raise ArgumentError(
            "lengths",
            expected=f"numbers of tokens that {label} makes of {subject.text.name}"
            + (f", such as {', '.join(map(str, near))}" if len(feed.lengths) > 1 else f": {near[0]}"),
            got=str(missing),
            remedy="Leave lengths out for the usual ones.",
        )
    if most is not None:
        check_positions(lengths, most, label)
    if min(lengths) <= feed.special:
        raise ArgumentError(
            "lengths",
            expected=f"more than {feed.special} tokens, the special tokens of {label}",
            got=str(min(lengths)),
            remedy="Give larger --lengths, or leave --special-tokens out.",
        )


# ---- Captured layers


def capture_sites(
    model: Any,
    inputs: Inputs,
    subject: Subject,
    scope: str,
    layers: Sequence[int],
    n: int,
    output: str = "hidden",
    side: str | None = None,
) -> list[Any]:
    """Run a model once, and return the chosen attention layers with their inputs, ordered by layer and head.
    ``output`` selects the output of a whole model; ``side`` selects which of two input sequences is
    perturbed.
    """
    from howsmooth.models import CrossSite, capture

    heads = list(subject.heads) if scope == "head" else None
    whole = scope == "model"
    how: dict[str, Any] = {"output": output} if whole else {"layers": list(layers), "heads": heads}
    if side is not None and (whole or scope == CROSS_SCOPE):
        how["side"] = side
    sites = capture(model, inputs, scope=scope, **how)
    wanted = [(layer, head) for layer in layers for head in heads or (None,)]
    found = sorted(sites, key=lambda site: (site.layer, -1 if site.head is None else site.head))
    if (places := [(site.layer, site.head) for site in found]) != wanted:
        raise CaptureError(
            f"{subject.model.label}: capturing the scope {scope!r} of layers {list(layers)} gave {places} as "
            "(layer, head), so results could not be assigned to layers and heads."
        )
    for site in found:
        count = len(site.memory) if isinstance(site, CrossSite) else site.x.shape[-2]
        if count != n:
            raise CaptureError(
                f"{subject.model.label}: layer {site.layer} received {count} tokens where {n} "
                "were expected, so its constant would be recorded under a wrong length."
            )
    return found
