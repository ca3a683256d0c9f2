"""The published quantity beside the corrected one, at the same sequences: measured into the store.

For every sequence and layer: the corrected constant, the corrected one with each item of the published
code alone, and all items together. What the store has is not measured again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from howsmooth.errors import ArgumentError, NonFiniteError, StoreError
from howsmooth.models import LoadedModel
from howsmooth.published import PublishedLayer, capture_layers, items_that_apply, measure_layer
from howsmooth.study.begin import begun_study
from howsmooth.study.cost import measurement_cost
from howsmooth.study.environment import environment
from howsmooth.study.failure_log import FailureLog
from howsmooth.study.feeds import TextFeed
from howsmooth.study.plan import Plan, derive_seed
from howsmooth.study.prepare import Models, Subject
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.published_rows import quantities
from howsmooth.study.records import PublishedKey, PublishedValue
from howsmooth.study.sequences import Sequences
from howsmooth.study.spread import Means, carried
from howsmooth.study.store import Store
from howsmooth.study.tools import Tools
from howsmooth.study.work import batch_size

if TYPE_CHECKING:
    import torch

__all__ = ["run_as_published"]

_OF_EARLIER_VERSIONS = "published.json"

Wanted = Mapping[int, Mapping[str, tuple[str, ...]]]
"""For each layer the quantities, with their items."""


@dataclass(frozen=True)
class _Batch:
    """Published values that share their forward passes: a subject, a length, some of its samples."""

    subject: Subject
    n: int
    starts: Mapping[int, int]
    """First tokens of the samples."""
    wanted: Wanted
    missing: frozenset[PublishedKey]

    @property
    def scope(self) -> str:
        """That of the corrected quantity."""
        return "attention"

    @property
    def what(self) -> str:
        """What a failure of it is a failure of."""
        return "published"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with something left to measure."""
        return tuple(sorted({layer for layer, *_ in self.missing}))

    @property
    def cost(self) -> float:
        """An estimate of the time it takes, in no particular unit."""
        return len(self.missing) * measurement_cost(self.n, self.subject.model.heads)


def run_as_published(
    plan: Plan,
    items: Sequence[str] | None,
    folder: Path,
    tools: Tools,
    *,
    command: str = "",
    keep_going: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    executor: Executor | None = None,
    threads: int | None = None,
) -> Outcome:
    """Measure what the store in ``folder`` does not have yet; all values of a layer are written together.

    Parameters
    ----------
    plan
        What to measure, with the scope ``attention``: that of the corrected quantity.
    items
        Of ``howsmooth.published.ITEMS``; None for all that apply to each model.
    folder, tools, command, keep_going, on_progress, executor, threads
        As for :func:`howsmooth.study.run.run`.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        As :func:`howsmooth.study.run.run`; or if an item does not apply.

    """
    began = time.perf_counter()
    if plan.scopes != ("attention",):
        raise ArgumentError(
            "scope",
            expected="attention together with --as-published",
            got=", ".join(plan.scopes),
            remedy="The published scope is one of its items, block.",
        )
    _refuse_earlier_rows(folder)
    wanted: dict[tuple[str, str], Wanted] = {}

    def check(models: Models, subject: Subject) -> None:
        wanted[_name(subject)] = _quantities(subject, models, items, plan)

    with begun_study(plan, folder, tools, keep_going=keep_going, check=check) as begun:
        store = begun.store

        def left() -> list[_Batch]:
            return [
                batch
                for subject, places in begun.placed
                for batch in _work(begun.plan, subject, wanted[_name(subject)], places, store)
            ]

        batches = left()
        planned = sum(len(batch.missing) for batch in batches)
        asked = sum(
            sum(map(len, wanted[_name(one)].values())) * len(one.lengths) * plan.samples
            for one, _ in begun.placed
        )
        cost_planned = sum(batch.cost for batch in batches)
        kept, done, cost, unsettled, failures, reason = asked - planned, 0, 0.0, 0, 0, ""
        if batches or begun.impossible:
            number = store.start_run(command, plan.device, environment(plan.device, executor, threads))
            started = time.monotonic()
            failed = FailureLog(lambda rows: store.fail(rows, number), keep_going=keep_going)
            means = Means(begun.plan, tools, begun.models, failed, keep_going, executor, threads)
            for spec, text, error in begun.impossible:
                failed.add(error, spec.label, text, what="published")

            def tell(batch: _Batch, layer: int = -1) -> None:
                where = (*_name(batch.subject), batch.n, "attention", layer)
                on_progress(Progress(done, planned, kept, cost, cost_planned, *where, failed.count))

            try:
                if batches:
                    tell(batches[0])
                # Dropout draws from the random state that all threads of a process share.
                with closing(carried(_measured, batches, means, alone=True)) as steps:
                    for batch, rows in steps:
                        if rows is None:
                            cost += batch.cost
                            tell(batch)
                            continue
                        store.add_published(rows, number, worked=time.monotonic() - started)
                        done += len(rows)
                        unsettled += sum(not row.settled and row.lower is not None for row in rows)
                        tell(batch, rows[0].layer)
            except KeyboardInterrupt:
                # It may have come after rows were written and before that was told.
                done = planned - sum(len(batch.missing) for batch in left())
                tell(batches[-1])
                raise
            store.finish_run(number)
            failures, reason = failed.count, failed.first
    return Outcome(done, kept, unsettled, time.perf_counter() - began, failures, reason)


def _refuse_earlier_rows(folder: Path) -> None:
    """Refuse a folder of the version that kept its rows in ``published.csv`` alone, which would be replaced.

    Raises
    ------
    StoreError
        If there is such a file.

    """
    if (folder / _OF_EARLIER_VERSIONS).exists():
        raise StoreError(
            f"{folder} holds published rows of an earlier howsmooth, which kept them in published.csv alone. "
            "Choose another --out."
        )


def _name(subject: Subject) -> tuple[str, str]:
    return subject.model.label, subject.text.name


def _quantities(subject: Subject, models: Models, items: Sequence[str] | None, plan: Plan) -> Wanted:
    """Return the quantities of each layer, found at the shortest length."""
    if not isinstance(subject.feed, TextFeed):
        raise ArgumentError(
            "as-published",
            expected="texts, the only input that the published code takes",
            got=f"{subject.text.kind} {subject.text.name!r}",
        )
    tokens = subject.feed.inputs([0], min(subject.lengths)).to(plan.device)
    model = cast("LoadedModel", models.load_for(subject))
    found = capture_layers(model, tokens, list(subject.layers), training=False, seeds=[0])
    untrained = subject.spec.random_init
    return {
        one.attention.layer: quantities(items_that_apply(one, items, untrained=untrained)) for one in found
    }


def _work(plan: Plan, subject: Subject, wanted: Wanted, places: Sequences, store: Store) -> Iterator[_Batch]:
    known = store.known_published(*_name(subject))
    for n in sorted(subject.lengths):
        size = batch_size(subject.model.heads, n, plan.dtype)
        for first in range(0, plan.samples, size):
            asked = {
                (layer, n, sample, name, ",".join(items))
                for sample in range(first, min(first + size, plan.samples))
                for layer, found in wanted.items()
                for name, items in found.items()
            }
            missing = frozenset(asked - known)
            if missing:
                starts = {sample: places[n, sample] for sample in sorted({key[2] for key in missing})}
                yield _Batch(subject, n, starts, wanted, missing)


def _measured(
    plan: Plan, batch: _Batch, tools: Tools, models: Models, failed: FailureLog
) -> Iterator[list[PublishedValue]]:
    subject, n = batch.subject, batch.n
    if subject.model.label in failed.unusable:
        return
    try:
        model = cast("LoadedModel", models.load_for(subject))
    except Exception as error:
        failed.unusable.add(subject.model.label)
        failed.add(error, subject.model.label, what="published")
        return
    for layer in _captured(plan, batch, model, failed):
        try:
            rows = list(_values(plan, batch, layer))
        except Exception as error:
            failed.add(
                error,
                *_name(subject),
                scope="attention",
                n=n,
                place=(layer.attention.layer, None),
                samples=list(batch.starts),
                what="published",
            )
        else:
            if rows:
                yield rows


def _captured(plan: Plan, batch: _Batch, model: LoadedModel, failed: FailureLog) -> Iterator[PublishedLayer]:
    """Capture all layers together or, if that fails, those that can be captured."""
    subject, n = batch.subject, batch.n
    tokens = cast("torch.Tensor", subject.feed.inputs(list(batch.starts.values()), n))
    passes = [derive_seed(purpose="dropout", sample=one, **_axes(plan, batch)) for one in batch.starts]
    training = any("dropout" in items.split(",") for *_, items in batch.missing)

    def capture(layers: Sequence[int]) -> list[PublishedLayer]:
        return capture_layers(model, tokens.to(plan.device), list(layers), training=training, seeds=passes)

    try:
        found = capture(batch.layers)
    except Exception:
        found = []
    if found:
        yield from found
        return
    for layer in batch.layers:
        try:
            found = capture([layer])
        except Exception as error:
            where = _name(subject)
            failed.add(error, *where, scope="attention", n=n, place=(layer, None), what="published")
        else:
            yield from found


def _axes(plan: Plan, batch: _Batch) -> dict[str, Any]:
    subject = batch.subject
    return {
        "seed": plan.seed, "text": subject.text.digest, "model": subject.fingerprint, "n": batch.n
    }  # fmt: skip


def _values(plan: Plan, batch: _Batch, one: PublishedLayer) -> Iterator[PublishedValue]:
    """Measure what is missing of one layer."""
    subject, n, layer = batch.subject, batch.n, one.attention.layer
    # As in the study, so that the corrected quantity is the very number that `howsmooth measure` gives
    place: dict[str, Any] = {"scope": "attention", "layer": layer, "head": None, **_axes(plan, batch)}
    seeds = [derive_seed(purpose="start", sample=sample, **place) for sample in batch.starts]
    for name, items in batch.wanted[layer].items():
        words = ",".join(items)
        keys = [(layer, n, sample, name, words) for sample in batch.starts]
        if not batch.missing.intersection(keys):
            continue
        found = measure_layer(
            one, items, seeds=seeds, rtol=plan.rtol, confidence=plan.confidence,
            max_iterations=plan.max_iterations,
        )  # fmt: skip
        for slot, (sample, key) in enumerate(zip(batch.starts, keys, strict=True)):
            if key not in batch.missing:
                continue
            value, lower, upper = (float(part[slot]) for part in (found.value, found.lower, found.upper))
            if not math.isfinite(value):
                raise NonFiniteError(name, expected="a finite value", got=f"{value} for sample {sample}")
            yield PublishedValue(
                model=subject.model.label,
                text=subject.text.name,
                layer=layer,
                n=n,
                sample=sample,
                quantity=name,
                items=words,
                lipschitz=value,
                lower=None if math.isnan(lower) else lower,
                upper=None if math.isnan(upper) else upper,
                settled=bool(found.settled[slot]),
                steps=int(found.steps[slot]),
                radius_mean=float(one.attention.radius_mean[slot]),
                start=batch.starts[sample],
                seed=seeds[slot],
                map=found.map,
            )
