"""How far a study is, from its store alone: no model is loaded, and a run at work is not disturbed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from howsmooth.study.cost import measurement_cost
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.published_rows import PUBLISHED
from howsmooth.study.store import Contents, Key, Store

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


def status(plan: Plan, texts: Iterable[str], folder: Path, as_published: str = "") -> Status:
    """Compare a plan with its store.

    Parameters
    ----------
    plan
        What is to be measured.
    texts
        Names under which its texts are stored.
    folder
        Of the store; it need not be there yet.
    as_published
        Items in the words of a plan file; empty for none.

    Raises
    ------
    StoreError
        If the store cannot be read or belongs to another study.

    """
    names = list(texts)
    if not Store.exists(folder):
        parts = [
            Part(spec.label, text, scope, None, 0, 0)
            for spec in plan.models
            for text in names
            for scope in (*plan.scopes, *([PUBLISHED] if as_published else []))
        ]
        return Status(tuple(parts), False, None, None, None, None, ())
    running = Store.in_use(folder)
    with Store.open(folder, write=False) as store:
        contents = store.contents()
        store.check(replace(plan.identity, windows=contents.study.get("windows", plan.identity.windows)))
    rows = contents.measurements
    failures = _Open(contents.failures)
    known = {
        str(label): (int(layers), int(heads))
        for label, layers, heads in contents.models[["label", "layers", "heads"]].itertuples(index=False)
    }
    parts, cost_left, certain = [], 0.0, True
    for spec in plan.models:
        label = spec.label
        for text in names:
            here = rows[(rows["model"] == label) & (rows["text"] == text)]
            done = _keys(here)
            for scope in plan.scopes:
                if label not in known:
                    certain = False
                    parts.append(Part(label, text, scope, None, 0, 0))
                    continue
                asked = _asked(plan, spec, scope, *known[label])
                missing = asked - done
                heads = 1 if scope == "head" else known[label][1]
                cost_left += sum(measurement_cost(key[3], heads) for key in missing)
                failed = sum(failures.holds(label, text, key) for key in missing)
                parts.append(Part(label, text, scope, len(asked), len(asked) - len(missing), failed))
            if as_published:
                parts.append(_published_part(plan, spec, text, contents, known.get(label), as_published))
                certain = certain and parts[-1].planned == parts[-1].done
    rate, pace = _pace(contents)
    last = None if contents.runs.empty else contents.runs.iloc[-1]
    return Status(
        parts=tuple(parts),
        running=running,
        started=None if last is None else str(last["started"]),
        finished=None if last is None or pd.isna(last["finished"]) else str(last["finished"]),
        rate=rate,
        remaining=cost_left / pace if pace and certain else None,
        reasons=failures.reasons(),
    )


def _asked(plan: Plan, spec: ModelSpec, scope: str, layers: int, heads: int) -> frozenset[Key]:
    chosen = plan.heads_of(spec).resolve(heads, spec.label, "heads") if scope == "head" else (None,)
    return frozenset(
        (scope, layer, head, n, sample)
        for layer in plan.layers_of(spec).resolve(layers, spec.label, "layers")
        for head in chosen
        for n in plan.lengths_of(spec)
        for sample in range(plan.samples)
    )


def _published_part(
    plan: Plan, spec: ModelSpec, text: str, contents: Contents, known: tuple[int, int] | None, items: str
) -> Part:
    """Count the sequences of layers that have all their published values."""
    if known is None:
        return Part(spec.label, text, PUBLISHED, None, 0, 0)
    asked = {key[1:] for key in _asked(plan.of_attention, spec, "attention", *known)}
    rows = contents.published
    whole = (rows["model"] == spec.label) & (rows["text"] == text) & (rows["quantity"] == PUBLISHED)
    if items != "all":
        wanted = {word.strip() for word in items.split(",")}
        whole &= rows["items"].map(lambda words: set(words.split(",")) == wanted)
    places = rows.loc[whole, ["layer", "n", "sample"]].itertuples(index=False)
    done = {(int(layer), None, int(n), int(sample)) for layer, n, sample in places}
    failures = _Open(contents.failures, "published")
    failed = sum(failures.holds(spec.label, text, ("attention", *key)) for key in asked - done)
    return Part(spec.label, text, PUBLISHED, len(asked), len(asked & done), failed)


def _keys(rows: pd.DataFrame) -> frozenset[Key]:
    columns = rows[["scope", "layer", "head", "n", "sample"]].itertuples(index=False)
    return frozenset(
        (str(scope), int(layer), None if pd.isna(head) else int(head), int(n), int(sample))
        for scope, layer, head, n, sample in columns
    )


def _pace(contents: Contents) -> tuple[float | None, float | None]:
    """Measurements a second, and cost a second, of the last run that wrote something."""
    rows, runs = contents.measurements, contents.runs
    worked = runs[(runs["worked"].fillna(0) > 0) & runs["id"].isin(rows["run"])]
    if worked.empty:
        return None, None
    last = worked.iloc[-1]
    mine = rows[rows["run"] == last["id"]]
    heads = dict(zip(contents.models["label"], contents.models["heads"].astype(int), strict=True))
    columns = mine[["model", "scope", "n"]].itertuples(index=False)
    cost = sum(
        measurement_cost(int(n), 1 if scope == "head" else heads[model]) for model, scope, n in columns
    )
    return len(mine) / float(last["worked"]), cost / float(last["worked"])


class _Open:
    """Failures that nothing has shown to be over."""

    _COLUMNS = ("model", "text", "scope", "layer", "head", "n", "sample")

    def __init__(self, failures: pd.DataFrame, what: str = "measurement") -> None:
        self._table = failures[failures["resolved"].isna()]
        columns = self._table.loc[self._table["what"] == what, list(self._COLUMNS)].astype(object)
        rows = columns.where(columns.notna(), None)
        self._found = {tuple(row) for row in rows.itertuples(index=False)}
        self._reaches = {tuple(value is not None for value in row) for row in self._found}

    def holds(self, model: str, text: str, key: Key) -> bool:
        """Whether a measurement is covered by a failure, of itself or of more."""
        full = (model, text, *key)
        return any(
            tuple(value if said else None for value, said in zip(full, reach, strict=True)) in self._found
            for reach in self._reaches
        )

    def reasons(self) -> tuple[tuple[str, int], ...]:
        counts = self._table.drop_duplicates([*self._COLUMNS, "what"], keep="last")["error"].value_counts()
        return tuple((str(error), int(count)) for error, count in counts.items())
