"""Load the models and texts of a figure, and measure or capture layers at sequences of the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from howsmooth import texts
from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.paper.figure_measurements import Bench, Unit, Values
from howsmooth.paper.published_code.constants_task import published_left
from howsmooth.study.executors import memory_each, processes_of
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.records import Measurement, Row
from howsmooth.study.study_preparation import PreparedStudy, Subject, capture_sites, layer_and_head_counts
from howsmooth.study.tasks.lipschitz_constants import constants_left, joined
from howsmooth.study.tasks.task import SequenceTask, Work
from howsmooth.words import readable, sentence

__all__ = ["ModelWithTexts", "attention_of", "measure_constants", "models_of", "other_scores"]

_MASKED_LAYER = 6
_USUAL = 64
_FEW = 4  # the number of words and tokens with which to see whether a layer is masked


def models_of(bench: Bench, **chosen: Any) -> list[ModelWithTexts]:
    """Load each model of a figure with all its texts. ``chosen`` are arguments of :class:`ModelWithTexts`."""
    return [ModelWithTexts(bench, spec, **chosen) for spec in bench.models]


class ModelWithTexts:
    """A model of a figure, with all texts of the figure. Their sources are noted for the HTML page.

    ``layers`` chooses the layers from their number if the user named none; by default the first of a model
    without mask, and layer 6 (or the last) of a masked one. ``scopes`` and ``lengths`` are those of a
    :class:`~howsmooth.study.plans.Plan`, the lengths by default those of the figure. If ``fitting``, lengths
    that the model cannot read are left out; otherwise they are refused.
    """

    def __init__(
        self,
        bench: Bench,
        spec: ModelSpec,
        *,
        layers: Callable[[int], str] | None = None,
        scopes: tuple[str, ...] = ("attention",),
        lengths: tuple[int, ...] | None = None,
        fitting: bool = False,
    ) -> None:
        asked = bench.options
        self.bench, self.spec, self.label = bench, spec, spec.label
        model = self._loaded()
        count, _ = layer_and_head_counts(model, self.label)
        chosen: Any = asked.layers or (layers or self._shown_layer)(count)
        lengths, longest = lengths or bench.lengths, model.max_length
        if fitting and longest is not None:
            lengths = tuple(n for n in lengths if n <= longest) or (min(_USUAL, longest),)
        self.plan = Plan(
            models=(spec,),
            lengths=lengths,
            samples=bench.samples,
            layers=chosen,
            scopes=scopes,
            bounds="none",
            memory=memory_each(processes_of(bench.means.executor), None, asked.device),
            **{name: getattr(asked, name) for name in ("texts", "seed", "device", "dtype")},
        )
        self.study = PreparedStudy(self.plan, bench.store, bench.loader)
        self.subjects = self.study.subjects
        self.layers = self.subjects[0].layers
        self.texts = [one.text.name for one in self.subjects]
        bench.studies.append(self.study)
        bench.made.update(self._made())

    def _loaded(self) -> Any:
        """Load the model; the tokenizer of an untrained model is trained on the first text."""
        spec, options = self.spec, self.bench.options
        model = self.bench.loader.load(spec, texts.load_text(options.texts[0]).content)
        try:
            model.tokenizer.encode("")
        except ModelError as error:
            raise ArgumentError(
                "model",
                expected="models with a tokenizer, since figures are measured on texts",
                got=f"{self.label}, without one",
                remedy=f"Put one into its folder{'' if spec.random_init else ', or add ,random-init'}; "
                "howsmooth measure takes other inputs.",
            ) from error
        return model

    def first_site(self) -> Any:
        """Capture the first attention layer of the model at the first words of the first text."""
        from howsmooth.models import capture  # imports transformers, which takes seconds

        content = texts.load_text(self.bench.options.texts[0]).content
        model = self._loaded()
        beginning = " ".join(content.split(maxsplit=_FEW)[:_FEW])
        ids = torch.tensor([model.tokenizer.encode(beginning)[:_FEW]], device=self.bench.options.device)
        return capture(model, ids, layers=[0], scope="attention")[0]

    def _shown_layer(self, count: int) -> str:
        return str(min(_MASKED_LAYER, count - 1) if self.first_site().causal else 0)

    def places(self) -> Iterator[tuple[Subject, int]]:
        """Yield all pairs of a text and a sequence length n of the plan."""
        return ((subject, n) for subject in self.subjects for n in self.plan.lengths)

    def sites(
        self,
        subject: Subject,
        n: int,
        *,
        scope: str = "attention",
        layers: Sequence[int] | None = None,
        samples: int | None = None,
    ) -> list[Any]:
        """Capture layers at sequences of n tokens of a text: by default the plan's layers at all samples."""
        starts = [subject.starts[n, sample] for sample in range(samples or self.plan.samples)]
        tokens = subject.feed.inputs(starts, n)
        assert isinstance(tokens, Tensor)  # of a text
        model, chosen = self.study.models.load_for(subject), subject.layers if layers is None else layers
        return capture_sites(model, tokens.to(self.plan.device), subject, scope, chosen, n)

    def unit(
        self,
        subject: Subject,
        n: int,
        measure: Callable[[list[Any]], Iterable[Values]],
        key: dict[str, Any],
        **captured: Any,
    ) -> Unit:
        """Return a unit of work that captures layers as :meth:`sites` does, and computes rows from them.
        ``key`` has the values on which the rows depend, beside model, text and settings.
        """
        of_text = {"text": subject.text.name, "digest": subject.text.digest, "n": n}
        key = self.key(**{"fingerprint": subject.fingerprint} | of_text | key)
        return Unit(key, measure, f"{self.label}, n = {n}", partial(self.sites, subject, n, **captured))

    def key(self, **more: Any) -> dict[str, Any]:
        """Return the key of rows in the store: the model, the settings, and the given values."""
        same = {"seed": self.plan.seed, "dtype": self.plan.dtype}
        return {"model": self.label, "fingerprint": self.subjects[0].fingerprint, **same, **more}

    def measured(self, kind: type[Row] = Measurement) -> pd.DataFrame:
        """Return the stored constants of the plan, or the published code's values at the same sequences."""
        table = self.bench.store.table(kind)
        return table[
            (table["model"] == self.label)
            & table["text"].isin(self.texts)
            & table["n"].isin(self.plan.lengths)
            & (table["sample"] < self.plan.samples)
        ]

    def _made(self) -> dict[str, str]:
        plan, model = self.plan, self.subjects[0].model
        label, source = readable(model.label), sentence(readable(model.source, longest=300))
        found = {f"Model {label}": f"{source} {model.layers} attention layers, {model.heads} heads."}
        for one in self.subjects:
            name, source = readable(one.text.name), sentence(readable(one.text.source, longest=300))
            found[f"Text {name}"] = f"{source} {one.text.characters} characters, SHA-256 {one.text.digest}."
            found[f"Tokens of {name} for {label}"] = (
                f"{one.feed.count}. Tokenizer: {sentence(one.tokenizer_source)} Fingerprint of model "
                f"and tokenizer: {one.fingerprint}."
            )
        found[f"Sequences for {label}"] = (
            f"{plan.samples} of each text at n = {', '.join(map(str, plan.lengths))}, none overlapping "
            f"another; seed {plan.seed}, {plan.dtype}."
        )
        return found


def measure_constants(models: Sequence[ModelWithTexts], *, published: bool = False) -> None:
    """Measure the missing constants of all models and, if asked for, the published code's missing values."""
    bench = models[0].bench
    kinds: list[Callable[[PreparedStudy], Work]] = [constants_left]
    kinds += [published_left(None)] if published else []
    for model in models:
        precision = f"relative tolerance {model.plan.rtol:g}, confidence {model.plan.confidence:g}."
        bench.made[f"Constants for {readable(model.label)}"] = precision
    listed = [[kind(model.study) for model in models] for kind in kinds]
    bench.begin()
    for parts in listed:
        tasks = [task for part in parts for task in part.tasks]
        sequences = sum(len(task.starts) for task in tasks if isinstance(task, SequenceTask))
        work = replace(parts[0], tasks=tasks, kept=sum(part.kept for part in parts), share=sequences)
        whole = work.kind is Measurement and bench.means.executor is None
        bench.runner.carry_out(joined(work) if whole else work)


def attention_of(site: Any, label: str, *, bilinear: bool = False) -> SelfAttention:
    """Return the attention of a captured layer in float64, which can be evaluated at any tokens.

    An ArgumentError is raised if the layer is code and not a formula with matrices; if ``bilinear``, also for
    :func:`other_scores`, for which the matrix A of a head has no meaning.
    """
    f = site.map
    if not isinstance(f, SelfAttention):
        expected, got = "models whose attention is given by its matrices, at any tokens", f.describe()
        remedy = "Choose another --model for this figure; howsmooth measure takes such layers."
    elif bilinear and (got := other_scores(f)):
        expected = "models whose scores are ⟨A x_i + b, x_j⟩ with one matrix A, unmasked or causal"
        remedy = "howsmooth reproduce adversarial and howsmooth bound --search search such models."
    else:
        return f.to(dtype=torch.float64, device="cpu")
    raise ArgumentError("model", expected=expected, got=f"{label}, with {got}", remedy=remedy)


def other_scores(f: SelfAttention) -> str:
    """Name features of attention that the paper does not treat, such as rotary positions; empty if none."""
    named = {"rotary positions": f.rotary, "a window": f.window, "another mask": f.mask}
    return " and ".join([*(name for name, one in named.items() if one is not None), *f.feature_names()])
