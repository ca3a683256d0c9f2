"""Merge the stores that several machines wrote for one study into one store. If two stores contradict each
other, nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.records import (
    MEASURE,
    PLACE,
    Bounding,
    Failure,
    FigureRow,
    InputRecord,
    Measurement,
    ModelRecord,
    PublishedValue,
    Row,
    Run,
    Sensitivity,
    SequenceRecord,
    TextRecord,
)
from howsmooth.study.store import Store
from howsmooth.study.window_placement import overlapping

__all__ = ["Merged", "merge_stores"]

_KINDS: tuple[type[Row], ...] = (
    ModelRecord, TextRecord, InputRecord, Measurement, SequenceRecord, Sensitivity, Bounding, PublishedValue,
    FigureRow, Failure,
)  # fmt: skip

# The columns in which two rows with the same key must agree.
_SAME: dict[type[Row], tuple[str, ...]] = {
    ModelRecord: ("layers", "heads", "random_init", "as_decoder"),
    TextRecord: ("digest",),
    InputRecord: ("fingerprint",),
    Measurement: ("causal", "seed", "start", "dtype", "method", "masking"),
    PublishedValue: ("seed", "start", "map"),
}
# Relative tolerance for values of the published power iteration. It has no interval, and on another machine
# its stopping rule may end it a step sooner.
_CLOSE = 1e-2


@dataclass(frozen=True)
class Merged:
    """How many measurements a merge of stores added and skipped, and how many the target store has now.

    ``added`` counts the added measurements, ``same`` the skipped measurements, which the store or an earlier
    source had already, ``total`` the measurements after the merge, ``failures`` the failures whose
    measurements are still missing, and ``published`` the added values of the published code.
    """

    added: int
    same: int
    total: int
    failures: int
    published: int = 0


def merge_stores(sources: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str]) -> Merged:
    """Copy the rows of several stores of one study into one store.

    The sources are folders with a store, or the store files themselves, and are only read. The target is
    created if needed; rows it already has are kept. If two stores have the same measurement, the first one is
    kept. Both must have the same seed and the same sequence, and their intervals must overlap. Two published
    values without an interval must differ by less than 1 %. The first bounds and the first sensitivities are
    kept without a comparison.

    Raises
    ------
    StoreError
        If a store cannot be read, or two stores conflict: they have different settings, another model or
        text under the same name, or another value for the same measurement. Then nothing is written.
    ArgumentError
        If there are no sources, or a source is the target folder.

    """
    folder = Path(folder)
    folders = [path.parent if path.is_file() else path for path in map(Path, sources)]
    _check_folders(folders, folder)
    with ExitStack() as stack:
        target = stack.enter_context(Store.open(folder)) if Store.exists(folder) else None
        stores = [stack.enter_context(Store.open(source, write=False)) for source in folders]
        # Compare all stores before writing, so that a conflict creates no folder.
        identity = _identity_of([*([target] if target else []), *stores])
        runs = {run.token: run for store in stores for run, _ in store.rows(Run)}
        had = {kind: target.count(kind) if target else 0 for kind in (Measurement, PublishedValue)}
        seen = sum(store.count(Measurement) for store in stores)
        rows = {kind: _united(kind, stores, target) for kind in _KINDS}
        _refuse_two_fingerprints(rows)
        _refuse_other_sequences(rows)
        target = target or stack.enter_context(Store.open(folder))
        with target.transaction():
            target.begin(MEASURE, identity)
            numbers = {run.token: run.id for run, _ in target.rows(Run)}
            for token, run in runs.items():
                if token not in numbers:
                    # A run from another store gets the next number of the target.
                    numbers[token] = max(numbers.values(), default=0) + 1
                    target.add([replace(run, id=numbers[token])])
            for table in rows.values():
                for owner, new in table[~table["there"]].groupby("token", sort=False):
                    target.add(new["row"], numbers.get(str(owner)))
            target.drop_failures_made_good()
        total = target.count(Measurement)
        added = total - had[Measurement]
        published = target.count(PublishedValue) - had[PublishedValue]
        return Merged(added, seen - added, total, target.count(Failure), published)


def _check_folders(folders: Sequence[Path], folder: Path) -> None:
    if not folders:
        raise ArgumentError("merge", expected="at least one store", got="none")
    for place, source in enumerate(folders):
        if not Store.exists(source):
            raise ArgumentError("merge", expected="folders with a store", got=f"{source}, which has none")
        if source.resolve() == folder.resolve():
            raise ArgumentError("out", expected="another folder than those merged", got=str(folder))
        if source.resolve() in (other.resolve() for other in folders[:place]):
            raise ArgumentError("merge", expected="each store once", got=f"{source} twice")


def _identity_of(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the settings of the study in the stores; raise StoreError if two stores differ in them."""
    studies = [(store, identity) for store in stores if (identity := store.identity(MEASURE))]
    if not studies:
        raise StoreError("there is nothing to merge: none of the stores holds a study.")
    first, settings = studies[0]
    for store, identity in studies:
        for name, value in identity.items():
            if settings.get(name) != value:
                what = f"its {name.replace('_', '-')} is {value}"
                raise _conflict(store.path.parent, first.path.parent, what, settings.get(name))
    return settings


def _united(kind: type[Row], stores: Sequence[Store], target: Store | None) -> pd.DataFrame:
    """Return the first row for each key among all stores, after comparing it with the other rows of that key.

    The returned table has the columns of the rows, and beside them ``row``, the row itself; ``token``, which
    identifies its run; ``path``, the folder of its store; and ``there``, whether the target has the row.
    """
    names = [*kind.columns(), "row", "token", "path", "there"]
    tables: list[pd.DataFrame] = []
    for store in [*([target] if target else []), *stores]:
        # Runs are told apart by their tokens, because every store counts its runs from 1.
        tokens = {run.id: run.token for run, _ in store.rows(Run)}
        found = [
            (*vars(row).values(), row, tokens.get(number or 0, ""), store.path.parent, store is target)
            for row, number in store.rows(kind)
        ]
        tables.append(pd.DataFrame(found, columns=names, dtype=object))
    rows = pd.concat(tables, ignore_index=True).astype({"there": bool})
    if kind is Bounding:
        # The bounds of an attention at a sequence belong together: keep the bounds of one store only.
        owner = rows.groupby(list(PLACE), dropna=False, sort=False)["path"].transform("first")
        rows = rows[rows["path"] == owner]
    return _first_of_each(rows, kind.key, _SAME.get(kind, ()))


def _first_of_each(rows: pd.DataFrame, key: Sequence[str], same: Sequence[str]) -> pd.DataFrame:
    """Return the first row of a table for each key, which is the tuple of the values in the columns ``key``.

    Raise StoreError if a later row with the same key differs in a column of ``same``, or disagrees in its
    value.
    """
    first = rows.drop_duplicates(list(key))
    pairs = rows.drop(first.index).merge(first, on=list(key), suffixes=("", "_first"))
    one: Any
    for name in same:
        for one in pairs[pairs[name] != pairs[f"{name}_first"]].itertuples():
            what = f"{_shown(one.row)} has {name.replace('_', ' ')} {getattr(one, name)}"
            raise _conflict(one.path, one.path_first, what, getattr(one, f"{name}_first"))
    for one in pairs.itertuples() if "lipschitz" in rows else ():
        _check_agreement(one.row, one.row_first, one.path, one.path_first)
    return first


def _refuse_two_fingerprints(rows: dict[type[Row], pd.DataFrame]) -> None:
    # The tokenizer of an untrained model may be trained on the text, so its fingerprint depends on the text.
    # Any other model has one fingerprint.
    models = rows[ModelRecord]
    trained = models[models["random_init"] == False]["label"]  # noqa: E712
    inputs = rows[InputRecord]
    _first_of_each(inputs[inputs["model"].isin(trained)], ["model"], ["fingerprint"])


_ARRANGED = (
    "since each store arranged its own lengths and samples. Give every machine all lengths and samples, and "
    "share out models, texts, layers, heads or scopes. Nothing was written."
)


def _refuse_other_sequences(rows: dict[type[Row], pd.DataFrame]) -> None:
    """Raise StoreError if a sequence begins at different tokens in two stores, or if two different sequences
    of the same text and model overlap.

    In a single store neither happens.
    """
    kinds = dict(rows[TextRecord][["name", "kind"]].itertuples(index=False, name=None))
    columns = ["model", "text", "n", "sample", "start"]
    placed = (Measurement, PublishedValue, Bounding, SequenceRecord)
    sequences = pd.concat([rows[kind][columns] for kind in placed]).drop_duplicates()
    twice = sequences[sequences.duplicated(columns[:-1], keep=False)]
    for (model, text, n, sample), starts in twice.groupby(columns[:-1])["start"]:
        raise StoreError(
            f"the stores cannot be merged: sequence {sample} of {n} tokens of {text!r} with {model!r} begins "
            f"at token {starts.iloc[0]} in one store and at token {starts.iloc[1]} in another, {_ARRANGED}"
        )
    for (model, text), windows in sequences.groupby(["model", "text"]):
        # For images, `start` is the number of the image, so windows cannot overlap.
        if kinds[text] != "images" and overlapping(zip(windows["start"], windows["n"], strict=True)):
            raise StoreError(
                f"the stores cannot be merged: sequences of {text!r} with {model!r} overlap, {_ARRANGED}"
            )


def _check_agreement(row: Any, first: Any, path: Path, where: Path) -> None:
    """Raise StoreError if two rows of the same measurement disagree in their values."""
    if row.lower is None or first.lower is None:
        if abs(row.lipschitz - first.lipschitz) > _CLOSE * abs(first.lipschitz):
            what = f"{_shown(row)} has the value {row.lipschitz}"
            raise _conflict(path, where, what, first.lipschitz)
    elif max(first.lower, row.lower) > min(first.upper, row.upper):
        what = f"{_shown(row)} has the interval [{row.lower}, {row.upper}]"
        there = f"[{first.lower}, {first.upper}], which it does not meet"
        raise _conflict(path, where, what, there)


def _conflict(path: Path, where: Path, what: str, other: object) -> StoreError:
    return StoreError(
        f"{path} cannot be merged with {where}: {what}, and there {other}. Merge studies with the same "
        "settings, texts, lengths and samples. Nothing was written."
    )


def _shown(row: Row) -> str:
    """Return words that identify a row: its table and its key."""
    words = [f"{name} {getattr(row, name)}" for name in row.key if getattr(row, name) is not None]
    return f"the same row of {row.table} ({', '.join(words)})"
