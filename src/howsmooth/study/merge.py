"""Put the stores of one study, made on several machines, together: all of it or, at a conflict, nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.records import (
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
from howsmooth.study.sequences import overlapping
from howsmooth.study.store import Store
from howsmooth.study.subjects import MEASURE

__all__ = ["Merged", "merge_stores"]

_KINDS: tuple[type[Row], ...] = (
    ModelRecord, TextRecord, InputRecord, Measurement, SequenceRecord, Sensitivity, Bounding, PublishedValue,
    Failure,
)  # fmt: skip

# What must agree for two rows under one key to be the same thing.
_SAME: dict[type[Row], tuple[str, ...]] = {
    ModelRecord: ("layers", "heads", "random_init", "as_decoder"),
    TextRecord: ("digest",),
    InputRecord: ("fingerprint",),
    Measurement: ("causal", "seed", "start", "dtype", "method", "masking"),
    PublishedValue: ("seed", "start", "map"),
}
# The published iteration has no interval; its rule may end it a step sooner on another machine.
_CLOSE = 1e-2


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    Attributes
    ----------
    added, same
        Measurements that came in, and those that the store or an earlier source had.
    total
        Measurements in the store now.
    failures
        Failures in the store that no measurement has made good.
    published
        Published values that came in.

    """

    added: int
    same: int
    total: int
    failures: int
    published: int = 0


def merge_stores(sources: Sequence[Path], folder: Path) -> Merged:
    """Copy all measurements, published values, bounds, runs and failures of some stores into one.

    A measurement that two stores have is kept once, the one that came first, if both have the same seed and
    sequence and their intervals overlap; a published value without an interval, if they differ by less than
    1 %. The first of the bounds and of the sensitivities is kept.

    Parameters
    ----------
    sources
        Folders with a store, or the files themselves. They are only read.
    folder
        Of the store that takes everything; made if it is not there, else added to.

    Raises
    ------
    StoreError
        If a store cannot be read, or two of them are in conflict: another identity, another model or text
        under the same name, or another value for the same measurement. Nothing is written then.
    ArgumentError
        If there are no sources, or one of them is the folder.

    """
    folders = [path.parent if path.is_file() else path for path in sources]
    _check_folders(folders, folder)
    union = _Union()
    with ExitStack() as stack:
        target = stack.enter_context(Store.open(folder)) if Store.exists(folder) else None
        if target is not None:
            union.take(folder, target, there=True)
        had = {kind: len(union.rows[kind]) for kind in (Measurement, PublishedValue)}
        seen = sum(_taken(union, source) for source in folders)
        # All are held against each other first, so that a conflict makes no folder.
        union.check()
        target = target or stack.enter_context(Store.open(folder))
        union.write(target)
        total = target.count(Measurement)
        return Merged(
            added=total - had[Measurement],
            same=seen - (total - had[Measurement]),
            total=total,
            failures=target.count(Failure),
            published=target.count(PublishedValue) - had[PublishedValue],
        )


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


def _taken(union: _Union, folder: Path) -> int:
    """Take a store into the union, and return how many measurements it has."""
    with Store.open(folder, write=False) as store:
        union.take(folder, store)
        return store.count(Measurement)


@dataclass(frozen=True, eq=False)
class _Taken:
    """A row of a store: the token of its run, where it came from, and whether the target has it."""

    row: Any
    token: str
    path: Path
    there: bool


class _Union:
    """All rows of some stores, the first of each kept and the others held against it."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}
        self.rows: dict[type[Row], dict[tuple[Any, ...], _Taken]] = {kind: {} for kind in _KINDS}
        self._runs: dict[str, Run] = {}
        self._identified_by = Path()
        self._bounded: set[tuple[Any, ...]] = set()

    def take(self, path: Path, store: Store, *, there: bool = False) -> None:
        """Add the rows of a store; those of the target are ``there`` already.

        Raises
        ------
        StoreError
            If a row is in conflict with an earlier one.

        """
        self._identify(path, store.identity(MEASURE))
        runs = {run.id: run for run, _ in store.rows(Run)}
        self._runs |= {run.token: run for run in runs.values() if run.token not in self._runs}
        bounded = set(self._bounded)
        for kind in _KINDS:
            for row, number in store.rows(kind):
                # All bounds of an attention are written together, so that they come together too.
                if kind is Bounding and _values(row, PLACE) in bounded:
                    continue
                token = runs[number].token if number in runs else ""
                self._add(_Taken(row, token, path, there))
        self._bounded |= {key[: len(PLACE)] for key in self.rows[Bounding]}

    def _identify(self, path: Path, identity: dict[str, Any]) -> None:
        if not self.identity:
            self.identity, self._identified_by = identity, path
        for name, value in identity.items():
            if self.identity[name] != value:
                what = name.replace("_", "-")
                raise _conflict(path, self._identified_by, f"its {what} is {value}", self.identity[name])

    def _add(self, new: _Taken) -> None:
        kind = type(new.row)
        first = self.rows[kind].setdefault(_values(new.row, new.row.key), new)
        for name in _SAME.get(kind, ()):
            here, there = getattr(new.row, name), getattr(first.row, name)
            if here != there:
                what = f"{_shown(new.row)} has {name.replace('_', ' ')} {here}"
                raise _conflict(new.path, first.path, what, there)
        if kind in (Measurement, PublishedValue):
            _hold(new, first)

    def check(self) -> None:
        """Refuse what no store of one study could hold.

        Raises
        ------
        StoreError
            If there is nothing to merge, a model is two, or sequences overlap.

        """
        if not self.identity:
            raise StoreError("there is nothing to merge: no study was begun in any of the stores.")
        prints: dict[str, tuple[str, Path]] = {}
        for (label, _), one in self.rows[InputRecord].items():
            # An untrained model's tokenizer may be trained on the text; any other model is one.
            if not self.rows[ModelRecord][(label,)].row.random_init:
                first, where = prints.setdefault(label, (one.row.fingerprint, one.path))
                if first != one.row.fingerprint:
                    what = f"fingerprint of the model {label!r} is {one.row.fingerprint}"
                    raise _conflict(one.path, where, what, first)
        self._keep_apart()

    def _keep_apart(self) -> None:
        """Refuse sequences that overlap, since no store has any."""
        places: dict[tuple[str, str], set[tuple[int, int]]] = {}
        for kind in (Measurement, PublishedValue, Bounding):
            for row in (one.row for one in self.rows[kind].values()):
                places.setdefault((row.model, row.text), set()).add((row.start, row.n))
        for (model, text), windows in places.items():
            # Of images, what stands for the first token is the number of the image.
            if self.rows[TextRecord][(text,)].row.kind != "images" and overlapping(windows):
                raise StoreError(
                    f"the stores cannot be merged: sequences of {text!r} with {model!r} overlap, since each "
                    "store arranged its own lengths and samples. Give every machine all lengths and samples, "
                    "and share out models, texts, layers, heads or scopes. Nothing was written."
                )

    def write(self, target: Store) -> None:
        """Write what the target does not have, in one transaction."""
        with target.transaction():
            target.begin(MEASURE, self.identity)
            numbers = {run.token: run.id for run, _ in target.rows(Run)}
            for token, run in self._runs.items():
                if token not in numbers:
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


def _hold(new: _Taken, old: _Taken) -> None:
    """Hold the values of two rows against each other that should be the same measurement."""
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
        f"{path} cannot be merged with {where}: {what}, and there {other}. Nothing was written."
    )


def _shown(row: Row) -> str:
    """Say which row it is."""
    words = [f"{name} {getattr(row, name)}" for name in row.key if getattr(row, name) is not None]
    return f"the same row of {row.table} ({', '.join(words)})"


def _values(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in names)
