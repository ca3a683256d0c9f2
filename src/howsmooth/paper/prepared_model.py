"""Load a model with the texts of a figure, and measure its attention layers at sequences of these texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from howsmooth import texts
from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.paper.figure import FigureContext
from howsmooth.paper.published.constants_task import published_left
from howsmooth.paper.row_cache import Key
from howsmooth.study.measured_models import (
    Subject,
    capture_sites,
    checked_subjects,
    layer_and_head_counts,
    place_sequences,
)
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.progress_listener import Listener
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Measurement, PublishedValue
from howsmooth.study.runner import Means
from howsmooth.study.store import Store
from howsmooth.study.text_formatting import file_stem, readable, sentence
from howsmooth.study.text_windows import Sequences

__all__ = [
    "MODELS",
    "Column",
    "PreparedModel",
    "StudyRows",
    "attention_of",
    "bilinear",
    "columns",
    "loaded",
    "other_scores",
    "usual_length",
]

MODELS = (
    ModelSpec("builtin-encoder"),
    ModelSpec("builtin-encoder", as_decoder=True),
    ModelSpec("gpt2", random_init=True),
)
"""Models like the paper's that need no network: an encoder, the same as a decoder, and a random GPT-2."""

_MASKED_LAYER = 6
_FEW = 4  # the number of words and tokens with which to see whether a layer is masked
_USUAL = 64
# The time of the published values relative to the constants: the corrected constant, the constant with each
# item of the published code, and the constant with all items.
_PUBLISHED_COST = 6.0


@dataclass(frozen=True)
class Column:
    """A column of Figure 1: one layer of one model, whose tokens have the dimension ``width``."""

    spec: ModelSpec
    layer: int
    width: int

    @property
    def stem(self) -> str:
        """The name of the folder that holds the measurements of this layer."""
        return file_stem(self.spec.label, f"layer-{self.layer:02d}")

    @property
    def layers(self) -> Ranges:
        """The value of a plan's option ``layers`` that selects only this layer."""
        return Ranges.parse(str(self.layer), "layers")

    @property
    def cost(self) -> float:
        """How long a measurement takes, relative to other layers: the token dimension to the power 1.5."""
        return float(self.width**1.5)


def columns(context: FigureContext) -> list[Column]:
    """Return the layers that the options name, or by default one layer of each model.

    Without models in the options, these are :data:`MODELS`. Without layers in the options, the layer is the
    first one of a model without mask, and layer 6 (or the last) of a masked model.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If a model or a text cannot be loaded, or a layer does not exist.

    """
    from howsmooth.models import capture  # imports transformers, which takes seconds

    content = texts.load_text(context.options.texts[0]).content
    beginning = " ".join(content.split(maxsplit=_FEW)[:_FEW])
    found = []
    for spec in context.options.models or MODELS:
        model = loaded(context, spec)
        ids = torch.tensor([model.tokenizer.encode(beginning)[:_FEW]], device=context.options.device)
        site = capture(model, ids, layers=[0], scope="attention")[0]
        count, _ = layer_and_head_counts(model, spec.label)
        usual = str(min(_MASKED_LAYER, count - 1) if site.causal else 0)
        asked = context.options.layers or Ranges.parse(usual, "layers")
        layers = asked.resolve(count, spec.label, "layers")
        found += [Column(spec, layer, site.x.shape[-1]) for layer in layers]
    return found


def loaded(context: FigureContext, spec: ModelSpec) -> Any:
    """Load a model; the tokenizer of an untrained one is trained on the first text of the options.

    Raises
    ------
    ArgumentError
        If the model takes no text.

    """
    model = context.models.load(spec, texts.load_text(context.options.texts[0]).content)
    try:
        model.tokenizer.encode("")
    except ModelError as error:
        raise ArgumentError(
            "model",
            expected="models with a tokenizer, since figures are measured on texts",
            got=f"{spec.label}, without one",
            remedy="Put one into its folder, or add ,random-init; howsmooth measure takes other inputs.",
        ) from error
    return model


def usual_length(context: FigureContext, spec: ModelSpec) -> int:
    """Return the default sequence length: 64, or the model's number of positions if it has fewer."""
    longest: int | None = loaded(context, spec).max_length
    return _USUAL if longest is None else min(_USUAL, longest)


class StudyRows(NamedTuple):
    """The measurements of a study that belong to its plan; the store may hold rows of other plans too.

    ``published`` are the values of the published code at the same sequences, empty if they were not asked
    for. ``held`` has the first tokens of the sequences of each text.
    """

    rows: pd.DataFrame
    published: pd.DataFrame
    held: dict[str, Sequences]


class PreparedModel:
    """A loaded model with all texts of a figure, ready to be measured.

    The origins of the model and of the texts are noted for the figure's page. ``chosen`` are the lengths,
    samples, layers and scopes of a :class:`~howsmooth.study.plans.Plan`.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model, a text, a length or a layer does not exist.

    """

    def __init__(self, context: FigureContext, spec: ModelSpec, **chosen: Any) -> None:
        asked = context.options
        self.context = context
        loaded(context, spec)  # refuses a model without a tokenizer
        same = {name: getattr(asked, name) for name in ("texts", "seed", "device", "dtype")}
        self.plan = Plan(models=(spec,), bounds="none", **same, **chosen)
        self.subjects = checked_subjects(self.plan, context.models)
        self.label = spec.label
        self.texts = [one.text.name for one in self.subjects]
        context.made.update(self._made())

    def sequences(
        self, subject: Subject, held: Mapping[Any, int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each length n of the plan, with token ids of shape (samples, n) from one text.

        ``held`` maps (length, sample) to the first tokens of sequences that a store already has.
        """
        places = place_sequences(self.plan, subject, held or {})
        for n in self.plan.lengths:
            tokens = subject.feed.inputs([places[n, sample] for sample in range(self.plan.samples)], n)
            assert isinstance(tokens, Tensor)  # of a text
            yield n, tokens

    def sites(self, subject: Subject, tokens: Tensor, scope: str = "attention") -> list[Any]:
        """Run a model on token ids (samples, n); return the plan's layers, with the tokens each receives."""
        model = self.context.models.load_for(subject)
        inputs = tokens.to(self.plan.device)
        return capture_sites(model, inputs, subject, scope, subject.layers, tokens.shape[1])

    def key(self, subject: Subject, **more: str | int) -> Key:
        """Return the key of a cache file: a dictionary of all values on which its rows depend."""
        return {
            "model": subject.model.label,
            "fingerprint": subject.fingerprint,
            "text": subject.text.name,
            "digest": subject.text.digest,
            "seed": self.plan.seed,
            "dtype": self.plan.dtype,
            **more,
        }

    def study(self, name: str, context: FigureContext, *, published: bool = False) -> StudyRows:
        """Measure what the plan asks for, with ``published`` also what the published code computes.

        The store is in the folder ``name``.
        """
        plan, folder = self.plan, context.folder / name
        means = Means(_StudyProgress(context, published=published), context.command, models=context.models)
        context.made[f"Constants for {readable(self.label)}"] = (
            f"relative tolerance {plan.rtol:g}, confidence {plan.confidence:g}."
        )
        run(plan, folder, means, beside=[published_left(None)] if published else [])
        with Store.open(folder, write=False) as store:
            held: dict[str, Sequences] = {text: store.sequences(self.label, text) for text in self.texts}
            rows, beside = (
                table[
                    table["text"].isin(self.texts)
                    & table["n"].isin(plan.lengths)
                    & (table["sample"] < plan.samples)
                ]
                for table in (store.table(Measurement), store.table(PublishedValue))
            )
        return StudyRows(rows, beside if published else beside.iloc[:0], held)

    def _made(self) -> dict[str, str]:
        """Return descriptions of where the model and the texts come from."""
        plan, model = self.plan, self.subjects[0].model
        label = readable(model.label)
        source = sentence(readable(model.source, longest=300))
        found = {f"Model {label}": f"{source} {model.layers} attention layers, {model.heads} heads."}
        for one in self.subjects:
            source = sentence(readable(one.text.source, longest=300))
            name = readable(one.text.name)
            found[f"Text {name}"] = f"{source} {one.text.characters} characters, SHA-256 {one.text.digest}."
            found[f"Tokens of {name} for {label}"] = (
                f"{one.feed.count}. Tokenizer: {sentence(one.tokenizer_source)} Fingerprint of model "
                f"and tokenizer: {one.fingerprint}."
            )
        lengths = ", ".join(str(n) for n in plan.lengths)
        found[f"Sequences for {label}"] = (
            f"{plan.samples} sequences of each text at n = {lengths}, none overlapping another of the same "
            f"model and text; seed {plan.seed}, {plan.dtype}."
        )
        return found


class _StudyProgress(Listener):
    """A listener that turns the progress of a study into progress of the whole figure."""

    def __init__(self, context: FigureContext, *, published: bool) -> None:
        self._parts = context.parts((1.0, _PUBLISHED_COST) if published else (1.0,))
        self._share = 0.0

    def phase(self, words: str) -> None:
        """Start the second part of the progress when the work on the published code's values begins."""
        if "published" in words:
            del self._parts[:-1]
            self._share = 0.0

    def advance(self, done: float, total: float, words: str) -> None:
        """Report the share of a study that is done; it never decreases, even if the expected time grows."""
        self._share = max(self._share, done / total if total else 1.0)
        self._parts[0].say(words, self._share)


def attention_of(site: Any, label: str) -> SelfAttention:
    """Return a layer's attention in float64, which constructed tokens can be given to.

    Raises
    ------
    ArgumentError
        If the layer is code and not a formula with matrices.

    """
    if not isinstance(site.map, SelfAttention):
        raise ArgumentError(
            "model",
            expected="models whose attention is given by its matrices, at any tokens",
            got=f"{label}, with {site.map.describe()}",
            remedy="Choose another --model for this figure; howsmooth measure takes such layers.",
        )
    return site.map.to(dtype=torch.float64, device="cpu")


def other_scores(f: SelfAttention) -> str:
    """Say what an attention has beside scores ⟨A x_i + b, x_j⟩ and a causal mask; nothing if it is plain."""
    named = {"rotary positions": f.rotary, "a window": f.window, "another mask": f.mask}
    return " and ".join([*(name for name, one in named.items() if one is not None), *f.feature_names()])


def bilinear(site: Any, label: str) -> SelfAttention:
    """Return a layer's attention in float64; refuse other scores than ⟨A x_i + b, x_j⟩, and other masks.

    Quantities of the paper that come from the matrix A of a head have no meaning for other scores.

    Raises
    ------
    ArgumentError
        If the attention has other scores, such as those with rotary positions, or a mask that is not causal.

    """
    f = attention_of(site, label)
    if other := other_scores(f):
        raise ArgumentError(
            "model",
            expected="models whose scores are ⟨A x_i + b, x_j⟩ with one matrix A, unmasked or causal",
            got=f"{label}, with {other}",
            remedy="howsmooth reproduce adversarial and howsmooth attack search such models.",
        )
    return f
