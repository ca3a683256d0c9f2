"""Load the models of a figure together with its texts, measure constants at sequences of these texts, and
capture attention layers there.
"""

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
from howsmooth.paper.bench import Bench, Unit, Values
from howsmooth.paper.published_code.constants_task import published_left
from howsmooth.study.executors import memory_each, processes_of
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.records import Measurement, Row
from howsmooth.study.study_preparation import (
    PreparedStudy,
    Subject,
    capture_sites,
    layer_and_head_counts,
)
from howsmooth.study.tasks.lipschitz_constants import constants_left, joined
from howsmooth.study.tasks.task import Work
from howsmooth.words import readable, sentence

__all__ = ["ModelWithTexts", "attention_of", "bilinear", "measure_constants", "models_of", "other_scores"]

_MASKED_LAYER = 6
_USUAL = 64
_FEW = 4  # the number of words and tokens with which to see whether a layer is masked


def models_of(bench: Bench, **chosen: Any) -> list[ModelWithTexts]:
    """Load each model of a figure with all its texts. ``chosen`` are arguments of :class:`ModelWithTexts`."""
    return [ModelWithTexts(bench, spec, **chosen) for spec in bench.models]


class ModelWithTexts:
    """A model with all texts of a figure, at whose sequences its layers are measured or captured.

    The sources of the model and of the texts are noted for the HTML page of the figure.

    Parameters
    ----------
    bench
        The bench of the figure, which says the texts, lengths and samples, and the layers if the user named
        some.
    spec
        The model.
    layers
        A function that chooses the layers from their number, if the user named none. By default this is the
        first layer of a model without mask, and layer 6 of a masked model, or its last layer if it has fewer.
    scopes
        The scopes of a :class:`~howsmooth.study.plans.Plan`.
    lengths
        The lengths of the sequences, by default those of the figure.
    fitting
        Whether lengths that the model cannot read are left out; otherwise they are refused.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model, a text, a length or a layer does not exist.

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
        asked, models = bench.options, bench.means.models
        assert models is not None
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
        self.study = PreparedStudy(self.plan, bench.store, models)
        self.subjects = self.study.subjects
        self.layers = self.subjects[0].layers
        self.texts = [one.text.name for one in self.subjects]
        bench.studies.append(self.study)
        bench.made.update(self._made())

    def _loaded(self) -> Any:
        """Load the model; the tokenizer of an untrained model is trained on the first text."""
        spec, options = self.spec, self.bench.options
        model = self.bench.load(spec, texts.load_text(options.texts[0]).content)
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
        """Run the model on sequences of n tokens of a text, and return the chosen layers together with the
        tokens that they receive; by default all layers of the plan, at all its sequences.
        """
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
        """Return a unit that computes rows from captured layers at all sequences of n tokens of a text.

        ``key`` has the values on which the rows depend, beside the model, the text and the settings;
        ``captured`` are arguments of :meth:`sites`.
        """
        of_text = {"text": subject.text.name, "digest": subject.text.digest, "n": n}
        key = self.key(**{"fingerprint": subject.fingerprint} | of_text | key)
        return Unit(key, measure, f"{self.label}, n = {n}", partial(self.sites, subject, n, **captured))

    def key(self, **more: Any) -> dict[str, Any]:
        """Return a dictionary that identifies rows in the store. It contains the given values, the name and
        the fingerprint of the model, the seed and the dtype.
        """
        same = {"seed": self.plan.seed, "dtype": self.plan.dtype}
        return {"model": self.label, "fingerprint": self.subjects[0].fingerprint, **same, **more}

    def measured(self, kind: type[Row] = Measurement) -> pd.DataFrame:
        """Return the table of the measured constants that the plan asks for, or of the published code's
        values at the same sequences. Rows for other models, texts, lengths and samples are left out.
        """
        table = self.bench.store.table(kind)
        return table[
            (table["model"] == self.label)
            & table["text"].isin(self.texts)
            & table["n"].isin(self.plan.lengths)
            & (table["sample"] < self.plan.samples)
        ]

    def _made(self) -> dict[str, str]:
        """Return sentences that say where the model and the texts come from."""
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


def measure_constants(models: Sequence[ModelWithTexts], *, published: bool = False) -> None:
    """Measure the constants that the plans of all models ask for and the store lacks. With ``published``,
    also compute the published code's values.
    """
    bench = models[0].bench
    kinds: list[Callable[[PreparedStudy], Work]] = [constants_left]
    kinds += [published_left(None)] if published else []
    for model in models:
        bench.made[f"Constants for {readable(model.label)}"] = (
            f"relative tolerance {model.plan.rtol:g}, confidence {model.plan.confidence:g}."
        )
    listed = [[kind(model.study) for model in models] for kind in kinds]
    bench.begin()
    for parts in listed:
        tasks = [task for part in parts for task in part.tasks]
        work = replace(parts[0], tasks=tasks, kept=sum(part.kept for part in parts))
        whole = work.kind is Measurement and bench.means.executor is None
        bench.runner.carry_out(joined(work) if whole else work)


def attention_of(site: Any, label: str) -> SelfAttention:
    """Return the attention of a captured layer in float64, as a map that can be evaluated at any tokens.

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
    """Name the features of an attention that the paper does not treat: scores other than ⟨A x_i + b, x_j⟩,
    and masks that are not causal. Return empty text if there are none.
    """
    named = {"rotary positions": f.rotary, "a window": f.window, "another mask": f.mask}
    return " and ".join([*(name for name, one in named.items() if one is not None), *f.feature_names()])


def bilinear(site: Any, label: str) -> SelfAttention:
    """Return the attention of a captured layer in float64, after a check that its scores are ⟨A x_i + b, x_j⟩
    and that its mask, if any, is causal.

    The quantities that the paper computes from the matrix A of a head have no meaning for other scores.

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
            remedy="howsmooth reproduce adversarial and howsmooth bound --search search such models.",
        )
    return f
