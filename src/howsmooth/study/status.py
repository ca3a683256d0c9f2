"""How far a study is, from its store alone: no model is loaded, and a run at work is not disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from howsmooth.study.pace import Pace
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.published_rows import PUBLISHED
from howsmooth.study.records import (
    KEY_COLUMNS,
    PLACE,
    Failure,
    Key,
    Measurement,
    ModelRecord,
    PublishedValue,
    Row,
    Run,
    keys_of,
)
from howsmooth.study.store import Store
from howsmooth.study.subjects import MEASURE

__all__ = ["Part", "Status", "status"]


@dataclass(frozen=True)
class Part:
    """How far one model, text and scope are; or, as the scope ``as published``, its published values.

    ``planned`` is ``None`` as long as no run has loaded the model, and so nobody knows its layers. ``failed``
    counts what is not done and failed when it was last tried. Of published values the sequences of layers are
    counted: all values of one are written together.
    """

    model: str
    text: str
    scope: str
    planned: int | None
    done: int
    failed: int


@dataclass(frozen=True)
class Status:
    """How far a study is.

    Attributes
    ----------
    parts
        One a model, text and scope, in the order of the plan.
    running
        Whether a process is writing into the store.
    started, finished
        When the last run began, and when it had tried everything, ISO 8601; ``None`` if it did not.
    rate
        Measurements a second of the last run, by a clock that does not jump; ``None`` before the first.
    remaining
        Seconds until all is measured, at the pace of the last run and longer sequences taking longer;
        ``None`` if that cannot be said.
    reasons
        Why something failed that is not done, with how often; the most frequent first.

    """

    parts: tuple[Part, ...]
    running: bool
    started: str | None
    finished: str | None
    rate: float | None
    remaining: float | None
    reasons: tuple[tuple[str, int], ...]


def status(plan: Plan, texts: Iterable[str], folder: Path) -> Status:
    """Compare a plan with its store.

    Parameters
    ----------
    plan
        What is to be measured.
    texts
        Names under which its texts are stored.
    folder
        Of the store; it need not be there yet.

    Raises
    ------
    StoreError
        If the store cannot be read or belongs to another study.

    """
    scopes = (*plan.scopes, *([PUBLISHED] if plan.as_published else []))
    where = [(spec, text, scope) for spec in plan.models for text in texts for scope in scopes]
    if not Store.exists(folder):
        parts = tuple(Part(spec.label, text, scope, None, 0, 0) for spec, text, scope in where)
        return Status(parts, False, None, None, None, None, ())
    running = Store.in_use(folder)
    with Store.open(folder, write=False) as store:
        store.check(MEASURE, plan.settings())
        look = _Look(plan, store)
        parts = tuple(look.part(*one) for one in where)
        runs = [run for run, _ in store.rows(Run)]
        rate, remaining = look.rate_and_remaining(
            runs, certain=all(part.planned is not None for part in parts)
        )
        return Status(
            parts=parts,
            running=running,
            started=runs[-1].started if runs else None,
            finished=runs[-1].finished if runs else None,
            rate=rate,
            remaining=remaining,
            reasons=tuple(Counter(row.error for row, _ in store.rows(Failure)).most_common()),
        )


class _Look:
    """Holds a plan against a store."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan = plan
        self._store = store
        self._models = {model.label: model for model, _ in store.rows(ModelRecord)}
        self._failures = [row for row, _ in store.rows(Failure)]
        self._missing: list[tuple[str, Key]] = []

    def part(self, spec: ModelSpec, text: str, scope: str) -> Part:
        """Count what is planned, done and failed of one model, text and scope."""
        model = self._models.get(spec.label)
        if model is None:
            return Part(spec.label, text, scope, None, 0, 0)
        if scope == PUBLISHED:
            asked = _asked(self._plan.of_attention, spec, "attention", model)
            return self._counted(
                spec.label, text, scope, asked, self._published(spec.label, text), PublishedValue
            )
        asked = _asked(self._plan, spec, scope, model)
        done = self._store.keys(Measurement, KEY_COLUMNS, model=spec.label, text=text)
        self._missing += [(spec.label, key) for key in asked - done]
        return self._counted(spec.label, text, scope, asked, done, Measurement)

    def _counted(
        self,
        label: str,
        text: str,
        scope: str,
        asked: frozenset[Key],
        done: frozenset[Key],
        kind: type[Row],
    ) -> Part:
        failed = sum(self._has_failed(kind, (label, text, *key)) for key in asked - done)
        return Part(label, text, scope, len(asked), len(asked & done), failed)

    def _published(self, label: str, text: str) -> frozenset[Key]:
        """List the sequences of layers that have all their published values."""
        columns = ("layer", "n", "sample", "items")
        whole = self._store.keys(PublishedValue, columns, model=label, text=text, quantity=PUBLISHED)
        wanted = {word.strip() for word in self._plan.as_published.split(",")}
        return frozenset(
            ("attention", layer, None, n, sample)
            for layer, n, sample, items in whole
            if wanted in ({"all"}, set(items.split(",")))
        )

    def _has_failed(self, kind: type[Row], place: tuple[object, ...]) -> bool:
        """Whether a row that is missing is covered by a failure, of itself or of more."""
        return any(
            row.what == kind.table
            and all(
                said in (None, here)
                for said, here in zip((getattr(row, name) for name in PLACE), place, strict=True)
            )
            for row in self._failures
        )

    def rate_and_remaining(self, runs: list[Run], *, certain: bool) -> tuple[float | None, float | None]:
        """Return measurements a second of the last run that made some, and the seconds that are left."""
        rows = self._store.rows(Measurement)
        last = next((run for run in reversed(runs) if any(number == run.id for _, number in rows)), None)
        if last is None or last.worked <= 0:
            return None, None
        mine = [row for row, number in rows if number == last.id]
        pace = Pace()
        for row in mine:
            pace.learn((row.model, row.scope), row.n, 1, row.seconds)
        # Rows know the time of their estimates only; loading and capturing took the rest.
        more = last.worked / max(sum(row.seconds for row in mine), 1e-9)
        usual = sum(row.seconds for row in mine) / len(mine)
        each = (pace.a_row((label, key[0]), key[3]) for label, key in self._missing)
        left = more * sum(usual if seconds is None else seconds for seconds in each)
        return len(mine) / last.worked, left if certain else None


def _asked(plan: Plan, spec: ModelSpec, scope: str, model: ModelRecord) -> frozenset[Key]:
    heads = plan.heads_of(spec).resolve(model.heads, spec.label, "heads") if scope == "head" else (None,)
    layers = plan.layers_of(spec).resolve(model.layers, spec.label, "layers")
    return keys_of(scope, layers, heads, plan.lengths_of(spec), plan.samples)
