"""Carry a plan out: one capture for all layers, one batched estimate for all samples of a layer.

What the store has is skipped; what comes is written batch by batch. Interrupt it at any moment and
run it again.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from howsmooth.study.plan import Plan, derive_seed
from howsmooth.study.prepare import Models, Subject, capture_sites, prepare
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.sequences import pick_windows
from howsmooth.study.store import Key, Measurement, Store
from howsmooth.study.tools import Estimate, SiteLike, Tools

__all__ = ["Batch", "run", "work"]

# Attention probabilities and their companions of one batch may take about this much memory.
_BATCH_BYTES = 2**31
_ARRAYS_A_HEAD = 6


@dataclass(frozen=True)
class Batch:
    """Measurements that share one forward pass: a subject, a length, a scope, some of its samples."""

    subject: Subject
    n: int
    scope: str
    samples: tuple[int, ...]
    missing: frozenset[Key]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with something left to measure."""
        return tuple(sorted({layer for _, layer, _, _, _ in self.missing}))

    @property
    def cost(self) -> float:
        """An estimate of the time it takes, in no particular unit."""
        return len(self.missing) * measurement_cost(self.n)


def run(
    plan: Plan,
    folder: Path,
    tools: Tools,
    *,
    command: str = "",
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measure what the plan asks for and the store in ``folder`` does not have.

    Parameters
    ----------
    plan
        What to measure.
    folder
        Of the store; made, with the store, once every check has passed.
    tools
        What to measure with, usually :func:`howsmooth.study.tools.default_tools`.
    command
        To be recorded as the origin of the rows.
    on_progress
        Called before the first and after every batch is written.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before anything is measured; or if measuring fails, after what was
        measured has been written.

    """
    began = time.perf_counter()
    with ExitStack() as stack:
        # An existing store is opened first: if it cannot be used, no model need be loaded to say so.
        store = stack.enter_context(Store.open(folder)) if Store.exists(folder) else None
        if store is not None:
            store.check(plan.identity)
        models = Models(plan, tools)
        subjects = prepare(plan, tools, models)
        if store is None:
            store = stack.enter_context(Store.open(folder))
            store.check(plan.identity)
        for one in subjects:
            store.check_input(one.model, one.text, one.fingerprint, tokenizer_source=one.tokenizer_source)
        store.add_study(plan.identity)
        for one in subjects:
            store.add_input(
                one.model,
                one.text,
                one.fingerprint,
                tokenizer_source=one.tokenizer_source,
                tokens=len(one.tokens),
            )
        batches = list(work(plan, subjects, store))
        planned = sum(len(batch.missing) for batch in batches)
        kept = sum(count_planned(plan, one) for one in subjects) - planned
        measured = unconverged = 0
        if batches:
            number = store.start_run(command, plan.device, environment(plan.device))
            cost_planned = sum(batch.cost for batch in batches)
            cost_done = 0.0
            first = batches[0]
            where = (first.subject.model.label, first.subject.text.name, first.n, first.scope, -1)
            on_progress(Progress(0, planned, kept, 0.0, cost_planned, *where))
            for batch in batches:
                for rows in _measure(plan, batch, tools, models):
                    store.add(rows, number)
                    measured += len(rows)
                    unconverged += sum(not row.converged for row in rows)
                    cost_done += len(rows) * measurement_cost(batch.n)
                    where = (
                        batch.subject.model.label,
                        batch.subject.text.name,
                        batch.n,
                        batch.scope,
                        rows[0].layer,
                    )
                    on_progress(Progress(measured, planned, kept, cost_done, cost_planned, *where))
            store.finish_run(number)
    return Outcome(measured, kept, unconverged, time.perf_counter() - began)


def work(plan: Plan, subjects: list[Subject], store: Store) -> Iterator[Batch]:
    """List what is left to do, subject by subject, from short to long."""
    for subject in subjects:
        known = store.known(subject.model.label, subject.text.name)
        for n in sorted(plan.lengths):
            size = batch_size(subject.model.heads, n, plan.dtype)
            for scope in plan.scopes:
                heads = subject.heads if scope == "head" else (None,)
                for first in range(0, plan.samples, size):
                    asked = {
                        (scope, layer, head, n, sample)
                        for sample in range(first, min(first + size, plan.samples))
                        for layer in subject.layers
                        for head in heads
                    }
                    missing = frozenset(asked - known)
                    if missing:
                        samples = tuple(sorted({sample for *_, sample in missing}))
                        yield Batch(subject, n, scope, samples, missing)


def count_planned(plan: Plan, subject: Subject) -> int:
    """Count the measurements that the plan asks of a subject."""
    maps = sum(len(subject.heads) if scope == "head" else 1 for scope in plan.scopes)
    return len(subject.layers) * maps * len(plan.lengths) * plan.samples


def batch_size(heads: int, n: int, dtype: str) -> int:
    """How many sequences of n tokens are measured together without filling the memory."""
    itemsize = 8 if dtype == "float64" else 4
    size = heads * n * n * itemsize * _ARRAYS_A_HEAD
    return max(1, _BATCH_BYTES // size)


def measurement_cost(n: int) -> float:
    """Estimate the time that a measurement takes, relative to others, as a function of its length.

    A constant for what every batch pays, the projections' n and the attention's n². Only the shares
    matter, and only for the time left that is shown.
    """
    return 20.0 + n + n * n / 400.0


def _measure(plan: Plan, batch: Batch, tools: Tools, models: Models) -> Iterator[list[Measurement]]:
    subject, n = batch.subject, batch.n
    model = models.load_for(subject)
    draw = derive_seed(
        purpose="windows", seed=plan.seed, text=subject.text.digest, model=subject.fingerprint, n=n
    )
    starts = pick_windows(len(subject.tokens), n, plan.samples, draw)
    tokens = torch.stack([subject.tokens[starts[sample] : starts[sample] + n] for sample in batch.samples])
    for site in capture_sites(tools, model, tokens.to(plan.device), subject, batch.scope, batch.layers):
        samples = [
            sample
            for sample in batch.samples
            if (batch.scope, site.layer, site.head, n, sample) in batch.missing
        ]
        if not samples:
            continue
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
        )
        seconds = (time.perf_counter() - began) / len(samples)
        yield [
            _row(
                plan,
                batch,
                site,
                estimate,
                place=place,
                slot=slot,
                seed=seeds[slot],
                seconds=seconds,
                start=starts[sample],
            )
            for slot, (sample, place) in enumerate(zip(samples, places, strict=True))
        ]


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


def environment(device: str) -> dict[str, str]:
    """Describe what the numbers were computed with, for the record."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    for package in ("howsmooth", "torch", "transformers", "tokenizers", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    found["threads"] = str(torch.get_num_threads())
    found["cores"] = str(os.cpu_count() or "unknown")
    if torch.device(device).type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found
