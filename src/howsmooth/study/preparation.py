"""Prepare a study: check each model on each input, and choose where its sequences begin.

Everything that can be refused is refused here, before anything is measured. Inputs are read and models are
loaded. Layers, heads, lengths and samples are compared with what exists, and every model is captured once at
its shortest length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from howsmooth.errors import ArgumentError, CaptureError, ModelError, StoreError, TextError
from howsmooth.scopes import layers_of_scope
from howsmooth.study.datasets import DataSource, Feed, Inputs, feed_of, open_data, sequence_starts
from howsmooth.study.plan import ModelSpec, Plan, derive_seed
from howsmooth.study.records import InputRecord, ModelRecord, TextRecord
from howsmooth.study.store import PendingStore, Store
from howsmooth.study.text_formatting import encodable

__all__ = [
    "MEASURE", "Impossible", "Models", "OpenStudy", "PlacedSubject", "Subject", "capture_sites", "check_fits",
    "check_sources", "checked_subjects", "layer_and_head_counts", "on_device", "opened_study",
    "place_sequences", "subject_of",
]  # fmt: skip

MEASURE = "measure"
"""The value of ``StudyRecord.kind`` for constants and for the values beside them."""

Impossible = list[tuple[ModelSpec, str | None, Exception]]
"""Models that cannot be used at all (None) or on a text (its name), each with the error."""


@dataclass(frozen=True)
class Subject:
    """A model and an input to measure it on, both checked, with the chosen layers, heads and lengths.

    ``layers``, ``heads`` and ``lengths`` are the chosen ones; only the scope ``head`` uses ``heads``.
    ``content`` is the text on which the tokenizer of an untrained model is trained; it is empty for other
    models.
    """

    spec: ModelSpec
    model: ModelRecord
    text: TextRecord
    content: str = field(repr=False)
    fingerprint: str
    tokenizer_source: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PlacedSubject:
    """A model with an input, and where each of its sequences begins in this input.

    ``starts`` has the index of the first token, or of the image, by (length, sample).
    """

    subject: Subject
    feed: Feed
    starts: Mapping[tuple[int, int], int]


@dataclass(frozen=True, eq=False)
class OpenStudy:
    """A checked study that is ready to run: its plan, store, models and sequences.

    Attributes
    ----------
    plan
        What to measure.
    pending
        The store.
    models
        The loader of models.
    placed
        The subjects with their sequences.
    impossible
        The models and texts that were left out because they cannot be used.
    keep_going
        Whether to leave out models and texts that are impossible, and to go on after failures.

    """

    plan: Plan
    pending: PendingStore
    models: Models
    placed: list[PlacedSubject]
    impossible: Impossible
    keep_going: bool

    @property
    def store(self) -> Store | None:
        """The open store of the study; ``None`` until it is created."""
        return self.pending.store

    def begin(self) -> Store:
        """Create the study's store if needed, record all models and texts there, and return the store."""
        store = self.pending.begin(self.plan.settings())
        store.add(record for one in self.placed for record in _records(one))
        return store


class Models:
    """A loader of models that keeps only the last model, since all models may not fit into memory."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._key: tuple[ModelSpec, str] | None = None
        self._model: Any = None

    def load(self, spec: ModelSpec, content: str) -> Any:
        """Load a model, or return it if it is already loaded.

        The tokenizer of an untrained model is trained on the text ``content``.
        """
        from howsmooth.models import load_model  # imports transformers, which takes seconds

        key = (spec, content if spec.random_init else "")
        if self._model is None or self._key != key:
            self._model = None  # free the old model before loading the new one
            self._model = load_model(
                spec.name,
                random_init=spec.random_init,
                as_decoder=spec.as_decoder,
                part=spec.part,
                seed=self._plan.seed,
                device=self._plan.device,
                dtype=getattr(torch, self._plan.dtype),
                tokenizer_text=key[1] or None,
                head=self._plan.output != "hidden",
            )
            self._key = key
        return self._model

    def load_for(self, subject: Subject) -> Any:
        """Load a model that was checked before, and refuse it if its fingerprint has changed since.

        Raises
        ------
        ModelError
            If the fingerprint differs from the one when the subject was checked.

        """
        model = self.load(subject.spec, subject.content)
        if model.fingerprint != subject.fingerprint:
            raise ModelError(
                f"{subject.model.label} changed during the study: its weights differ between two loads. "
                "Do not change its files while it is measured, and run the same command again."
            )
        return model


@contextmanager
def opened_study(
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    write: bool = True,
    keep_going: bool = False,
    models: Models | None = None,
) -> Iterator[OpenStudy]:
    """Check that a plan can be carried out, and yield the study, ready to run.

    The models, the inputs and the store, if it exists, are checked.

    Parameters
    ----------
    plan
        What to measure.
    folder
        The folder of the study.
    write
        Whether rows will be added.
    keep_going
        Whether to leave out models and texts that are impossible, instead of raising the first error.
    models
        An existing loader of models with the same seed, device and precision, if any.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, or with ``keep_going`` all of it, or if the store cannot be used.

    """
    # Open an existing store before loading a model: an unusable store is then reported at once.
    with PendingStore(folder, MEASURE, write=write) as pending:
        pending.check(plan.settings())
        models, impossible = models or Models(plan), Impossible()
        left_out = impossible if keep_going else None
        checked = checked_subjects(plan, models, left_out)
        if pending.store is not None:
            for subject, _ in checked:
                _check_unchanged(pending.store, subject)
        placed = list(_with_sequences(plan, checked, pending.store, left_out))
        if not placed:
            raise impossible[0][2]
        yield OpenStudy(plan, pending, models, placed, impossible, keep_going)


def _check_unchanged(store: Store, subject: Subject) -> None:
    """Refuse a model or a text that has changed since the store was written, but kept its name.

    Raises
    ------
    StoreError
        If it has changed; the message says what differs, and the remedy.

    """
    label, text = subject.model.label, subject.text
    for (digest,) in store.keys(TextRecord, ("digest",), name=text.name):
        if digest != text.digest:
            raise StoreError(
                f"{store.path} belongs to another study: its text {text.name!r} has SHA-256 {digest[:12]}, "
                f"not {text.digest[:12]}. Choose another --out, or give the text another file name."
            )
    # The tokenizer of an untrained model may be trained on the text, so its fingerprint depends on the text.
    # Any other model has one fingerprint.
    where = {"model": label, "text": text.name} if subject.spec.random_init else {"model": label}
    for fingerprint, tokenizer in store.keys(InputRecord, ("fingerprint", "tokenizer_source"), **where):
        if fingerprint != subject.fingerprint:
            what = "the weights or the configuration"
            if tokenizer != subject.tokenizer_source:
                what = f"the tokenizer ({tokenizer!r} then, {subject.tokenizer_source!r} now)"
            raise StoreError(
                f"{store.path} belongs to another study: its model {label!r} has fingerprint "
                f"{fingerprint[:12]}, not {subject.fingerprint[:12]}; {what} changed. Choose another --out."
            )


def _records(one: PlacedSubject) -> tuple[ModelRecord, TextRecord, InputRecord]:
    subject = one.subject
    given = InputRecord(
        subject.model.label,
        subject.text.name,
        subject.fingerprint,
        subject.tokenizer_source,
        one.feed.count,
    )
    return subject.model, subject.text, given


def _with_sequences(
    plan: Plan, checked: list[tuple[Subject, Feed]], store: Store | None, impossible: Impossible | None
) -> Iterator[PlacedSubject]:
    """For each model and text, choose at which positions of the text the measured sequences begin.

    If ``impossible`` is not None, inputs that are too short are added to it instead of raising an error.
    """
    for subject, feed in checked:
        held = {} if store is None else store.sequences(subject.model.label, subject.text.name)
        try:
            yield PlacedSubject(subject, feed, place_sequences(plan, subject, feed, held))
        except TextError as error:
            if impossible is None:
                raise
            impossible.append((subject.spec, subject.text.name, error))


def place_sequences(
    plan: Plan, subject: Subject, feed: Feed, held: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Choose where the plan's sequences begin in an input.

    Sequences that the store has (``held``) keep their places.
    """
    draw = derive_seed(
        purpose="sequences", seed=plan.seed, text=subject.text.digest, model=subject.fingerprint
    )
    try:
        return sequence_starts(feed, subject.lengths, plan.samples, draw, held)
    except ValueError as error:
        name = f"{subject.text.kind} {subject.text.name!r}"
        where = f"between the sequences that the store has of {subject.model.label}, " if held else ""
        raise TextError(
            f"{name} is too short{' for more' if held else ''}: {where}{error}. Use fewer samples, or "
            "fewer or shorter lengths, or another output folder with a longer text."
        ) from error


# ---- Checks of subjects


def checked_subjects(
    plan: Plan, models: Models, impossible: Impossible | None = None
) -> list[tuple[Subject, Feed]]:
    """Load every model, and check its layers, heads and lengths on every input of the plan.

    Parameters
    ----------
    plan
        What to measure.
    models
        The loader of models.
    impossible
        A list that receives what cannot be used, with the error; by default the first error is raised.

    """
    sources = [open_data(spec) for spec in plan.sources]
    check_sources(sources)
    checked: list[tuple[Subject, Feed]] = []
    for spec in plan.models:
        for source in sources:
            reached: str | None = None
            try:
                model = models.load(spec, source.content)
                reached = encodable(source.name)
                subject, feed = subject_of(plan, spec, source, model)
                check_fits(plan, subject, feed)
            except Exception as error:
                if impossible is None:
                    raise
                impossible.append((spec, reached, error))
                if reached is None:
                    break  # the model cannot be loaded, so do not try the other texts
            else:
                if impossible is None and source is sources[0]:
                    _check_capture(plan, subject, feed, model)
                checked.append((subject, feed))
    if not checked and impossible:
        raise impossible[0][2]
    return checked


def _check_capture(plan: Plan, subject: Subject, feed: Feed, model: Any) -> None:
    """Refuse layers that cannot be measured, after one trial at the shortest length."""
    n = min(subject.lengths)
    shortest = on_device(feed.inputs([0], n), plan.device)
    try:
        for scope in plan.scopes:
            layers = layers_of_scope(scope, subject.layers)
            capture_sites(model, shortest, subject, scope, layers, n, plan.output)
    except CaptureError as error:
        others = _self_attention(error, model, shortest)
        if not others or plan.layers_of(subject.spec).items:
            raise
        listed = ",".join(map(str, others))
        raise CaptureError(f"{error} Choose the others: layers {listed}.") from error


def _self_attention(error: CaptureError, model: Any, inputs: Inputs) -> list[int]:
    """Return a model's self-attention layers, after its cross-attention was refused.

    After any other error, the list is empty.
    """
    from howsmooth.models import capture
    from howsmooth.models.identification.self_attention_module import CrossAttention

    if not isinstance(error, CrossAttention):
        return []
    return sorted({site.layer for site in capture(model, inputs)})


def capture_sites(
    model: Any,
    inputs: Inputs,
    subject: Subject,
    scope: str,
    layers: Sequence[int],
    n: int,
    output: str = "hidden",
) -> list[Any]:
    """Capture chosen attention layers of a model in one forward pass; return them by layer and head.

    Parameters
    ----------
    model, subject
        The loaded model, and the subject whose heads are chosen.
    inputs
        Token ids (batch, n), or other inputs of the model.
    scope
        One of ``howsmooth.scopes.SCOPES``, or ``model``.
    layers
        The indices of the layers; 0 in the scope ``model``.
    n
        The number of tokens that each layer must receive.
    output
        The output of a whole model.

    Returns
    -------
    list of howsmooth.models.Site

    Raises
    ------
    CaptureError
        If other layers or heads are captured than were asked for, or with another number of tokens.

    """
    from howsmooth.models import capture

    heads = list(subject.heads) if scope == "head" else None
    if scope == "model":
        sites = capture(model, inputs, scope=scope, output=output)
    else:
        sites = capture(model, inputs, layers=list(layers), scope=scope, heads=heads)
    wanted = [(layer, head) for layer in layers for head in heads or (None,)]
    found = sorted(sites, key=lambda site: (site.layer, -1 if site.head is None else site.head))
    if [(site.layer, site.head) for site in found] != wanted:
        raise CaptureError(
            f"{subject.model.label}: capturing the scope {scope!r} of layers {list(layers)} gave "
            f"{[(site.layer, site.head) for site in found]} as (layer, head), so results could not be "
            "assigned to layers and heads."
        )
    for site in found:
        if site.x.shape[-2] != n:
            raise CaptureError(
                f"{subject.model.label}: layer {site.layer} received {site.x.shape[-2]} tokens where {n} "
                "were expected, so its constant would be recorded under a wrong length."
            )
    return found


def on_device(inputs: Inputs, device: str) -> Inputs:
    """Return a model's inputs, one tensor or several by name, on a device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    return {name: value.to(device) for name, value in inputs.items()}


def layer_and_head_counts(model: Any, label: str) -> tuple[int, int]:
    """Return the numbers of layers and heads of a model.

    Raises
    ------
    CaptureError
        If none of its attention layers could be observed.

    """
    if model.layers is None or model.heads is None:
        raise CaptureError(f"{label}: {model.obstacle}")
    return model.layers, model.heads


def check_sources(sources: list[DataSource]) -> None:
    """Refuse an empty text, and two inputs with the same name."""
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


def subject_of(plan: Plan, spec: ModelSpec, source: DataSource, model: Any) -> tuple[Subject, Feed]:
    """Choose the layers, heads and lengths of a model that a plan measures, and prepare the input.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model has no such layers or heads, or takes another kind of input.

    """
    label = spec.label
    layer_count, head_count = layer_and_head_counts(model, label)
    layers = plan.layers_of(spec).resolve(layer_count, label, "layers")
    heads = plan.heads_of(spec).resolve(head_count, label, "heads") if "head" in plan.scopes else ()
    feed = feed_of(source, model, layers)
    # A worker may have another working directory, so make the path of a folder absolute.
    folder = Path(spec.name)
    return Subject(
        spec=replace(spec, name=str(folder.absolute())) if folder.is_dir() else spec,
        model=ModelRecord(
            label=label,
            name=encodable(spec.name),
            random_init=spec.random_init,
            as_decoder=spec.as_decoder,
            source=model.source,
            layers=layer_count,
            heads=head_count,
            max_length=model.max_length,
            stored=str(model.stored).removeprefix("torch."),
        ),
        text=TextRecord(
            encodable(source.name), source.digest, encodable(source.source), source.size, source.kind
        ),
        content=source.content if spec.random_init else "",
        fingerprint=model.fingerprint,
        tokenizer_source=feed.preparation,
        layers=layers,
        heads=heads,
        lengths=plan.lengths_of(spec) or feed.usual,
    ), feed


def _check_lengths(subject: Subject, feed: Feed) -> None:
    lengths, label, most = subject.lengths, subject.model.label, subject.model.max_length
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
    if most is not None and max(lengths) > most:
        raise ArgumentError(
            "lengths",
            expected=f"at most {most} tokens, the positions of {label}",
            got=str(max(lengths)),
            remedy="Shorten the lengths.",
        )


def check_fits(plan: Plan, subject: Subject, feed: Feed) -> None:
    """Refuse lengths that a model or input does not allow, and more sequences than fit into the input.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If they do not fit; the message says what would fit.

    """
    _check_lengths(subject, feed)
    name, label = f"{subject.text.kind} {subject.text.name!r}", subject.model.label
    if feed.parts is None:
        if plan.samples > feed.count:
            raise TextError(
                f"{name} has {feed.count} inputs for {label}, fewer than {plan.samples} samples. Use "
                f"{feed.count} samples or fewer, or give more inputs."
            )
        return
    lengths = [n + feed.beyond for n in subject.lengths]
    longest = max(size for _, size in feed.parts)
    if len(feed.parts) > 1 and max(lengths) > longest:
        raise TextError(
            f"{name} is too short: its longest sequence has {longest - feed.beyond} tokens, and "
            f"{max(subject.lengths)} are needed. Use shorter lengths."
        )
    sample, tokens = sum(lengths), feed.count
    needed = plan.samples * sample
    if needed > tokens:
        one = len(lengths) == 1
        of_lengths = f"{sample} tokens" if one else f"each of {len(lengths)} lengths"
        asked = f"{plan.samples} sequences of {of_lengths} without overlap need"
        if plan.samples == 1:
            asked = f"a sequence of {of_lengths} needs"
        fitting = tokens // sample
        choices = [f"{fitting} samples or fewer"] if fitting else []
        is_text = subject.text.kind == "text"
        choices += ["fewer or shorter lengths", "a longer text" if is_text else "more of it"]
        raise TextError(
            f"{name} is too short: {asked} {needed} tokens, and it has {tokens} "
            f"{'with the tokenizer of' if is_text else 'for'} {label}. "
            f"Use {', or '.join(choices)}."
        )
