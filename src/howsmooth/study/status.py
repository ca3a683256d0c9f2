"""Report the progress of a study from its store, without loading a model or disturbing a running process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from howsmooth.errors import StoreError
from howsmooth.scopes import layers_of_scope
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.records import (
    KEY_COLUMNS,
    MEASURE,
    PLACE,
    PUBLISHED,
    Bounding,
    Failure,
    Key,
    Measurement,
    ModelRecord,
    PublishedValue,
    Row,
    Run,
    keys_of,
)
from howsmooth.study.resource_forecast import TaskTimes, after_measuring, figure_count
from howsmooth.study.store import Store

__all__ = ["Part", "Status", "status"]


@dataclass(frozen=True)
class Part:
    """How many measurements of one model on one text in one scope are planned, done and failed.

    The scope is the part of each layer that is measured. The scope ``as published`` stands for the values of
    the paper's published code. ``planned`` is ``None`` until a run has loaded the model, because its number
    of layers is not known before, and without a plan. ``failed`` counts measurements that are missing and
    failed when last tried; it is ``None`` if failures are known of a part whose measurements are not.
    Published values are counted by layer and sequence, since all values of one layer and sequence are written
    together.
    """

    model: str
    text: str
    scope: str
    planned: int | None
    done: int
    failed: int | None


@dataclass(frozen=True)
class Status:
    """The progress of a study.

    Attributes
    ----------
    parts
        One entry for each model, text and scope, in the order of the plan.
    running
        Whether a process is writing into the store.
    started, finished
        When the last run started, and when it reached its end, in ISO 8601; ``None`` if it did not.
    rate
        Measurements per second in the last run, by a monotonic clock; ``None`` before the first measurement.
    remaining
        Expected seconds until the study is finished, at the speed of the last run, with longer times for
        longer sequences. They include what ``--dry-run`` includes, by the same rules: measurements, bounds,
        tables, figures and report; but not bounds with ``bounds="all"``. ``None`` if unknown, as while
        bounds, tables and figures of a study are computed whose measurements are done.
    reasons
        The reasons of the failures that are left, each with its number, the most frequent first.

    """

    parts: tuple[Part, ...]
    running: bool
    started: str | None
    finished: str | None
    rate: float | None
    remaining: float | None
    reasons: tuple[tuple[str, int], ...]


def status(folder: str | os.PathLike[str], plan: Plan | None = None, texts: Iterable[str] = ()) -> Status:
    """Report how much of a plan the store in a folder contains, and estimate the remaining time.

    ``texts`` are the names of the plan's inputs in the store, which need not exist yet. Without a plan,
    ``planned`` and the remaining time are unknown.

    Raises
    ------
    StoreError
        If the store cannot be read or belongs to another study, or without a plan if there is none.

    """
    if plan is None and not Store.exists(folder):
        raise StoreError(f"{os.fspath(folder)} holds no study. Give the folder of one, or its plan file.")
    running = Store.in_use(folder)
    with Store.open(folder, write=False, late=True) as store:
        runs = [run for run, _ in store.rows(Run)]
        failures = [row for row, _ in store.rows(Failure)]
        known = Status(
            parts=_stored_parts(store, failures),
            running=running,
            started=runs[-1].started if runs else None,
            finished=runs[-1].finished if runs else None,
            rate=None,
            remaining=None,
            reasons=tuple(Counter(row.error for row in failures).most_common()),
        )
        if plan is None:
            return known
        store.check(MEASURE, plan.settings())
        models = {model.label: model for model, _ in store.rows(ModelRecord)}
        parts: list[Part] = []
        left: list[tuple[str, Key]] = []
        shown: list[set[object]] = []
        scopes = (*plan.scopes, *([PUBLISHED] if plan.as_published else []))
        for spec, text, scope in product(plan.models, texts, scopes):
            kind, of_keys = (PublishedValue, "attention") if scope == PUBLISHED else (Measurement, scope)
            done = _done(store, plan, spec.label, text, kind)
            if spec.label not in models or not plan.lengths_of(spec):
                # The layers are unknown, or the lengths, which a model of images has by default.
                made = sum(key[0] == of_keys for key in done)
                fails = any(row.model == spec.label and row.text in (None, text) for row in failures)
                parts.append(Part(spec.label, text, scope, None, made, None if fails else 0))
                continue
            asked = _asked(plan, spec, of_keys, models[spec.label])
            failed = sum(_has_failed(failures, kind, (spec.label, text, *key)) for key in asked - done)
            parts.append(Part(spec.label, text, scope, len(asked), len(asked & done), failed))
            if kind is Measurement:
                left += [(spec.label, key) for key in asked - done]
                shown.append({key[:3] for key in asked})
        rate, remaining = _rate_and_seconds(store, left)
        if remaining is not None and left:
            remaining += sum(after_measuring(plan, remaining, figure_count(shown)))
        ended = not runs or runs[-1].finished is not None
        if any(part.planned is None for part in parts) or not (left or ended):
            remaining = None
        return replace(known, parts=tuple(parts), rate=rate, remaining=remaining)


def _stored_parts(store: Store, failures: Iterable[Failure]) -> tuple[Part, ...]:
    """Count the measurements and the failures in a store, without a plan."""
    done = Counter(key[:3] for key in store.keys(Measurement, ("model", "text", *KEY_COLUMNS)))
    # A failure of a whole model or text has None for what it does not restrict.
    failed = Counter(
        (row.model, row.text or "all", row.scope or "all")
        for row in failures
        if row.what == Measurement.table
    )
    return tuple(
        Part(model, text, scope, None, done[model, text, scope], failed[model, text, scope])
        for model, text, scope in sorted(done | failed)
    )


def _done(store: Store, plan: Plan, label: str, text: str, kind: type[Row]) -> frozenset[Key]:
    """Return the keys of the stored rows of one class that belong to one model and one text.

    A layer and a sequence count as done if the store has all their values of the published code.
    """
    if kind is Measurement:
        return store.keys(Measurement, KEY_COLUMNS, model=label, text=text)
    # The quantity with all items is written together with all others, so it stands for them.
    columns = ("layer", "n", "sample", "items")
    whole = store.keys(PublishedValue, columns, model=label, text=text, quantity=PUBLISHED)
    wanted = {word.strip() for word in plan.as_published.split(",")}
    return frozenset(
        ("attention", layer, None, n, sample)
        for layer, n, sample, items in whole
        if wanted in ({"all"}, set(items.split(",")))
    )


def _has_failed(failures: Iterable[Failure], kind: type[Row], place: tuple[object, ...]) -> bool:
    """Return whether the computation of a missing row failed when it was last tried.

    The failure may be recorded for this row alone, or for its whole layer, text or model.
    """
    return any(
        row.what == kind.table
        and all(
            said in (None, here)
            for said, here in zip((getattr(row, name) for name in PLACE), place, strict=True)
        )
        for row in failures
    )


def _rate_and_seconds(store: Store, left: list[tuple[str, Key]]) -> tuple[float | None, float | None]:
    """Return the speed of the last run in measurements per second, and the remaining time at this speed.

    Runs without a measurement are skipped. Both numbers are None if no run has measured anything.
    """
    rows, bounds = store.table(Measurement), store.table(Bounding)
    mine = rows[rows["run"] == rows["run"].max()]
    last = next((run for run, _ in store.rows(Run) if len(mine) and run.id == mine["run"].iloc[0]), None)
    if last is None or last.worked <= 0:
        return None, None
    times, done = TaskTimes(), Counter[tuple[Any, int]]()
    for row in mine.itertuples():
        alike = (Measurement.table, row.model, row.scope)
        times.learn(alike, row.n, 1, row.seconds)
        done[alike, row.n] += 1
    # The time of the run without bounds includes capturing. The seconds of a bound are those of
    # all bounds on its attention.
    bounding = bounds[bounds["run"] == last.id].drop_duplicates(list(PLACE))["seconds"].sum()
    missing = Counter(((Measurement.table, label, key[0]), key[3]) for label, key in left)
    return len(mine) / last.worked, times.left(max(last.worked - bounding, 0.0), done, missing)


def _asked(plan: Plan, spec: ModelSpec, scope: str, model: ModelRecord) -> frozenset[Key]:
    heads = plan.heads_of(spec).resolve(model.heads, spec.label, "heads") if scope == "head" else (None,)
    layers = plan.layers_of(spec).resolve(model.layers, spec.label, "layers")
    return keys_of(scope, layers_of_scope(scope, layers), heads, plan.lengths_of(spec), plan.samples)
