"""Merge the stores of one study that several machines made. At a conflict, nothing is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.records import (
    MEASURE,
    PLACE,
    Bounding,
    Failure,
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
from howsmooth.study.text_windows import overlapping

__all__ = ["Merged", "merge_stores"]

_KINDS: tuple[type[Row], ...] = (
    ModelRecord, TextRecord, InputRecord, Measurement, SequenceRecord, Sensitivity, Bounding, PublishedValue,
    Failure,
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
    """How many measurements a merge of stores added or found already there, and how many the store holds.

    ``same`` counts measurements that the store or an earlier source had already, ``total`` the measurements
    after the merge, ``failures`` the failures whose measurements are still missing, and ``published`` the
    added values of the published code.
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
    values without an interval must differ by less than 1 %. Of bounds and sensitivities, the first is kept
    without a comparison.

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
    union = _Union()
    with ExitStack() as stack:
        target = stack.enter_context(Store.open(folder)) if Store.exists(folder) else None
        if target is not None:
            union.take(folder, target, there=True)
        had, seen = {kind: len(union.rows[kind]) for kind in (Measurement, PublishedValue)}, 0
        for source in folders:
            with Store.open(source, write=False) as store:
                union.take(source, store)
                seen += store.count(Measurement)
        # Compare all stores before writing, so that a conflict creates no folder.
        union.check()
        # The target is created only now; its rows are in the union already if it existed.
        target = target or stack.enter_context(Store.open(folder))
        union.write(target)
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


class _StoredRow(NamedTuple):
    """A row to merge, with the identifier of the run that computed it and the folder of its store.

    ``there`` says whether the target store has the row.
    """

    row: Any
    token: str
    path: Path
    there: bool


class _Union:
    """Collects the rows of several stores for a merge.

    Of rows with the same key it keeps the first, and compares the others with it.
    """

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}
        self.rows: dict[type[Row], dict[tuple[Any, ...], _StoredRow]] = {kind: {} for kind in _KINDS}
        self._runs: dict[str, Run] = {}
        self._identified_by = Path()

    def take(self, path: Path, store: Store, *, there: bool = False) -> None:
        """Add the rows of a store to the merge, and compare rows that have the same key.

        ``there`` marks the rows of the target store.

        Raises
        ------
        StoreError
            If a row conflicts with an earlier one.

        """
        identity = store.identity(MEASURE)
        if not self.identity:
            self.identity, self._identified_by = identity, path
        for name, value in identity.items():
            if self.identity[name] != value:
                what = f"its {name.replace('_', '-')} is {value}"
                raise _conflict(path, self._identified_by, what, self.identity[name])
        runs = {run.id: run for run, _ in store.rows(Run)}
        # Runs are told apart by their tokens, because every store counts its runs from 1.
        self._runs |= {run.token: run for run in runs.values() if run.token not in self._runs}
        bounded = {key[: len(PLACE)] for key in self.rows[Bounding]}
        for kind in _KINDS:
            for row, number in store.rows(kind):
                # The bounds of an attention at a sequence belong together: keep the bounds of one store only.
                if kind is Bounding and _values(row, PLACE) in bounded:
                    continue
                token = runs[number].token if number in runs else ""
                self._add(_StoredRow(row, token, path, there))

    def _add(self, new: _StoredRow) -> None:
        kind = type(new.row)
        # The first row with a key stays; a later one must agree with it.
        first = self.rows[kind].setdefault(_values(new.row, new.row.key), new)
        for name in _SAME.get(kind, ()):
            here, there = getattr(new.row, name), getattr(first.row, name)
            if here != there:
                what = f"{_shown(new.row)} has {name.replace('_', ' ')} {here}"
                raise _conflict(new.path, first.path, what, there)
        if kind in (Measurement, PublishedValue):
            _check_agreement(new, first)

    def check(self) -> None:
        """Check that the rows of all stores could belong to one study.

        Raises
        ------
        StoreError
            If there is nothing to merge, a model has two fingerprints, or sequences overlap.

        """
        if not self.identity:
            raise StoreError("there is nothing to merge: none of the stores holds a study.")
        prints: dict[str, tuple[str, Path]] = {}
        for (label, _), one in self.rows[InputRecord].items():
            # The tokenizer of an untrained model may be trained on the text, so its fingerprint depends on
            # the text. Any other model has one fingerprint.
            if not self.rows[ModelRecord][(label,)].row.random_init:
                first, where = prints.setdefault(label, (one.row.fingerprint, one.path))
                if first != one.row.fingerprint:
                    what = f"fingerprint of the model {label!r} is {one.row.fingerprint}"
                    raise _conflict(one.path, where, what, first)
        self._refuse_overlaps()

    def _refuse_overlaps(self) -> None:
        """Refuse sequences of one model and text that overlap, which never happens in a single store."""
        places: dict[tuple[str, str], set[tuple[int, int]]] = {}
        for kind in (Measurement, PublishedValue, Bounding):
            for row in (one.row for one in self.rows[kind].values()):
                places.setdefault((row.model, row.text), set()).add((row.start, row.n))
        for (model, text), windows in places.items():
            # For images, `start` is the number of the image, so windows cannot overlap.
            if self.rows[TextRecord][(text,)].row.kind != "images" and overlapping(windows):
                raise StoreError(
                    f"the stores cannot be merged: sequences of {text!r} with {model!r} overlap, since each "
                    "store arranged its own lengths and samples. Give every machine all lengths and samples, "
                    "and share out models, texts, layers, heads or scopes. Nothing was written."
                )

    def write(self, target: Store) -> None:
        """Write the merged rows that the target store does not have, in one transaction."""
        with target.transaction():
            target.begin(MEASURE, self.identity)
            numbers = {run.token: run.id for run, _ in target.rows(Run)}
            for token, run in self._runs.items():
                if token not in numbers:
                    # A run from another store gets the next number of the target.
                    numbers[token] = max(numbers.values(), default=0) + 1
                    target.add([replace(run, id=numbers[token])])
            for kind in _KINDS:
                by_run: dict[int | None, list[Row]] = {}
                for one in self.rows[kind].values():
                    if not one.there:
                        by_run.setdefault(numbers.get(one.token), []).append(one.row)
                for number, rows in by_run.items():
                    target.add(rows, number)
            target.drop_failures_made_good()


def _check_agreement(new: _StoredRow, old: _StoredRow) -> None:
    """Check that two rows of the same measurement agree in their values."""
    row, first = new.row, old.row
    if row.lower is None or first.lower is None:
        if abs(row.lipschitz - first.lipschitz) > _CLOSE * abs(first.lipschitz):
            what = f"{_shown(row)} has the value {row.lipschitz}"
            raise _conflict(new.path, old.path, what, first.lipschitz)
    elif max(first.lower, row.lower) > min(first.upper, row.upper):
        what = f"{_shown(row)} has the interval [{row.lower}, {row.upper}]"
        there = f"[{first.lower}, {first.upper}], which it does not meet"
        raise _conflict(new.path, old.path, what, there)


def _conflict(path: Path, where: Path, what: str, other: object) -> StoreError:
    return StoreError(
        f"{path} cannot be merged with {where}: {what}, and there {other}. Merge studies with the same "
        "settings, texts, lengths and samples. Nothing was written."
    )


def _shown(row: Row) -> str:
    """Return words that identify a row: its table and its key."""
    words = [f"{name} {getattr(row, name)}" for name in row.key if getattr(row, name) is not None]
    return f"the same row of {row.table} ({', '.join(words)})"


def _values(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in names)
