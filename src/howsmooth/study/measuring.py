"""Measure one batch: one capture for all layers, one batched estimate for all samples of a layer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from howsmooth.study.failure_log import FailureLog
from howsmooth.study.feeds import HeldFeed, TextFeed
from howsmooth.study.plan import Plan, derive_seed
from howsmooth.study.prepare import Models, Subject, capture_sites, on_device
from howsmooth.study.records import Bounding, Measurement, Sensitivity, SequenceRecord, SiteBounds
from howsmooth.study.tools import Estimate, Model, SiteLike, Tools
from howsmooth.study.work import Batch, Bounds

__all__ = ["Measured", "bounded", "measured"]

# Sensitivities are kept of the first sample, up to this many tokens: more could not be shown.
_MOST_TOKENS = 512


@dataclass(frozen=True)
class Measured:
    """What is written together."""

    rows: list[Measurement]
    sensitivities: list[Sensitivity]
    sequences: list[SequenceRecord]


def measured(
    plan: Plan, batch: Batch, tools: Tools, models: Models, failed: FailureLog
) -> Iterator[Measured]:
    """Measure a batch, layer by layer."""
    subject, n = batch.subject, batch.n
    label, text = subject.model.label, subject.text.name
    model = _loaded(subject, models, failed)
    if model is None:
        return
    starts = [batch.starts[sample] for sample in batch.samples]
    for site in _sites(plan, tools, model, starts, batch, failed):
        samples = [
            sample
            for sample in batch.samples
            if (batch.scope, site.layer, site.head, n, sample) in batch.missing
        ]
        try:
            if samples:
                yield _estimate(plan, batch, tools, site, samples)
            continue
        except Exception as error:
            if len(samples) == 1:
                failed.add(
                    error, label, text, scope=batch.scope, n=n, place=(site.layer, site.head), samples=samples
                )
                continue
        # One sample must not spoil the others.
        for sample in samples:
            try:
                found = _estimate(plan, batch, tools, site, [sample])
            except Exception as error:
                failed.add(
                    error,
                    label,
                    text,
                    scope=batch.scope,
                    n=n,
                    place=(site.layer, site.head),
                    samples=[sample],
                )
            else:
                yield found


def _sites(
    plan: Plan,
    tools: Tools,
    model: Model,
    starts: list[int],
    task: Batch | Bounds,
    failed: FailureLog,
    what: str = "measurement",
) -> Iterator[SiteLike]:
    """Capture all layers in one pass or, if that fails, those that can be captured."""
    subject = task.subject

    def captured(layers: tuple[int, ...]) -> list[SiteLike]:
        inputs = on_device(subject.feed.inputs(starts, task.n), plan.device)
        return capture_sites(tools, model, inputs, subject, task.scope, layers, task.n)

    try:
        found = captured(task.layers)
    except Exception:
        found = []
    if found:
        yield from found
        return
    for layer in task.layers:
        try:
            found = captured((layer,))
        except Exception as error:
            where = (subject.model.label, subject.text.name)
            failed.add(error, *where, scope=task.scope, n=task.n, place=(layer, None), what=what)
        else:
            yield from found


def _estimate(plan: Plan, batch: Batch, tools: Tools, site: SiteLike, samples: list[int]) -> Measured:
    """Measure some samples of one layer and head together."""
    subject, n = batch.subject, batch.n
    seeds = [
        derive_seed(
            purpose="start",
            seed=plan.seed,
            text=subject.text.digest,
            model=subject.fingerprint,
            scope=batch.scope,
            layer=site.layer,
            head=site.head,
            n=n,
            sample=sample,
        )
        for sample in samples
    ]
    places = [batch.samples.index(sample) for sample in samples]
    began = time.perf_counter()
    estimate = tools.measure(
        site.map,
        site.x[places],
        rtol=plan.rtol,
        confidence=plan.confidence,
        max_iterations=plan.max_iterations,
        seed=seeds,
        method=plan.identity.method,
        memory=plan.memory,
    )
    seconds = (time.perf_counter() - began) / len(samples)
    rows = [
        _row(
            plan,
            batch,
            site,
            estimate,
            place=place,
            slot=slot,
            seed=seeds[slot],
            seconds=seconds,
            start=batch.starts[sample],
        )
        for slot, (sample, place) in enumerate(zip(samples, places, strict=True))
    ]
    if n > _MOST_TOKENS or 0 not in samples:
        return Measured(rows, [], [])
    share = _sensitivity(rows[samples.index(0)], estimate, samples.index(0))
    return Measured(rows, [share], [_words(subject, n, 0, batch.starts[0])])


def _row(
    plan: Plan,
    batch: Batch,
    site: SiteLike,
    estimate: Estimate,
    *,
    place: int,
    slot: int,
    seed: int,
    seconds: float,
    start: int,
) -> Measurement:
    return Measurement(
        model=batch.subject.model.label,
        layer=site.layer,
        head=site.head,
        scope=batch.scope,
        causal=site.causal,
        text=batch.subject.text.name,
        sample=batch.samples[place],
        n=batch.n,
        radius_mean=float(site.radius_mean[place]),
        radius_max=float(site.radius_max[place]),
        lipschitz=float(estimate.value[slot]),
        lower=float(estimate.lower[slot]),
        upper=float(estimate.upper[slot]),
        confidence=float(estimate.confidence),
        converged=bool(estimate.converged[slot]),
        iterations=int(estimate.iterations[slot]),
        seconds=seconds,
        seed=seed,
        dtype=plan.dtype,
        method=estimate.method,
        masking=site.masking,
        site=site.name,
        start=start,
    )


def _sensitivity(row: Measurement, estimate: Estimate, slot: int) -> Sensitivity:
    """Say how the leading directions are spread over the tokens."""

    def energy(direction: torch.Tensor) -> tuple[float, ...]:
        shares = direction[slot].double().square().sum(dim=-1).cpu()
        total = float(shares.sum())
        return tuple((shares / total if total > 0 else torch.zeros_like(shares)).tolist())

    return Sensitivity(
        model=row.model,
        text=row.text,
        scope=row.scope,
        layer=row.layer,
        head=row.head,
        n=row.n,
        sample=row.sample,
        input_energy=energy(estimate.input_direction),
        output_energy=energy(estimate.output_direction),
    )


def _words(subject: Subject, n: int, sample: int, start: int) -> SequenceRecord:
    feed = subject.feed
    place = feed.place(start) if isinstance(feed, TextFeed | HeldFeed) else None
    return SequenceRecord(
        subject.model.label, subject.text.name, n, sample, start, place, feed.words(start, n)
    )


def bounded(
    plan: Plan, task: Bounds, tools: Tools, models: Models, failed: FailureLog
) -> Iterator[list[Bounding]]:
    """Compute the bounds of one sequence, one layer and head after another."""
    subject, n, bound = task.subject, task.n, tools.bound
    if bound is None:
        return
    label, text = subject.model.label, subject.text.name
    model = _loaded(subject, models, failed)
    if model is None:
        return
    for site in _sites(plan, tools, model, [task.start], task, failed, "bounds"):
        if (task.scope, site.layer, site.head, n, 0) not in task.missing:
            continue
        try:
            rows = _bounds_at(task, site, bound(site))
        except Exception as error:
            place = (site.layer, site.head)
            failed.add(error, label, text, scope=task.scope, n=n, place=place, samples=[0], what="bounds")
        else:
            yield rows


def _bounds_at(task: Bounds, site: SiteLike, found: SiteBounds) -> list[Bounding]:
    return [
        Bounding(
            model=task.subject.model.label,
            text=task.subject.text.name,
            scope=task.scope,
            layer=site.layer,
            head=site.head,
            n=task.n,
            sample=0,
            start=task.start,
            radius=found.radius,
            **asdict(bound),
        )
        for bound in found.bounds
    ]


def _loaded(subject: Subject, models: Models, failed: FailureLog) -> Model | None:
    """Load the model of a subject; if that fails once, it is not tried again."""
    label = subject.model.label
    if label in failed.unusable:
        return None
    try:
        return models.load_for(subject)
    except Exception as error:
        failed.unusable.add(label)
        failed.add(error, label)
        return None
