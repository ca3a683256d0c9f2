"""The store: one SQLite file, one row a measurement, never a row lost and never one twice.

Rows are written one transaction a batch with a rollback journal and full synchronisation, so that
a process killed at any moment leaves whole batches, and the file can be copied while no process
writes. A lock file beside the store keeps a second writer out; the operating system releases it
with the process that held it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.open_store import OpenStore, now
from howsmooth.study.plan import Identity
from howsmooth.study.records import (
    BOUND_COLUMNS,
    COLUMNS,
    PUBLISHED_COLUMNS,
    SENSITIVITY_COLUMNS,
    Bounding,
    Contents,
    Failure,
    Key,
    Measurement,
    ModelRecord,
    PublishedKey,
    PublishedValue,
    Sensitivity,
    SequenceRecord,
    TextRecord,
)
from howsmooth.study.schema import (
    MEASUREMENTS,
    in_use,
    sealed_columns,
    translated,
)

__all__ = [
    "COLUMNS", "STORE_NAME", "Bounding", "Contents", "Failure", "Key", "Measurement", "ModelRecord",
    "PublishedValue", "Sensitivity", "SequenceRecord", "Store", "TextRecord",
]  # fmt: skip

STORE_NAME = MEASUREMENTS.file

_KEY = ("model", "text", "scope", "layer", "head", "n", "sample")
# Which rows show a failure to be over: those of the table that agree in the columns.
_MADE_GOOD_BY = {
    "measurement": ("measurements", _KEY),
    "bounds": ("bounds", _KEY),
    "published": ("published", ("model", "text", "layer", "n", "sample")),
}


class Store(OpenStore):
    """An open store of measurements; use it as a context manager, or call ``close``."""

    _schema = MEASUREMENTS

    @classmethod
    def in_use(cls, folder: Path) -> bool:
        """Whether another process is writing into the folder's store."""
        return in_use(folder, cls._schema)

    # ---- identity

    def check(self, identity: Identity) -> None:
        """Refuse to mix measurements that do not mean the same.

        Raises
        ------
        StoreError
            Naming the first thing that differs, and the remedy.

        """
        stored = self._row("SELECT * FROM studies")
        if stored is None:
            return
        for name, wanted in asdict(identity).items():
            if stored[name] != wanted:
                option = name.replace("_", "-")
                adjustable = name not in ("method", "windows", "special_tokens")
                raise StoreError(
                    f"{self.path} belongs to another study: it was made with {option} {stored[name]}, "
                    f"not {wanted}. Choose another --out"
                    + (f", or repeat --{option} {stored[name]}." if adjustable else ".")
                )

    def check_input(
        self, model: ModelRecord, text: TextRecord, fingerprint: str, *, tokenizer_source: str
    ) -> None:
        """Refuse a model or a text that changed under its name.

        Raises
        ------
        StoreError
            Naming the first thing that differs, and the remedy.

        """
        digest = self._row("SELECT digest FROM texts WHERE name = ?", text.name)
        if digest is not None and digest["digest"] != text.digest:
            raise StoreError(
                f"{self.path} belongs to another study: its text {text.name!r} has SHA-256 "
                f"{digest['digest'][:12]}, not {text.digest[:12]}. Choose another --out, or give "
                "the text another file name."
            )
        # A tokenizer trained on the text makes the fingerprint depend on the text; any other model has one.
        where = "WHERE model = ? AND (text = ? OR NOT (SELECT random_init FROM models WHERE label = model))"
        row = self._row(f"SELECT * FROM inputs {where}", model.label, text.name)
        if row is not None and row["fingerprint"] != fingerprint:
            what = "the weights or the configuration"
            if row["tokenizer_source"] != tokenizer_source:
                what = f"the tokenizer ({row['tokenizer_source']!r} then, {tokenizer_source!r} now)"
            raise StoreError(
                f"{self.path} belongs to another study: its model {model.label!r} has fingerprint "
                f"{row['fingerprint'][:12]}, not {fingerprint[:12]}; {what} changed. Choose another --out."
            )

    def add_study(self, identity: Identity) -> None:
        """Record the identity, once."""
        with self._transaction():
            if self._row("SELECT id FROM studies") is None:
                values = {"id": 1, "created": now(), **asdict(identity)}
                self._insert("studies", values)

    def add_input(
        self, model: ModelRecord, text: TextRecord, fingerprint: str, *, tokenizer_source: str, tokens: int
    ) -> None:
        """Record a model and a text that belong together, once."""
        with self._transaction():
            self._insert("models", asdict(model), "OR IGNORE")
            self._insert("texts", asdict(text), "OR IGNORE")
            values = {
                "model": model.label,
                "text": text.name,
                "fingerprint": fingerprint,
                "tokenizer_source": tokenizer_source,
                "tokens": tokens,
            }
            self._insert("inputs", values, "OR IGNORE")

    # ---- runs and measurements

    def start_run(self, command: str, device: str, environment: Mapping[str, str]) -> int:
        """Record that a process begins to measure; returns the number that its rows carry."""
        with self._transaction():
            values = {
                "started": now(),
                "command": command,
                "device": device,
                "environment": json.dumps(environment),
                "token": secrets.token_hex(8),
                "worked": 0.0,
                "finished": None,
            }
            return self._insert("runs", values)

    def finish_run(self, run: int) -> None:
        """Record that the run tried all that it was asked for."""
        with self._transaction():
            self._connection.execute("UPDATE runs SET finished = ? WHERE id = ?", (now(), run))
            self._seal("runs", "id = ?", run)

    def known(self, model: str, text: str) -> frozenset[Key]:
        """List what is measured already of a model on a text."""
        rows = self._rows(
            "SELECT scope, layer, head, n, sample FROM measurements WHERE model = ? AND text = ?", model, text
        )
        return frozenset((scope, layer, head, n, sample) for scope, layer, head, n, sample in rows)

    def known_published(self, model: str, text: str) -> frozenset[PublishedKey]:
        """List the published values that are measured already of a model on a text."""
        rows = self._rows(
            "SELECT layer, n, sample, quantity, items FROM published WHERE model = ? AND text = ?",
            model,
            text,
        )
        return frozenset((layer, n, sample, quantity, items) for layer, n, sample, quantity, items in rows)

    def bounded(self, model: str, text: str) -> frozenset[Key]:
        """List the sequences, scopes, layers and heads of a model on a text whose bounds are known."""
        rows = self._rows(
            "SELECT DISTINCT scope, layer, head, n, sample FROM bounds WHERE model = ? AND text = ?",
            model,
            text,
        )
        return frozenset((scope, layer, head, n, sample) for scope, layer, head, n, sample in rows)

    def sequences(self, model: str, text: str) -> dict[tuple[int, int], int]:
        """Say where the sequences lie that were used already: their first tokens, by n and sample."""
        rows = self._rows(
            "SELECT n, sample, start FROM measurements WHERE model = ?1 AND text = ?2 "
            "UNION SELECT n, sample, start FROM published WHERE model = ?1 AND text = ?2",
            model,
            text,
        )
        return {(n, sample): start for n, sample, start in rows}

    def add(
        self,
        rows: Sequence[Measurement],
        run: int,
        *,
        worked: float | None = None,
        sensitivities: Sequence[Sensitivity] = (),
        sequences: Sequence[SequenceRecord] = (),
    ) -> None:
        """Write a batch: all of its rows or, if anything goes wrong, none.

        Failures of these measurements count as resolved from now on.

        Parameters
        ----------
        rows
            Measurements that the store does not have.
        run
            As :meth:`start_run` returned it.
        worked
            Seconds since that run began, by a clock that does not jump.
        sensitivities, sequences
            Of these measurements, and the words of their sequences; those that are known already are kept.

        """
        with self._transaction():
            self._add("measurements", rows, run)
            for one in sequences:
                self._insert("sequences", {**asdict(one), "tokens": json.dumps(one.tokens)}, "OR IGNORE")
            for share in sensitivities:
                energies = {
                    name: json.dumps([float(f"{value:.7g}") for value in getattr(share, name)])
                    for name in ("input_energy", "output_energy")
                }
                self._insert("sensitivities", {**asdict(share), **energies, "run": run})
            self._worked(run, worked)
            self._resolve("measurement", rows)

    def add_bounds(self, rows: Sequence[Bounding], run: int, *, worked: float | None = None) -> None:
        """Write all bounds of one or several sequences, scopes, layers and heads, or none; as :meth:`add`."""
        with self._transaction():
            self._add("bounds", rows, run)
            self._worked(run, worked)
            self._resolve("bounds", rows)

    def add_published(self, rows: Sequence[PublishedValue], run: int, *, worked: float | None = None) -> None:
        """Write all quantities of some sequences and layers, or none; as :meth:`add`."""
        with self._transaction():
            self._add("published", rows, run)
            self._worked(run, worked)
            self._resolve("published", rows)

    def fail(self, failures: Sequence[Failure], run: int) -> None:
        """Record what could not be measured; it is asked for again the next time."""
        with self._transaction():
            for failure in failures:
                values = {**asdict(failure), "happened": now(), "resolved": None, "run": run}
                self._insert("failures", values)

    # ---- merging

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold all that is written until the end, or write nothing if anything goes wrong."""
        with self._transaction():
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def adopt_run(self, row: Mapping[str, Any]) -> int:
        """Record a run of another store; returns the number that its rows carry here."""
        found = self._row("SELECT id FROM runs WHERE token = ?", row["token"])
        if found is not None:
            return int(found["id"])
        with self._transaction():
            return self._insert("runs", {name: value for name, value in row.items() if name != "id"})

    def adopt_failure(self, row: Mapping[str, Any], run: int) -> None:
        """Record a failure of another store."""
        with self._transaction():
            kept = {name: value for name, value in row.items() if name != "id"}
            self._insert("failures", {**kept, "run": run})

    def resolve(self) -> None:
        """Mark the failures whose measurement, bounds or published values are there."""
        with self._transaction():
            for what, (table, columns) in _MADE_GOOD_BY.items():
                same = " AND ".join(f"m.{name} IS f.{name}" for name in columns)
                query = (
                    f"SELECT id FROM failures AS f WHERE resolved IS NULL AND what = '{what}' "
                    f"AND EXISTS (SELECT 1 FROM {table} AS m WHERE {same})"
                )
                for (number,) in self._connection.execute(query).fetchall():
                    self._mark(number)

    def _mark(self, failure: int) -> None:
        self._connection.execute("UPDATE failures SET resolved = ? WHERE id = ?", (now(), failure))
        self._seal("failures", "id = ?", failure)

    def _resolve(self, what: str, rows: Sequence[Measurement | Bounding | PublishedValue]) -> None:
        """Mark the failures that rows show to be over, also those that reached further."""
        if self._row("SELECT id FROM failures WHERE resolved IS NULL LIMIT 1") is None:
            return
        _, columns = _MADE_GOOD_BY[what]
        where = " AND ".join(f"({name} IS NULL OR {name} IS ?)" for name in columns)
        query = f"SELECT id FROM failures WHERE resolved IS NULL AND what = ? AND {where}"
        for values in {tuple(getattr(row, name) for name in columns) for row in rows}:
            for (number,) in self._connection.execute(query, (what, *values)).fetchall():
                self._mark(number)

    # ---- reading

    def measurements(self) -> pd.DataFrame:
        """Tabulate all rows with all columns, sorted by model, text, scope, layer, head, n and sample."""
        frame = self._table("SELECT * FROM measurements ORDER BY model, text, scope, layer, head, n, sample")
        types = {"head": "Int64", "causal": "bool", "converged": "bool"}
        return pd.DataFrame(frame.astype(types))

    def models(self) -> pd.DataFrame:
        """Tabulate the models that have been registered."""
        return self._table("SELECT * FROM models ORDER BY label")

    def texts(self) -> pd.DataFrame:
        """Tabulate the texts that have been registered."""
        return self._table("SELECT * FROM texts ORDER BY name")

    def inputs(self) -> pd.DataFrame:
        """Tabulate which models were given which texts, with fingerprints and tokenizers."""
        return self._table("SELECT * FROM inputs ORDER BY model, text")

    def runs(self) -> pd.DataFrame:
        """Tabulate the processes that measured."""
        return self._table("SELECT * FROM runs ORDER BY id")

    def failures(self) -> pd.DataFrame:
        """Tabulate what could not be measured; ``resolved`` is missing where that is still so."""
        frame = self._table("SELECT * FROM failures ORDER BY id")
        return pd.DataFrame(frame.astype(dict.fromkeys(("layer", "head", "n", "sample"), "Int64")))

    def sensitivities(self) -> pd.DataFrame:
        """Tabulate which tokens the constant depends on, see :class:`~howsmooth.study.records.Contents`."""
        frame = self._table(
            "SELECT s.*, q.start, q.place, q.tokens, m.converged FROM sensitivities AS s "
            "JOIN sequences AS q USING (model, text, n, sample) JOIN measurements AS m "
            "ON m.model = s.model AND m.text = s.text AND m.scope = s.scope AND m.layer = s.layer "
            "AND ifnull(m.head, -1) = ifnull(s.head, -1) AND m.n = s.n AND m.sample = s.sample "
            "ORDER BY s.model, s.text, s.scope, s.layer, s.head, s.n, s.sample"
        )
        for name in ("tokens", "input_energy", "output_energy"):
            frame[name] = frame[name].map(json.loads)
        types = {"head": "Int64", "place": "Int64", "converged": "bool"}
        return pd.DataFrame(frame.astype(types)[list(SENSITIVITY_COLUMNS)])

    def bounds(self) -> pd.DataFrame:
        """Tabulate the bounds; where one does not hold, its value is missing and its source says why."""
        frame = self._table(
            "SELECT * FROM bounds "
            "ORDER BY model, text, scope, layer, head, n, sample, NOT holds, log_value, name"
        )
        types = {"head": "Int64", "holds": "bool", "value": "float64", "log_value": "float64"}
        return pd.DataFrame(frame.astype(types)[list(BOUND_COLUMNS)])

    def published(self) -> pd.DataFrame:
        """Tabulate the published quantities, sorted by model, text, layer, n and sample, then as measured."""
        frame = self._table("SELECT * FROM published ORDER BY model, text, layer, n, sample, rowid")
        types = {"settled": "bool", "lower": "float64", "upper": "float64"}
        return pd.DataFrame(frame.astype(types)[[*PUBLISHED_COLUMNS, "run"]])

    def study(self) -> dict[str, Any]:
        """Return the identity and the time of creation; empty if nothing was ever measured."""
        row = self._row("SELECT * FROM studies") or {}
        return {name: value for name, value in row.items() if name != "seal"}

    def contents(self) -> Contents:
        """Return everything at one moment, whatever another process writes meanwhile."""
        with translated(self.path):
            self._connection.execute("BEGIN")
            try:
                return Contents(
                    measurements=self.measurements(),
                    models=self.models(),
                    texts=self.texts(),
                    inputs=self.inputs(),
                    runs=self.runs(),
                    failures=self.failures(),
                    study=self.study(),
                    sensitivities=self.sensitivities(),
                    bounds=self.bounds(),
                    published=self.published(),
                )
            finally:
                self._connection.execute("COMMIT")

    # ---- plumbing

    def _table(self, query: str) -> pd.DataFrame:
        with translated(self.path):
            cursor = self._connection.execute(query)
            names = [column[0] for column in cursor.description]
            return pd.DataFrame(cursor.fetchall(), columns=names).drop(columns="seal", errors="ignore")

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with translated(self.path):
            return self._connection.execute(query, values).fetchall()

    def _row(self, query: str, *values: str) -> dict[str, Any] | None:
        with translated(self.path):
            cursor = self._connection.execute(query, values)
            row = cursor.fetchone()
            return None if row is None else dict(zip([c[0] for c in cursor.description], row, strict=True))

    def _insert(self, table: str, values: Mapping[str, object], conflict: str = "") -> int:
        cursor = self._connection.execute(_insertion(table, list(values), conflict), tuple(values.values()))
        return int(cursor.lastrowid or 0)

    def _add(self, table: str, rows: Sequence[Measurement | Bounding | PublishedValue], run: int) -> None:
        """Insert rows of one kind; a list that is interrupted while it is read adds nothing."""
        values = [(*astuple(row), run) for row in rows]
        if values:
            names = [*(field.name for field in fields(rows[0])), "run"]
            self._connection.executemany(_insertion(table, names), values)

    def _worked(self, run: int, worked: float | None) -> None:
        if worked is not None:
            self._connection.execute("UPDATE runs SET worked = ? WHERE id = ?", (worked, run))
            self._seal("runs", "id = ?", run)

    def _seal(self, table: str, where: str, value: object) -> None:
        """Seal rows again that were changed."""
        names = [row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")]
        seal = f"seal({', '.join(sealed_columns(names))})"
        self._connection.execute(f"UPDATE {table} SET seal = {seal} WHERE {where}", (value,))


def _insertion(table: str, names: Sequence[str], conflict: str = "") -> str:
    """Write the statement that inserts a row with its seal; it takes the values in the order of the names."""
    places = {name: f"?{place}" for place, name in enumerate(names, start=1)}
    return (
        f"INSERT {conflict} INTO {table} ({', '.join(names)}, seal) "
        f"VALUES ({', '.join(places.values())}, seal({', '.join(places[n] for n in sealed_columns(names))}))"
    )
