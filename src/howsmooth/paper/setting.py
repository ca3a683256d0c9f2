"""What a figure is measured at: models at texts, at the sequences that a study of the same plan measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from howsmooth import texts
from howsmooth.attention import SelfAttention
from howsmooth.attention.plain_scores import require_plain_scores
from howsmooth.errors import ArgumentError
from howsmooth.paper.figure import Bench
from howsmooth.paper.published.task import published_left
from howsmooth.paper.units import Key
from howsmooth.study.names import file_stem, readable, sentence
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.progress import Silent
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Measurement, PublishedValue
from howsmooth.study.run import run
from howsmooth.study.runner import Means
from howsmooth.study.sequences import Sequences
from howsmooth.study.store import Store
from howsmooth.study.subjects import (
    Subject,
    capture_sites,
    checked_subjects,
    counted,
    place_sequences,
)

__all__ = ["MODELS", "Column", "Setting", "Studied", "bilinear", "columns", "loaded", "usual_length"]

MODELS = (
    ModelSpec("builtin-encoder"),
    ModelSpec("builtin-encoder", as_decoder=True),
    ModelSpec("gpt2", random_init=True),
)
"""The paper's three columns as far as they need no network: encoder, the same as decoder, random GPT-2."""

_MASKED_LAYER = 6
_FEW = 4  # words, or tokens, that suffice to see whether a layer is masked
_USUAL = 64
# Of the published values, which are the corrected one, that with each item, and that with all of them.
_PUBLISHED_COST = 6.0


@dataclass(frozen=True)
class Column:
    """A layer of a model, as Figure 1 shows one in each column.

    Attributes
    ----------
    spec
        The model.
    layer
        Its layer.
    width
        Numbers a token.

    """

    spec: ModelSpec
    layer: int
    width: int

    @property
    def stem(self) -> str:
        """The name of its folder."""
        return file_stem(self.spec.label, f"layer-{self.layer:02d}")

    @property
    def layers(self) -> Ranges:
        """The layer, as a plan names it."""
        return Ranges.parse(str(self.layer), "layers")

    @property
    def cost(self) -> float:
        """The time that it takes beside others: short sequences cost between the width and its square."""
        return float(self.width**1.5)


def columns(bench: Bench) -> list[Column]:
    """Find the layers to show: those asked for, or the paper's choice for each model.

    Returns
    -------
    list of Column
        Model by model; without models in the request, :data:`MODELS`. Without layers in it, the first layer
        of a model without mask, and layer 6 (the last one, if there are fewer) of a masked one.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If a model or text cannot be had, or a layer does not exist.

    """
    from howsmooth.models import capture  # it brings transformers, which takes seconds

    content = texts.load_text(bench.request.texts[0]).content
    beginning = " ".join(content.split(maxsplit=_FEW)[:_FEW])
    found = []
    for spec in bench.request.models or MODELS:
        model = loaded(bench, spec)
        ids = torch.tensor([model.tokenizer.encode(beginning)[:_FEW]], device=bench.request.device)
        site = capture(model, ids, layers=[0], scope="attention")[0]
        count, _ = counted(model, spec.label)
        usual = str(min(_MASKED_LAYER, count - 1) if site.causal else 0)
        asked = bench.request.layers or Ranges.parse(usual, "layers")
        layers = asked.resolve(count, spec.label, "layers")
        found += [Column(spec, layer, site.x.shape[-1]) for layer in layers]
    return found


def loaded(bench: Bench, spec: ModelSpec) -> Any:
    """Load a model as a study of the first text does, to see what it has."""
    return bench.models.load(spec, texts.load_text(bench.request.texts[0]).content)


def usual_length(bench: Bench, spec: ModelSpec) -> int:
    """Return 64, or the positions of the model if it has fewer: enough tokens to see how long they are."""
    longest: int | None = loaded(bench, spec).max_length
    return _USUAL if longest is None else min(_USUAL, longest)


class Studied(NamedTuple):
    """The rows of a study that its plan asks for, though the store may hold more.

    These are its measurements, what the published code computes at the same sequences (none if that was not
    asked for), and the first tokens of its sequences, by text.
    """

    rows: pd.DataFrame
    published: pd.DataFrame
    held: dict[str, Sequences]


class Setting:
    """One model at all texts of a request, loaded and checked; the bench is told where they come from.

    Parameters
    ----------
    bench
        On which it is measured.
    spec
        The model.
    lengths, samples, layers, scopes
        As of :class:`howsmooth.study.plan.Plan`.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model, a text, a length or a layer cannot be had.

    """

    def __init__(
        self,
        bench: Bench,
        spec: ModelSpec,
        *,
        lengths: tuple[int, ...],
        samples: int,
        layers: Ranges,
        scopes: tuple[str, ...] = ("attention",),
    ) -> None:
        asked = bench.request
        self.bench = bench
        self.plan = Plan(
            models=(spec,),
            texts=asked.texts,
            lengths=lengths,
            samples=samples,
            scopes=scopes,
            layers=layers,
            seed=asked.seed,
            device=asked.device,
            dtype=asked.dtype,
            bounds="none",
        )
        self._feeds = dict(checked_subjects(self.plan, bench.models))
        self.subjects = list(self._feeds)
        self.label = spec.label
        self.texts = [one.text.name for one in self.subjects]
        bench.made.update(self._made())

    def sequences(
        self, subject: Subject, held: Mapping[Any, int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Give the tokens (samples, n) at each length, those that a study of this plan measures.

        ``held`` are the first tokens that a store has, by length and sample.
        """
        feed = self._feeds[subject]
        places = place_sequences(self.plan, subject, feed, held or {})
        for n in self.plan.lengths:
            tokens = feed.inputs([places[n, sample] for sample in range(self.plan.samples)], n)
            assert isinstance(tokens, Tensor)  # of a text
            yield n, tokens

    def sites(self, subject: Subject, tokens: Tensor, scope: str = "attention") -> list[Any]:
        """Capture the chosen layers at tokens (samples, n)."""
        model = self.bench.models.load_for(subject)
        inputs = tokens.to(self.plan.device)
        return capture_sites(model, inputs, subject, scope, subject.layers, tokens.shape[1])

    def key(self, subject: Subject, **more: str | int) -> Key:
        """Name what a unit at a text depends on."""
        return {
            "model": subject.model.label,
            "fingerprint": subject.fingerprint,
            "text": subject.text.name,
            "digest": subject.text.digest,
            "seed": self.plan.seed,
            "dtype": self.plan.dtype,
            **more,
        }

    def study(self, name: str, bench: Bench, *, published: bool = False) -> Studied:
        """Measure the plan as a study in a folder of this name; ``published`` adds the published values."""
        plan, folder = self.plan, bench.folder / name
        means = Means(_Told(bench, published=published), bench.command, models=bench.models)
        bench.made[f"Constants for {readable(self.label)}"] = (
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
        return Studied(rows, beside if published else beside.iloc[:0], held)

    def _made(self) -> dict[str, str]:
        """Say where the model and the texts come from."""
        plan, model = self.plan, self.subjects[0].model
        label = readable(model.label)
        source = sentence(readable(model.source, longest=300))
        found = {f"Model {label}": f"{source} {model.layers} attention layers, {model.heads} heads."}
        for one, feed in self._feeds.items():
            source = sentence(readable(one.text.source, longest=300))
            name = readable(one.text.name)
            found[f"Text {name}"] = f"{source} {one.text.characters} characters, SHA-256 {one.text.digest}."
            found[f"Tokens of {name} for {label}"] = (
                f"{feed.count}. Tokenizer: {sentence(one.tokenizer_source)} Fingerprint of model "
                f"and tokenizer: {one.fingerprint}."
            )
        lengths = ", ".join(str(n) for n in plan.lengths)
        found[f"Sequences for {label}"] = (
            f"{plan.samples} sequences of each text at n = {lengths}, none overlapping another of the same "
            f"model and text; seed {plan.seed}, {plan.dtype}."
        )
        return found


class _Told(Silent):
    """Hears how far a study is, and tells its share of a bench's time: that of the published values apart."""

    def __init__(self, bench: Bench, *, published: bool) -> None:
        self._parts = bench.parts((1.0, _PUBLISHED_COST) if published else (1.0,))
        self._share = 0.0

    def phase(self, words: str) -> None:
        """Go on to the published values where they begin."""
        if "published" in words:
            del self._parts[:-1]
            self._share = 0.0

    def advance(self, done: float, total: float, words: str) -> None:
        """Tell the share of the present part, which never goes back when more time is expected."""
        self._share = max(self._share, done / total if total else 1.0)
        self._parts[0].say(words, self._share)


def bilinear(site: Any, label: str) -> SelfAttention:
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
            remedy="Choose another --model for this figure; howsmooth attack searches such models.",
        )
    return f.to(dtype=torch.float64, device="cpu")
