"""Carry a plan out: one capture for all layers, one batched estimate for all samples of a layer.

What the store has is skipped; what comes is written batch by batch. Interrupt it at any moment and
run it again.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from howsmooth.errors import TextError
from howsmooth.study.environment import environment
from howsmooth.study.names import encodable
from howsmooth.study.plan import ModelSpec, Plan, derive_seed
from howsmooth.study.prepare import Models, Subject, capture_sites, place_sequences, prepare
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.sequences import SCHEMES, Sequences
from howsmooth.study.store import Failure, Key, Measurement, Store
from howsmooth.study.tools import Estimate, Model, SiteLike, Tools

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
    starts: Mapping[int, int]
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
    keep_going: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measure what the plan asks for and the store in ``folder`` does not have.

    What fails is recorded, and since it leaves no measurement, it is tried again the next time.

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
    keep_going
        Go on with the rest of the plan after a failure, instead of raising it.
    on_progress
        Called before the first and after every batch is written.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before anything is measured, or with ``keep_going`` if all of it is; if
        the store cannot be written; or without ``keep_going`` if measuring fails. What was measured until
        then has been written.

    """
    began = time.perf_counter()
    with ExitStack() as stack:
        # An existing store is opened first: if it cannot be used, no model need be loaded to say so.
        store = stack.enter_context(Store.open(folder)) if Store.exists(folder) else None
        if store is not None:
            plan = _as_stored(plan, store)
            store.check(plan.identity)
        models = Models(plan, tools)
        impossible: list[tuple[ModelSpec, str | None, Exception]] = []
        subjects = prepare(plan, tools, models, impossible if keep_going else None)
        if not subjects:
            raise impossible[0][2]
        if store is None:
            store = stack.enter_context(Store.open(folder))
            store.check(plan.identity)
        for one in subjects:
            store.check_input(one.model, one.text, one.fingerprint, tokenizer_source=one.tokenizer_source)
        placed = list(_placed(plan, subjects, store, impossible if keep_going else None))
        if not placed:
            raise impossible[0][2]
        store.add_study(plan.identity)
        for one, _ in placed:
            store.add_input(
                one.model,
                one.text,
                one.fingerprint,
                tokenizer_source=one.tokenizer_source,
                tokens=len(one.tokens),
            )
        batches = list(work(plan, placed, store))
        planned = sum(len(batch.missing) for batch in batches)
        kept = sum(count_planned(plan, one) for one, _ in placed) - planned
        measured = unconverged = failures = 0
        reason = ""
        if batches or impossible:
            number = store.start_run(command, plan.device, environment(plan.device))
            started = time.monotonic()
            failed = _Failures(store, number, keep_going=keep_going)
            for spec, text, error in impossible:
                failed.add(error, spec.label, text)
            cost_planned = sum(batch.cost for batch in batches)
            cost_done = 0.0
            for batch in batches:
                where = (batch.subject.model.label, batch.subject.text.name, batch.n, batch.scope)
                if batch is batches[0]:
                    on_progress(Progress(0, planned, kept, 0.0, cost_planned, *where, -1, failed.count))
                cost_after = cost_done + batch.cost
                for rows in _measure(plan, batch, tools, models, failed):
                    store.add(rows, number, worked=time.monotonic() - started)
                    measured += len(rows)
                    unconverged += sum(not row.converged for row in rows)
                    cost_done += len(rows) * measurement_cost(batch.n)
                    told = (measured, planned, kept, cost_done, cost_planned, *where, rows[0].layer)
                    on_progress(Progress(*told, failed.count))
                cost_done = cost_after
            store.finish_run(number)
            failures, reason = failed.count, failed.first
    return Outcome(measured, kept, unconverged, time.perf_counter() - began, failures, reason)


class _Failures:
    """Records what fails, and says whether to go on."""

    def __init__(self, store: Store, run: int, *, keep_going: bool) -> None:
        self._store = store
        self._run = run
        self._keep_going = keep_going
        self.count = 0
        self.first = ""
        self.unusable: set[str] = set()
        """Models that cannot be loaded: there is no use in trying for every length."""

    def add(
        self,
        error: Exception,
        model: str,
        text: str | None = None,
        *,
        scope: str | None = None,
        n: int | None = None,
        place: tuple[int, int | None] | None = None,
        samples: Sequence[int] = (),
    ) -> None:
        """Record a failure of a model, of a text with it, of a layer and head, or of some samples there."""
        words = encodable(" ".join(str(error).split())) or "no reason given"
        layer, head = place or (None, None)
        self._store.fail(
            [
                Failure(
                    model=model,
                    text=text,
                    scope=scope,
                    layer=layer,
                    head=head,
                    n=n,
                    sample=sample,
                    kind=type(error).__name__,
                    error=words,
                    detail=encodable("".join(traceback.format_tb(error.__traceback__))),
                )
                for sample in samples or (None,)
            ],
            self._run,
        )
        self.count += len(samples) or 1
        self.first = self.first or words
        if not self._keep_going:
            raise error


def _as_stored(plan: Plan, store: Store) -> Plan:
    """Cut sequences as the store has them, if that is a way that we know."""
    scheme = store.study().get("windows")
    return replace(plan, windows=scheme) if scheme in SCHEMES else plan


def _placed(
    plan: Plan,
    subjects: list[Subject],
    store: Store,
    impossible: list[tuple[ModelSpec, str | None, Exception]] | None,
) -> Iterator[tuple[Subject, Sequences]]:
    """Say where the sequences of each subject lie; without room for them, it is impossible."""
    for subject in subjects:
        held = store.sequences(subject.model.label, subject.text.name)
        try:
            yield subject, place_sequences(plan, subject, held)
        except TextError as error:
            if impossible is None:
                raise
            impossible.append((subject.spec, subject.text.name, error))


def work(plan: Plan, placed: Sequence[tuple[Subject, Sequences]], store: Store) -> Iterator[Batch]:
    """List what is left to do, subject by subject, from short to long."""
    for subject, places in placed:
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
                        starts = {sample: places[n, sample] for sample in samples}
                        yield Batch(subject, n, scope, samples, starts, missing)


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


def _measure(
    plan: Plan, batch: Batch, tools: Tools, models: Models, failed: _Failures
) -> Iterator[list[Measurement]]:
    subject, n = batch.subject, batch.n
    label, text = subject.model.label, subject.text.name
    if label in failed.unusable:
        return
    try:
        model = models.load_for(subject)
    except Exception as error:
        failed.unusable.add(label)
        failed.add(error, label)
        return
    starts = [batch.starts[sample] for sample in batch.samples]
    tokens = torch.stack([subject.tokens[start : start + n] for start in starts])
    for site in _sites(plan, batch, tools, model, tokens, failed):
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
                rows = _estimate(plan, batch, tools, site, [sample])
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
                yield rows


def _sites(
    plan: Plan, batch: Batch, tools: Tools, model: Model, tokens: torch.Tensor, failed: _Failures
) -> Iterator[SiteLike]:
    """Capture all layers in one pass or, if that fails, those that can be captured."""
    subject = batch.subject
    inputs = tokens.to(plan.device)
    try:
        found = capture_sites(tools, model, inputs, subject, batch.scope, batch.layers)
    except Exception:
        found = []
    if found:
        yield from found
        return
    for layer in batch.layers:
        try:
            found = capture_sites(tools, model, inputs, subject, batch.scope, (layer,))
        except Exception as error:
            where = (subject.model.label, subject.text.name)
            failed.add(error, *where, scope=batch.scope, n=batch.n, place=(layer, None))
        else:
            yield from found


def _estimate(
    plan: Plan, batch: Batch, tools: Tools, site: SiteLike, samples: list[int]
) -> list[Measurement]:
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
    )
    seconds = (time.perf_counter() - began) / len(samples)
    return [
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
