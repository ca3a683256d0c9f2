"""Put the stores of one study, made on several machines, together: all of it or, at a conflict, nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.plan import Identity
from howsmooth.study.sequences import DISJOINT, overlapping
from howsmooth.study.store import (
    Bounding,
    Contents,
    Measurement,
    ModelRecord,
    PublishedValue,
    Sensitivity,
    SequenceRecord,
    Store,
    TextRecord,
)

__all__ = ["Merged", "merge_stores"]

Row = TypeVar("Row", Measurement, Bounding, PublishedValue)

# What must agree for two rows to be the same measurement, besides where they belong.
_SAME = ("causal", "seed", "start", "dtype", "method", "masking")
_SAME_PUBLISHED = ("seed", "start", "map")
_KEY = ("model", "text", "scope", "layer", "head", "n", "sample")
_PUBLISHED_KEY = ("model", "text", "layer", "n", "sample", "quantity", "items")

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
    if not folders:
        raise ArgumentError("merge", expected="at least one store", got="none")
    for place, source in enumerate(folders):
        if not Store.exists(source):
            raise ArgumentError("merge", expected="folders with a store", got=f"{source}, which has none")
        if source.resolve() == folder.resolve():
            raise ArgumentError("out", expected="another folder than those merged", got=str(folder))
        if source.resolve() in (other.resolve() for other in folders[:place]):
            raise ArgumentError("merge", expected="each store once", got=f"{source} twice")
    contents = [_contents(source) for source in folders]
    with ExitStack() as stack:
        if Store.exists(folder):
            target = stack.enter_context(Store.open(folder))
            before = target.contents()
            union = _Union((folder, before), *zip(folders, contents, strict=True))
        else:
            # Held against each other first, so that a conflict makes no folder.
            union = _Union(*zip(folders, contents, strict=True))
            target = stack.enter_context(Store.open(folder))
            before = target.contents()
        had = _Had(before)
        with target.transaction():
            target.add_study(union.identity)
            for record, text, given in union.inputs():
                target.add_input(record, text, **given)
            for one in contents:
                had.copy(target, one)
            target.resolve()
        after = target.contents()
    added = len(after.measurements) - len(before.measurements)
    return Merged(
        added=added,
        same=sum(len(one.measurements) for one in contents) - added,
        total=len(after.measurements),
        failures=int(after.failures["resolved"].isna().sum()),
        published=len(after.published) - len(before.published),
    )


def _contents(folder: Path) -> Contents:
    with Store.open(folder, write=False) as store:
        return store.contents()


class _Had:
    """What the target has; it grows by what is copied."""

    def __init__(self, before: Contents) -> None:
        self._measured = {_key(row) for row in _records(before.measurements)}
        # All bounds of a sequence are written together, so that they come together too.
        self._bounded = {_key(row) for row in _records(before.bounds)}
        self._published = {_published_key(row) for row in _records(before.published)}
        self._failures = {_failure_key(row) for row in _records(before.failures)}

    def copy(self, target: Store, one: Contents) -> None:
        """Write what the target does not have."""
        runs = {row["id"]: target.adopt_run(row) for row in _records(one.runs)}
        measured = self._new(one.measurements, self._measured, _key)
        shares = _shares(one.sensitivities)
        for run, rows in _by_run(measured).items():
            found = [shares[_key(row)] for row in rows if _key(row) in shares]
            target.add(
                _made(Measurement, rows),
                runs[run],
                sensitivities=[share for share, _ in found],
                sequences=list(
                    {(words.n, words.sample, words.model, words.text): words for _, words in found}.values()
                ),
            )
        for run, rows in _by_run(self._new(one.bounds, self._bounded, _key)).items():
            target.add_bounds(_made(Bounding, rows), runs[run])
        for run, rows in _by_run(self._new(one.published, self._published, _published_key)).items():
            target.add_published(_made(PublishedValue, rows), runs[run])
        for row in self._new(one.failures, self._failures, _failure_key):
            target.adopt_failure(row, runs[row["run"]])

    @staticmethod
    def _new(
        table: pd.DataFrame, had: set[tuple[Any, ...]], key: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    ) -> list[dict[str, Any]]:
        rows = [row for row in _records(table) if key(row) not in had]
        had.update(key(row) for row in rows)
        return rows


def _by_run(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["run"], []).append(row)
    return found


def _made(kind: type[Row], rows: Sequence[dict[str, Any]]) -> list[Row]:
    names = [field.name for field in fields(kind)]
    return [kind(**{name: row[name] for name in names}) for row in rows]


def _shares(table: pd.DataFrame) -> dict[tuple[Any, ...], tuple[Sensitivity, SequenceRecord]]:
    """Return the sensitivities of measurements, each with the words of its sequence."""
    lists = ("tokens", "input_energy", "output_energy")
    plain = _records(table.drop(columns=list(lists)))
    found = {}
    for row, (tokens, inputs, outputs) in zip(plain, table[list(lists)].itertuples(index=False), strict=True):
        place = {name: row[name] for name in _KEY}
        words = {name: row[name] for name in ("model", "text", "n", "sample", "start", "place")}
        found[_key(row)] = (
            Sensitivity(**place, input_energy=tuple(inputs), output_energy=tuple(outputs)),
            SequenceRecord(**words, tokens=tuple(tokens)),
        )
    return found


class _Union:
    """What several stores hold together, each thing once.

    Raises
    ------
    StoreError
        If two of them are in conflict.

    """

    def __init__(self, *stores: tuple[Path, Contents]) -> None:
        self._first: dict[tuple[Any, ...], tuple[Any, Path]] = {}
        self._models: dict[str, ModelRecord] = {}
        self._texts: dict[str, TextRecord] = {}
        self._inputs: dict[tuple[str, str], dict[str, Any]] = {}
        self._identity: dict[str, Any] = {}
        self._sequences: dict[tuple[str, str], set[tuple[int, int]]] = {}
        names = [field.name for field in fields(Identity)]
        for path, contents in stores:
            if not contents.study:
                continue  # made, and killed before anything was written
            for name in names:
                self._agree(path, name.replace("_", "-"), contents.study[name])
            self._identity = self._identity or {name: contents.study[name] for name in names}
            for row in _records(contents.models):
                record = ModelRecord(**{**row, **{k: bool(row[k]) for k in ("random_init", "as_decoder")}})
                for name in ("layers", "heads", "random_init", "as_decoder"):
                    self._agree(path, f"{name} of the model {record.label!r}", getattr(record, name))
                self._models.setdefault(record.label, record)
            for row in _records(contents.texts):
                self._agree(path, f"SHA-256 of the text {row['name']!r}", row["digest"])
                self._texts.setdefault(row["name"], TextRecord(**row))
            for row in _records(contents.inputs):
                model, text = row.pop("model"), row.pop("text")
                # An untrained model's tokenizer may be trained on the text; any other model is one.
                on = f" on {text!r}" if self._models[model].random_init else ""
                self._agree(path, f"fingerprint of the model {model!r}{on}", row["fingerprint"])
                self._inputs.setdefault((model, text), row)
            for row in _records(contents.measurements):
                self._compare(path, row)
            for row in _records(contents.published):
                self._compare_published(path, row)
            for table in (contents.measurements, contents.published, contents.bounds):
                for model, text, start, n in table[["model", "text", "start", "n"]].itertuples(index=False):
                    self._sequences.setdefault((model, text), set()).add((int(start), int(n)))
        if not self._identity:
            raise StoreError("there is nothing to merge: no study was begun in any of the stores.")
        self.identity = Identity(**self._identity)
        if self.identity.windows == DISJOINT:
            self._keep_apart()

    def _keep_apart(self) -> None:
        """Refuse sequences that overlap, since no store of this kind has any."""
        for (model, text), windows in self._sequences.items():
            # Of images, what stands for the first token is the number of the image.
            if self._texts[text].kind != "images" and overlapping(windows):
                raise StoreError(
                    f"the stores cannot be merged: sequences of {text!r} with {model!r} overlap, since each "
                    "store arranged its own lengths and samples. Give every machine all lengths and samples, "
                    "and share out models, texts, layers, heads or scopes. Nothing was written."
                )

    def inputs(self) -> list[tuple[ModelRecord, TextRecord, dict[str, Any]]]:
        """List the models and texts that belong together, with what else is known of them."""
        return [(self._models[model], self._texts[text], row) for (model, text), row in self._inputs.items()]

    def _agree(self, path: Path, what: str, value: object) -> None:
        first, where = self._first.setdefault((what,), (value, path))
        if first != value:
            raise StoreError(
                f"{path} cannot be merged with {where}: its {what} is {value}, and there it is {first}. "
                "Nothing was written."
            )

    def _compare(self, path: Path, row: dict[str, Any]) -> None:
        head = "" if row["head"] is None else f", head {row['head']}"
        what = f"scope {row['scope']}, layer {row['layer']}{head}"
        first, where = self._first.setdefault(_key(row), (row, path))
        self._hold(path, where, row, first, what, _SAME)

    def _compare_published(self, path: Path, row: dict[str, Any]) -> None:
        what = f"{row['quantity']}, layer {row['layer']}"
        first, where = self._first.setdefault(("published", *_published_key(row)), (row, path))
        self._hold(path, where, row, first, what, _SAME_PUBLISHED)

    def _hold(
        self,
        path: Path,
        where: Path,
        row: dict[str, Any],
        first: dict[str, Any],
        what: str,
        same: tuple[str, ...],
    ) -> None:
        """Hold two rows against each other that should be the same measurement."""
        differing = next((name for name in same if first[name] != row[name]), None)
        if differing is not None:
            words = f"{differing} {row[differing]} and {first[differing]}"
        elif row["lower"] is None or first["lower"] is None:
            if abs(row["lipschitz"] - first["lipschitz"]) <= _CLOSE * abs(first["lipschitz"]):
                return
            words = f"values that differ, {row['lipschitz']} and {first['lipschitz']}"
        else:
            if max(first["lower"], row["lower"]) <= min(first["upper"], row["upper"]):
                return
            words = (
                f"intervals that do not meet, [{row['lower']}, {row['upper']}] and "
                f"[{first['lower']}, {first['upper']}]"
            )
        raise StoreError(
            f"{path} cannot be merged with {where}: the same measurement ({row['model']}, {row['text']}, "
            f"{what}, n = {row['n']}, sample {row['sample']}) has {words}. Nothing was written."
        )


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tell measurements apart, in the order of the columns of the store's index."""
    return tuple(row[name] for name in _KEY)


def _published_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _PUBLISHED_KEY)


def _failure_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*_key(row), row["what"], row["happened"], row["kind"], row["error"], row["detail"])


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries of plain Python values, missing ones ``None``."""
    return [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in table.astype(object).to_dict("records")
    ]
