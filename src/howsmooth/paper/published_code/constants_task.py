"""Define the task of measuring a constant with differences between the published code and the definition:
with no difference (the correct constant), with each one alone, and with all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.paper.published_code import PublishedLayer, capture_layers, items_that_apply, measure_layer
from howsmooth.seeds import derive_seed
from howsmooth.study.records import PublishedValue, Row, quantities
from howsmooth.study.study_preparation import PreparedStudy, Subject
from howsmooth.study.tasks.lipschitz_constants import batch_size, start_seed
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Work, each_if_not_all

__all__ = ["PublishedTask", "published_left"]

_COLUMNS = ("layer", "n", "sample", "quantity", "items")


@dataclass(frozen=True, eq=False)
class PublishedTask(SequenceTask):
    """A task that computes the published code's values at several sequences of the same length."""

    kind = PublishedValue

    wanted: Sequence[tuple[int, str, str]] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers for which the store lacks values."""
        return tuple(sorted({layer for layer, *_ in self.missing}))

    def computed(self, model: Any) -> Iterator[Found]:
        """Compute the missing rows, and yield those of each layer together."""
        for one in each_if_not_all(self.layers, lambda layers: self._layers(model, layers), self._no_layer):
            if isinstance(one, Failed):
                yield one
                continue
            try:
                rows = list(self._values(one))
            except Exception as error:
                yield self.failed(error, (one.attention.layer, None), list(self.starts))
            else:
                yield rows

    def _layers(self, model: Any, layers: Sequence[int]) -> list[PublishedLayer]:
        assert self.data is not None
        tokens = cast("Tensor", self.data.inputs(self.plan.device))
        training = any("dropout" in items.split(",") for *_, items in self.missing)
        named = {"text": self.subject.text.digest, "model": self.subject.fingerprint}
        seeds = [
            derive_seed(purpose="dropout", sample=one, n=self.n, seed=self.plan.seed, **named)
            for one in self.starts
        ]
        return capture_layers(model, tokens, list(layers), training=training, seeds=seeds)

    def _values(self, layer: PublishedLayer) -> Iterator[Row]:
        index, plan = layer.attention.layer, self.plan
        # Use the seeds of constants, so that the corrected quantity equals the result of `howsmooth measure`.
        seeds = [start_seed(plan, self.subject, "attention", index, None, self.n, s) for s in self.starts]
        how = {name: getattr(plan, name) for name in ("rtol", "confidence", "max_iterations")}
        for own, name, items in self.wanted:
            keys = [(index, self.n, sample, name, items) for sample in self.starts]
            if own != index or not self.missing.intersection(keys):
                continue
            found = measure_layer(layer, tuple(items.split(",")) if items else (), seeds=seeds, **how)
            for slot, (sample, key) in enumerate(zip(self.starts, keys, strict=True)):
                if key not in self.missing:
                    continue
                value, lower, upper = (float(one[slot]) for one in (found.value, found.lower, found.upper))
                if not math.isfinite(value):
                    got = f"{value} for sample {sample}"
                    raise NonFiniteError(name, expected="a finite value", got=got)
                yield PublishedValue(
                    self.model,
                    self.subject.text.name,
                    *key,
                    lipschitz=value,
                    lower=None if math.isnan(lower) else lower,
                    upper=None if math.isnan(upper) else upper,
                    settled=bool(found.settled[slot]),
                    steps=int(found.steps[slot]),
                    radius_mean=float(layer.attention.radius_mean[slot]),
                    start=self.starts[sample],
                    seed=seeds[slot],
                    map=found.map,
                )


def published_left(items: Sequence[str] | None) -> Callable[[PreparedStudy], Work]:
    """Return a function that lists the tasks of computing a study's missing published values. ``items`` are
    some of ``howsmooth.paper.published_code.ITEMS``; None stands for all that apply to each model.
    """

    def left(study: PreparedStudy) -> Work:
        tasks, kept, failed = [], 0, []
        for subject in study.subjects:
            try:
                wanted = _wanted(study, subject, items)
            except Exception as error:
                if not study.keep_going:
                    raise
                failed.append(Failed.of(error, PublishedValue, (subject.model.label, subject.text.name)))
                continue
            where = {"model": subject.model.label, "text": subject.text.name}
            known = study.store.keys(PublishedValue, _COLUMNS, **where)
            for n in sorted(subject.lengths):
                size = batch_size(subject.model.heads, n, study.plan.dtype)
                for first in range(0, study.plan.samples, size):
                    samples = range(first, min(first + size, study.plan.samples))
                    asked = {(layer, n, one, name, words) for one in samples for layer, name, words in wanted}
                    kept += len(asked & known)
                    if missing := frozenset(asked - known):
                        starts = {one: subject.starts[n, one] for one in sorted({key[2] for key in missing})}
                        at = (study.plan, subject, n, "attention")
                        tasks.append(PublishedTask(*at, starts, missing, wanted=wanted))
        return Work(PublishedValue, "published values", tasks, kept, failed)

    return left


def _wanted(
    study: PreparedStudy, subject: Subject, items: Sequence[str] | None
) -> Sequence[tuple[int, str, str]]:
    if subject.text.kind != "text":
        raise ArgumentError(
            "as-published",
            expected="texts, the only input that the published code takes",
            got=f"{subject.text.kind} {subject.text.name!r}",
        )
    given = subject.feed.inputs([0], min(subject.lengths))
    assert isinstance(given, Tensor)
    tokens = given.to(study.plan.device)
    model = study.models.load_for(subject)
    found = capture_layers(model, tokens, list(subject.layers), training=False, seeds=[0])
    untrained = subject.spec.random_init
    return [
        (one.attention.layer, name, ",".join(own))
        for one in found
        for name, own in quantities(items_that_apply(one, items, untrained=untrained)).items()
    ]
