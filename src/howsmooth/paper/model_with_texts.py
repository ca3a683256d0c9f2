"""Load the models of a figure together with its texts, and list the tasks that measure attention layers at
sequences of these texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from howsmooth import texts
from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.paper.figure_definition import FigureContext
from howsmooth.paper.figure_tasks import Key, SiteTask, Values
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

__all__ = [
    "MODELS",
    "PreparedModel",
    "attention_of",
    "bilinear",
    "loaded",
    "other_scores",
    "prepared_models",
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


def loaded(context: FigureContext, spec: ModelSpec) -> Any:
    """Load a model with its tokenizer; the tokenizer of an untrained model is trained on the first text of
    the options.

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
            remedy=f"Put one into its folder{'' if spec.random_init else ', or add ,random-init'}; howsmooth "
            "measure takes other inputs.",
        ) from error
    return model


def prepared_models(context: FigureContext, **chosen: Any) -> list[PreparedModel]:
    """Load each model that the options name, by default :data:`MODELS`, with all texts of the options.

    ``chosen`` are arguments of :class:`PreparedModel`.
    """
    return [PreparedModel(context, spec, **chosen) for spec in context.options.models or MODELS]


class PreparedModel:
    """A loaded model with all texts of a figure, whose layers can be measured at sequences of these texts.

    The sources of the model and of the texts are noted for the HTML page of the figure.

    Parameters
    ----------
    context
        The figure's context. Its options choose the texts, and the layers and samples if they name some.
    spec
        The model.
    samples
        The number of sequences of each text and length, if the options name no number.
    lengths
        The lengths of the sequences; by default 64 tokens, or fewer if the model has fewer positions.
    layers
        The layers, if the options name none. By default this is the first layer of a model without mask, and
        layer 6 of a masked model, or its last layer if it has fewer.
    scopes
        The scopes of a :class:`~howsmooth.study.plans.Plan`.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model, a text, a length or a layer does not exist.

    """

    def __init__(
        self,
        context: FigureContext,
        spec: ModelSpec,
        *,
        samples: int,
        lengths: tuple[int, ...] | None = None,
        layers: str = "",
        scopes: tuple[str, ...] = ("attention",),
    ) -> None:
        asked = context.options
        self.context, self.spec, self.label = context, spec, spec.label
        longest = loaded(context, spec).max_length
        chosen: Any = asked.layers or layers or self._shown_layer
        self.plan = Plan(
            models=(spec,),
            lengths=lengths or (min(_USUAL, longest or _USUAL),),
            samples=asked.samples or samples,
            layers=chosen,
            scopes=scopes,
            bounds="none",
            memory=memory_each(processes_of(context.means.executor), None, asked.device),
            **{name: getattr(asked, name) for name in ("texts", "seed", "device", "dtype")},
        )
        self.study = PreparedStudy(self.plan, context.store, context.models)
        self.subjects = self.study.subjects
        self.layers, self.texts = self.subjects[0].layers, [one.text.name for one in self.subjects]
        context.studies.append(self.study)
        context.made.update(self._made())

    @cached_property
    def first_site(self) -> Any:
        """The first attention layer of the model, captured at the first words of the first text."""
        from howsmooth.models import capture  # imports transformers, which takes seconds

        content = texts.load_text(self.context.options.texts[0]).content
        model = loaded(self.context, self.spec)
        beginning = " ".join(content.split(maxsplit=_FEW)[:_FEW])
        ids = torch.tensor([model.tokenizer.encode(beginning)[:_FEW]], device=self.context.options.device)
        return capture(model, ids, layers=[0], scope="attention")[0]

    @property
    def _shown_layer(self) -> str:
        count, _ = layer_and_head_counts(loaded(self.context, self.spec), self.label)
        return str(min(_MASKED_LAYER, count - 1) if self.first_site.causal else 0)

    def places(self) -> Iterator[tuple[Subject, int]]:
        """Yield all pairs of a text and a sequence length n of the plan."""
        for subject in self.subjects:
            for n in self.plan.lengths:
                yield subject, n

    def sites(self, subject: Subject, n: int, samples: int | None = None) -> list[Any]:
        """Run the model on sequences of n tokens of a text, and return the attention of each layer together
        with the tokens that it receives.

        The sequences are the first ``samples`` sequences of the plan, or all if ``samples`` is None.
        """
        starts = [subject.starts[n, sample] for sample in range(samples or self.plan.samples)]
        tokens = subject.feed.inputs(starts, n)
        assert isinstance(tokens, Tensor)  # of a text
        model = self.context.models.load_for(subject)
        return capture_sites(model, tokens.to(self.plan.device), subject, "attention", subject.layers, n)

    def task(
        self,
        subject: Subject,
        n: int,
        measure: Callable[[Any], Iterable[Values]],
        key: Key,
        *,
        scope: str = "attention",
        layers: Iterable[int] | None = None,
        kind: type[SiteTask] = SiteTask,
    ) -> SiteTask:
        """Return a task that applies the function ``measure`` to captured layers, by default to all layers of
        the plan, at all sequences of n tokens of a text.

        ``key`` contains all values on which the rows depend, beside the model, the text and the settings.
        """
        starts = {sample: subject.starts[n, sample] for sample in range(self.plan.samples)}
        captured = subject.layers if layers is None else layers
        missing = frozenset((scope, layer, None, n, sample) for layer in captured for sample in starts)
        of_text = {"text": subject.text.name, "digest": subject.text.digest}
        key = self.key(fingerprint=subject.fingerprint, **of_text, **key)
        return kind(self.plan, subject, n, scope, starts, missing, key=key, measure=measure)

    def key(self, **more: str | int | None) -> dict[str, str | int | None]:
        """Return a dictionary that identifies rows in the store. It contains the given values, the name and
        the fingerprint of the model, the seed and the dtype.
        """
        same: Key = {"seed": self.plan.seed, "dtype": self.plan.dtype}
        first = {"model": self.label, "fingerprint": self.subjects[0].fingerprint}
        return {**first, **same, **more}

    def constants(self, *, published: bool = False) -> Iterator[Work]:
        """Yield the tasks for the local Lipschitz constants that the plan asks for and the store does not
        have. With ``published``, also yield the tasks for the published code's values.
        """
        self.context.made[f"Constants for {readable(self.label)}"] = (
            f"relative tolerance {self.plan.rtol:g}, confidence {self.plan.confidence:g}."
        )
        left = constants_left(self.study)
        yield left if self.context.means.executor else joined(left)
        if published:
            yield published_left(None)(self.study)

    def measured(self, kind: type[Row] = Measurement) -> pd.DataFrame:
        """Return the table of the measured constants that the plan asks for, or of the published code's
        values at the same sequences. Rows for other models, texts, lengths and samples are left out.
        """
        table = self.context.store.table(kind)
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
