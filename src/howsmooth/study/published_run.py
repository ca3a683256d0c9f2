"""The published quantity beside the corrected one, at the same sequences: measured into ``published.csv``.

For every sequence and layer: the corrected constant, the corrected one with each item of the published
code alone, and all items together. What the file has is not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from filelock import FileLock, Timeout

from howsmooth.errors import ArgumentError, StoreError
from howsmooth.models import LoadedModel
from howsmooth.published import PublishedLayer, capture_layers, items_that_apply, measure_layer
from howsmooth.study.plan import Plan, derive_seed
from howsmooth.study.prepare import Models, Subject, place_sequences, prepare
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.publish import write_table
from howsmooth.study.published_rows import FILE, PUBLISHED_COLUMNS, quantities, read_rows
from howsmooth.study.run import batch_size, measurement_cost
from howsmooth.study.tools import Tools

__all__ = ["run_as_published"]

_SETTINGS = "published.json"
_PATIENCE = 1.0  # seconds
_KEY = ("model", "text", "layer", "n", "sample", "quantity", "items")


@dataclass(frozen=True)
class _Batch:
    subject: Subject
    n: int
    starts: dict[int, int]
    """First tokens of the samples."""
    wanted: dict[int, dict[str, tuple[str, ...]]]
    """For each layer the quantities, with their items."""
    rows: int

    @property
    def cost(self) -> float:
        return self.rows * measurement_cost(self.n)


def run_as_published(
    plan: Plan,
    items: Sequence[str] | None,
    folder: Path,
    tools: Tools,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measure what ``published.csv`` in ``folder`` does not have yet; it is written after every length.

    Parameters
    ----------
    plan
        What to measure, with the scope ``attention``: that of the corrected quantity.
    items
        Of ``howsmooth.published.ITEMS``; None for all that apply to each model.
    folder
        Made once every check has passed.
    tools
        What texts and models are loaded with.
    on_progress
        Called before the first and after every batch.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible or an item does not apply, before anything is measured; or if the
        folder holds rows of other settings, or cannot be written.

    """
    began = time.perf_counter()
    if plan.scopes != ("attention",):
        raise ArgumentError(
            "scope",
            expected="attention together with --as-published",
            got=", ".join(plan.scopes),
            remedy="The published scope is one of its items, block.",
        )
    _there(folder, plan)  # what cannot be continued is refused before a model is loaded
    models = Models(plan, tools)
    subjects = prepare(plan, tools, models)
    wanted = [_wanted(one, models, items, plan) for one in subjects]
    with _only_writer(folder):
        planned, kept, unsettled = _carry_out(plan, subjects, wanted, folder, models, on_progress)
    return Outcome(planned, kept, unsettled, time.perf_counter() - began)


def _carry_out(
    plan: Plan,
    subjects: Sequence[Subject],
    wanted: Sequence[dict[int, dict[str, tuple[str, ...]]]],
    folder: Path,
    models: Models,
    on_progress: Callable[[Progress], None],
) -> tuple[int, int, int]:
    """Measure what is missing; count the rows measured, those there before, and the unconverged."""
    kept, inputs = _there(folder, plan)
    placed = [place_sequences(plan, one, _held(kept, one)) for one in subjects]
    _write_settings(folder, plan, subjects, inputs)
    known = set(kept[list(_KEY)].itertuples(index=False, name=None))
    batches = [
        batch
        for subject, layers, starts in zip(subjects, wanted, placed, strict=True)
        for batch in _work(plan, subject, layers, starts, known)
    ]
    asked = (
        sum(len(found) for layers in wanted for found in layers.values()) * len(plan.lengths) * plan.samples
    )
    planned = sum(batch.rows for batch in batches)
    total = sum(batch.cost for batch in batches)
    done, cost, unsettled = 0, 0.0, 0
    for batch in batches:
        where = (batch.subject.model.label, batch.subject.text.name, batch.n, "attention")
        on_progress(Progress(done, planned, asked - planned, cost, total, *where, -1))
        rows = pd.DataFrame(list(_measure(plan, batch, models)), columns=list(PUBLISHED_COLUMNS))
        kept = rows if kept.empty else pd.concat([kept, rows]).drop_duplicates(list(_KEY))
        kept = kept.sort_values(list(_KEY[:5]), kind="stable", ignore_index=True)
        write_table(kept, folder, FILE)
        done, cost = done + batch.rows, cost + batch.cost
        unsettled += int((~rows["settled"] & rows["lower"].notna()).sum())
        on_progress(Progress(done, planned, asked - planned, cost, total, *where, -1))
    return planned, asked - planned, unsettled


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes from writing its rows."""
    lock = FileLock(folder / ".published.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_PATIENCE)
    except Timeout as error:
        raise StoreError(
            f"{folder} is in use by another howsmooth process. Wait until it ends, or choose another --out."
        ) from error
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another --out."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _there(folder: Path, plan: Plan) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the rows that are there, and what they were made of; none of either if there are none."""
    if not (folder / FILE).exists():
        return pd.DataFrame(columns=list(PUBLISHED_COLUMNS)), {}
    return read_rows(folder), _settings_of(folder, plan)


def _wanted(
    subject: Subject, models: Models, items: Sequence[str] | None, plan: Plan
) -> dict[int, dict[str, tuple[str, ...]]]:
    """Return the quantities of each layer, found at the shortest length."""
    tokens = subject.tokens[: min(plan.lengths)].unsqueeze(0).to(plan.device)
    model = cast("LoadedModel", models.load_for(subject))
    found = capture_layers(model, tokens, list(subject.layers), training=False, seeds=[0])
    untrained = subject.spec.random_init
    return {
        one.attention.layer: quantities(items_that_apply(one, items, untrained=untrained)) for one in found
    }


def _held(rows: pd.DataFrame, subject: Subject) -> dict[tuple[int, int], int]:
    """Return the first tokens of the sequences that were measured, by length and sample."""
    mine = rows[(rows["model"] == subject.model.label) & (rows["text"] == subject.text.name)]
    return {
        (int(n), int(sample)): int(start)
        for n, sample, start in mine[["n", "sample", "start"]].itertuples(index=False)
    }


def _settings_of(folder: Path, plan: Plan) -> dict[str, str]:
    """Hold the settings of the rows that are there against the plan's, and return what they were made of.

    Raises
    ------
    StoreError
        If they differ, or cannot be read.

    """
    path = folder / _SETTINGS
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        settings, inputs = dict(there["settings"]), dict(there["inputs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} says what the published rows were made with, and cannot be read. Choose another --out."
        ) from error
    for name, value in asdict(plan.identity).items():
        if settings.get(name) != value:
            raise StoreError(
                f"{folder} holds published rows made with {name} {settings.get(name)}, not {value}. Choose "
                "another --out."
            )
    return inputs


def _write_settings(folder: Path, plan: Plan, subjects: Sequence[Subject], there: dict[str, str]) -> None:
    """Write what the rows depend on beside them.

    Raises
    ------
    StoreError
        If a model or a text is not what it was, or the file cannot be written.

    """
    inputs = dict(there)
    for one in subjects:
        name = f"{one.model.label} on {one.text.name}"
        now = f"{one.fingerprint} {one.text.digest}"
        if inputs.setdefault(name, now) != now:
            raise StoreError(
                f"{folder} holds published rows of {name} with other weights or another text. Choose another "
                "--out."
            )
    path = folder / _SETTINGS
    content = json.dumps({"settings": asdict(plan.identity), "inputs": inputs}, indent=2, sort_keys=True)
    try:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another --out."
        ) from error


def _work(
    plan: Plan,
    subject: Subject,
    wanted: dict[int, dict[str, tuple[str, ...]]],
    starts: dict[tuple[int, int], int],
    known: set[tuple[Any, ...]],
) -> Iterator[_Batch]:
    for n in sorted(plan.lengths):
        size = batch_size(subject.model.heads, n, plan.dtype)
        for first in range(0, plan.samples, size):
            samples = range(first, min(first + size, plan.samples))
            missing = {
                (layer, sample)
                for layer, found in wanted.items()
                for sample in samples
                for name, items in found.items()
                if (subject.model.label, subject.text.name, layer, n, sample, name, ",".join(items))
                not in known
            }
            layers = {layer: wanted[layer] for layer in sorted({layer for layer, _ in missing})}
            left = {sample: starts[n, sample] for sample in sorted({sample for _, sample in missing})}
            if left:
                yield _Batch(subject, n, left, layers, len(left) * sum(map(len, layers.values())))


def _measure(plan: Plan, batch: _Batch, models: Models) -> Iterator[dict[str, Any]]:
    subject, n = batch.subject, batch.n
    model = cast("LoadedModel", models.load_for(subject))
    axes: dict[str, Any] = {
        "seed": plan.seed, "text": subject.text.digest, "model": subject.fingerprint, "n": n
    }  # fmt: skip
    tokens = torch.stack([subject.tokens[start : start + n] for start in batch.starts.values()])
    passes = [derive_seed(purpose="dropout", sample=one, **axes) for one in batch.starts]
    training = any("dropout" in items for found in batch.wanted.values() for items in found.values())
    captured: list[PublishedLayer] = capture_layers(
        model, tokens.to(plan.device), list(batch.wanted), training=training, seeds=passes
    )
    for one in captured:
        layer = one.attention.layer
        # As in the study, so that the corrected quantity is the very number that `howsmooth measure` gives
        place: dict[str, Any] = {"scope": "attention", "layer": layer, "head": None, **axes}
        seeds = [derive_seed(purpose="start", sample=sample, **place) for sample in batch.starts]
        for name, items in batch.wanted[layer].items():
            found = measure_layer(
                one, items, seeds=seeds, rtol=plan.rtol, confidence=plan.confidence,
                max_iterations=plan.max_iterations,
            )  # fmt: skip
            for slot, sample in enumerate(batch.starts):
                yield {
                    "model": subject.model.label,
                    "text": subject.text.name,
                    "layer": layer,
                    "n": n,
                    "sample": sample,
                    "quantity": name,
                    "items": ",".join(items),
                    "lipschitz": float(found.value[slot]),
                    "lower": float(found.lower[slot]),
                    "upper": float(found.upper[slot]),
                    "settled": bool(found.settled[slot]),
                    "steps": int(found.steps[slot]),
                    "radius_mean": float(one.attention.radius_mean[slot]),
                    "start": batch.starts[sample],
                    "seed": seeds[slot],
                    "map": found.map,
                }
