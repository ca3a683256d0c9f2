"""The store of a study: one SQLite file with a table for each kind of row.

Rows are written in one transaction for each step of a task, so no row is lost or written twice. Each row has
the number of the run that made it, and a seal: a digest of its values that reveals damage.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pandas as pd
from filelock import FileLock

from howsmooth.errors import StoreError
from howsmooth.study.records import (
    KINDS,
    PLACE,
    Bounding,
    Contents,
    Failure,
    InputRecord,
    Measurement,
    ModelRecord,
    PublishedValue,
    Row,
    Run,
    SequenceRecord,
    StudyRecord,
    TextRecord,
)
from howsmooth.study.store_file import STORE_NAME, begun, connected, empty, store_there, translated

__all__ = ["STORE_NAME", "Store", "now"]

R = TypeVar("R", bound=Row)

# What SQLite does with a row whose key is in the table already: raise an error, keep the old row, or replace
# it.
_AGAIN = {"refuse": "", "stay": "OR IGNORE ", "replace": "OR REPLACE "}
_SQL_TYPES = {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT", tuple: "TEXT"}
_FRAME_TYPES = {int: "int64", bool: "bool", float: "float64"}
# SQLite has neither tuples nor booleans: tuples are stored as JSON, booleans as integers.
_READ: dict[type, Callable[[Any], Any]] = {tuple: lambda stored: tuple(json.loads(stored)), bool: bool}


class Store:
    """The opened database of a study's results; use it as a context manager, or call :meth:`close`.

    A writer holds the lock while the store is open; a reader has no lock.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, lock: FileLock | None) -> None:
        self._connection = connection
        self._lock = lock
        self._held = self._late = False
        self.path = path

    exists = staticmethod(store_there)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, write: bool = True, late: bool = False) -> Store:
        """Open the store in a folder; with ``write``, create folder and store if needed.

        With ``late``, a store that does not exist yet is opened as an empty store, and only :meth:`begin`
        creates it in the folder. So a plan that is refused leaves no empty store behind.

        Raises
        ------
        StoreError
            If the file is damaged or is not a store, if another process is using it, or if the folder cannot
            be written.

        """
        folder = Path(folder)
        late = late and not store_there(folder)
        connection, lock = (empty(_STATEMENTS), None) if late else connected(folder, _STATEMENTS, write=write)
        store = cls(connection, folder / STORE_NAME, lock)
        store._late = late
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and release the lock for other writers."""
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    # ---- The identity: settings that all rows of a kind of work share

    def identity(self, kind: str) -> dict[str, Any]:
        """Return the settings that all rows of one kind of work share, such as ``measure``; {} if none."""
        row = self._query("SELECT identity FROM studies WHERE kind = ?", kind).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def check(self, kind: str, identity: Mapping[str, Any]) -> None:
        """Refuse settings that differ from the settings of the rows in the store.

        Raises
        ------
        StoreError
            If a setting differs; the message names the first one, and the remedy.

        """
        stored = self.identity(kind)
        # A setting that is missing on one side is one that has its default there.
        for name in {**identity, **stored} if stored else ():
            if stored.get(name) != identity.get(name):
                made, remedy = _difference(name, stored.get(name), identity.get(name))
                raise StoreError(
                    f"{self.path} belongs to another study: it was made {made}. Choose another --out{remedy}."
                )

    def begin(self, kind: str, identity: Mapping[str, Any]) -> None:
        """Create the store if needed. Record the settings of a kind of work if it has none yet."""
        if self._late:
            self._connection.close()
            self._connection, self._lock = connected(self.path.parent, _STATEMENTS, write=True)
            self._late = False
        if not self.identity(kind):
            self.add([StudyRecord(kind, now(), json.dumps(dict(identity)))])

    # ---- Writing

    def start_run(self, command: str, device: str, environment: Mapping[str, str]) -> int:
        """Record the start of a run, and return the number that its rows carry."""
        # In one transaction, so that the number is still free when the row is written.
        with self.transaction():
            number = self._query("SELECT ifnull(max(id), 0) + 1 FROM runs").fetchone()[0]
            self.add([Run(number, now(), None, command, device, json.dumps(dict(environment)))])
        return int(number)

    def finish_run(self, number: int) -> None:
        """Record that a run reached its end."""
        ((run, _),) = self.rows(Run, id=number)
        self.add([replace(run, finished=now())])

    def add(self, rows: Iterable[Row], run: int | None = None) -> None:
        """Write rows of any kinds in one transaction, all of them or none, with the number of their run.

        Failures whose missing rows are now there are deleted.
        """
        with self.transaction():
            written = list(rows)
            for kind, some in groupby(written, type):
                bound = [{**_values(row), "run": run} for row in some]
                self._connection.executemany(_INSERTIONS[kind], bound)
            # In the same transaction as the rows, so that a killed process leaves no failure beside its
            # result.
            self._make_good(written)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything written in the ``with`` block together, or nothing after an error."""
        # SQLite has no nested transactions. Methods open one each and may call each other, so an inner
        # context does nothing, and the outermost one commits.
        if self._held:
            yield
            return
        with translated(self.path), begun(self._connection):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _make_good(self, rows: Sequence[Row]) -> None:
        """Delete recorded failures to compute the given rows, also failures of their whole text or model."""
        # Almost always there are no failures, and this is called for every step.
        if self._query("SELECT 1 FROM failures LIMIT 1").fetchone() is None:
            return
        for kind in {type(row) for row in rows} - {Failure}:
            names = [name for name in PLACE if name in kind.columns()]
            # A failure of a whole model or text has NULL in the columns that it does not restrict.
            same = " AND ".join(f"({name} IS NULL OR {name} IS ?)" for name in names)
            for values in {tuple(getattr(row, name) for name in names) for row in rows if type(row) is kind}:
                self._connection.execute(
                    f"DELETE FROM failures WHERE what = ? AND {same or 'FALSE'}", (kind.table, *values)
                )

    # ---- Reading

    def keys(self, kind: type[Row], columns: Sequence[str], **where: object) -> frozenset[tuple[Any, ...]]:
        """Return the distinct values of some columns among the rows of a table that match ``where``."""
        names = ", ".join(columns)
        query = f"SELECT DISTINCT {names} FROM {kind.table} WHERE {_condition(where)}"
        return frozenset(self._query(query, *where.values()).fetchall())

    def count(self, kind: type[Row]) -> int:
        """Return the number of rows of one table."""
        return int(self._query(f"SELECT count(*) FROM {kind.table}").fetchone()[0])

    def rows(self, kind: type[R], order: Sequence[str] = (), **where: object) -> list[tuple[R, int | None]]:
        """Return the rows of one table that match ``where``, each with the number of its run.

        ``order`` are columns or SQL expressions to sort by; rows that are equal in them keep the order of
        writing.
        """
        query = (
            f"SELECT {', '.join(kind.columns())}, run FROM {kind.table} WHERE {_condition(where)} "
            f"ORDER BY {', '.join([*order, 'rowid'])}"
        )
        read = [_READ.get(plain) for plain, _ in kind.types().values()]
        found = []
        for *values, run in self._query(query, *where.values()).fetchall():
            plain = (
                value if make is None or value is None else make(value)
                for make, value in zip(read, values, strict=True)
            )
            found.append((kind(*plain), run))
        return found

    def table(self, kind: type[Row], order: Sequence[str] = ()) -> pd.DataFrame:
        """Return all rows of a table as a data frame; the column ``run`` has the number of each row's run."""
        rows = [{**vars(row), "run": run} for row, run in self.rows(kind, order)]
        # Keep Python objects: pandas would turn integers beside a missing value into rounded floats.
        frame = pd.DataFrame(rows, columns=[*kind.columns(), "run"], dtype=object)
        for name, (plain, nullable) in kind.types().items():
            if plain is tuple:
                frame[name] = frame[name].map(list, na_action="ignore")
            elif plain in _FRAME_TYPES:
                wanted: Any = "Int64" if plain is int and nullable else _FRAME_TYPES[plain]
                frame[name] = frame[name].astype(wanted)
        return frame.infer_objects()

    def sequences(self, model: str, text: str) -> dict[tuple[int, int], int]:
        """Return the index of the first token of each measured sequence in a text, by (n, sample)."""
        columns = ("n", "sample", "start")
        used = [self.keys(kind, columns, model=model, text=text) for kind in (Measurement, PublishedValue)]
        return {(n, sample): start for n, sample, start in frozenset().union(*used)}

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return all tables that have rows, by name, read in one transaction."""
        with self._one_state():
            return {kind.table: self.table(kind) for kind in KINDS if self.count(kind)}

    @contextmanager
    def _one_state(self) -> Iterator[None]:
        """Let all reads in the ``with`` block see the store at one moment, even if other processes write."""
        with translated(self.path):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("COMMIT")

    def contents(self) -> Contents:
        """Return all tables of measurements, read in one transaction while other processes may write."""
        with self._one_state():
            created = self._query("SELECT created FROM studies WHERE kind = 'measure'").fetchone()
            measurements = self.table(Measurement, PLACE)
            words = self.table(SequenceRecord).drop(columns=["start", "run"])
            shares = measurements[measurements["input_energy"].notna()]
            return Contents(
                measurements=measurements,
                models=self.table(ModelRecord, ["label"]).drop(columns="run"),
                texts=self.table(TextRecord, ["name"]).drop(columns="run"),
                inputs=self.table(InputRecord, ["model", "text"]).drop(columns="run"),
                runs=self.table(Run, ["id"]).drop(columns="run"),
                failures=self.table(Failure, ["happened"]),
                study={"created": created[0], **self.identity("measure")} if created else {},
                sensitivities=shares.merge(words, on=list(SequenceRecord.key)),
                bounds=self.table(Bounding, [*PLACE, "NOT holds", "log_value", "name"]),
                published=self.table(PublishedValue, ["model", "text", "layer", "n", "sample"]),
            )

    # ---- Queries

    def _query(self, statement: str, *values: object) -> sqlite3.Cursor:
        with translated(self.path):
            return self._connection.execute(statement, values)


def now() -> str:
    """Return the current time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _difference(name: str, stored: object, wanted: object) -> tuple[str, str]:
    """Return two phrases: how a wanted setting differs from the stored one, and what the user can do."""
    option = f"--{name.replace('_', '-')}"
    made, now_ = (
        "its default" if value is None else str(value).removesuffix(".0") for value in (stored, wanted)
    )
    remedy = f"leave {option} out" if stored is None else f"repeat {option} {made}"
    return f"with {option} {made}, not {now_}", f", or {remedy}"


# ---- Tables of the kinds of rows


def _condition(where: Mapping[str, object]) -> str:
    return " AND ".join(f"{name} IS ?" for name in where) or "TRUE"


def _statements_of(kind: type[Row]) -> tuple[str, str]:
    columns = [
        f"{name} {_SQL_TYPES[plain]}{'' if nullable else ' NOT NULL'}"
        for name, (plain, nullable) in kind.types().items()
    ]
    # A unique index treats NULLs as different, so replace them by -1.
    key = ", ".join(f"ifnull({name}, -1)" if kind.types()[name][1] else name for name in kind.key)
    return (
        f"CREATE TABLE {kind.table} ({', '.join(columns)}, run INTEGER, seal TEXT NOT NULL)",
        f"CREATE UNIQUE INDEX one_of_{kind.table} ON {kind.table} ({key})",
    )


def _insertion_of(kind: type[Row]) -> str:
    """Return the SQL statement that inserts a row with the number of its run and its seal (a digest)."""
    names = [*kind.columns(), "run"]
    # Named parameters, because the seal is computed from the same values as the row.
    marks = [f":{name}" for name in names]
    return (
        f"INSERT {_AGAIN[kind.again]}INTO {kind.table} ({', '.join(names)}, seal) "
        f"VALUES ({', '.join(marks)}, seal({', '.join(marks)}))"
    )


_STATEMENTS = tuple(statement for kind in KINDS for statement in _statements_of(kind))
_INSERTIONS = {kind: _insertion_of(kind) for kind in KINDS}


def _values(row: Row) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in row.columns()}
    return {name: json.dumps(value) if isinstance(value, tuple) else value for name, value in values.items()}
