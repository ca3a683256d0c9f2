"""The store of attacks: one SQLite file, rows of one attention at one length written together.

As with measurements, a process killed at any moment leaves whole groups of rows, and a second writer is
kept out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.open_store import OpenStore, now
from howsmooth.study.schema import ATTACKS, translated

__all__ = ["KINDS", "Attack", "AttackStore", "HeadRow"]

KINDS = {
    "tokens": "the tokens of the text or of the file",
    "construction": "tokens written down from the parameters",
    "ascent": "gradient ascent",
    "upper": "the smallest upper bound that holds",
}
"""What a row can be, and what that means."""


@dataclass(frozen=True)
class Attack:
    """One row: a constant that was reached at some tokens, or a bound that none can exceed.

    ``value`` is the measured constant, with its interval ``lower`` to ``upper``; for the kind ``upper`` the
    bound, NULL where it overflows, with its logarithm. ``radius`` is that of the ball, ``radius_max`` the
    norm of the longest token. ``file`` is where the tokens are, relative to the folder.
    """

    layer: int
    head: int | None
    scope: str
    masking: str
    n: int
    radius: float
    radius_from: str
    kind: str
    name: str
    value: float | None
    log_value: float
    lower: float | None
    upper: float | None
    converged: bool
    radius_max: float | None
    seconds: float
    evaluations: int
    seed: int
    file: str | None


@dataclass(frozen=True)
class HeadRow:
    """What the parameters of one head say by themselves; gammas are real eigenvalues of A, if it has some."""

    layer: int
    head: int | None
    radius: float
    gamma_min: float | None
    gamma_max: float | None
    gamma: float | None
    a_norm: float | None
    v_norm: float | None


class AttackStore(OpenStore):
    """An open store of attacks; use it as a context manager."""

    _schema = ATTACKS

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse to mix attacks that do not mean the same.

        Raises
        ------
        StoreError
            Naming the first thing that differs, and the remedy.

        """
        stored = self.identity()
        for name, wanted in identity.items():
            if stored and stored.get(name) != wanted:
                raise StoreError(
                    f"{self.path} holds other attacks: it was made with {name} "
                    f"{stored.get(name, 'of an earlier kind')}, not {wanted}. "
                    f"Choose another --out{f', or the same {name}' if name in stored else ''}."
                )

    def add_study(self, identity: Mapping[str, Any]) -> None:
        """Record what all attacks have in common, once."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR IGNORE INTO studies VALUES (1, ?, ?)", (now(), json.dumps(dict(identity)))
            )

    def identity(self) -> dict[str, Any]:
        """Return what all attacks have in common; empty if there are none."""
        with translated(self.path):
            row = self._connection.execute("SELECT identity FROM studies").fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def start_run(self, command: str, environment: Mapping[str, str]) -> int:
        """Record that a process begins; returns the number that its rows carry."""
        with self._transaction():
            cursor = self._connection.execute(
                "INSERT INTO runs (started, command, environment) VALUES (?, ?, ?)",
                (now(), command, json.dumps(dict(environment))),
            )
        return int(cursor.lastrowid or 0)

    def finish_run(self, run: int) -> None:
        """Record that the run did all that it was asked for."""
        with self._transaction():
            self._connection.execute("UPDATE runs SET finished = ? WHERE id = ?", (now(), run))

    def known(self) -> frozenset[tuple[int, int | None, int]]:
        """List (layer, head, n) of what was attacked already."""
        with translated(self.path):
            rows = self._connection.execute("SELECT DISTINCT layer, head, n FROM attacks").fetchall()
        return frozenset((layer, head, n) for layer, head, n in rows)

    def add(self, rows: Sequence[Attack], run: int) -> None:
        """Write the rows of one attention at one length: all of them or, if anything goes wrong, none."""
        with self._transaction():
            self._insert("attacks", Attack, [(*astuple(row), run) for row in rows], ", run")

    def add_heads(self, rows: Sequence[HeadRow]) -> None:
        """Write what the parameters of heads say; those that are there stay."""
        with self._transaction():
            self._insert("heads", HeadRow, [astuple(row) for row in rows])

    def attacks(self) -> pd.DataFrame:
        """Tabulate all rows, sorted by layer, head, n and kind."""
        frame = self._table("SELECT * FROM attacks ORDER BY layer, head, n, kind, name")
        numbers = dict.fromkeys(("value", "lower", "upper", "radius_max"), "float64")
        return pd.DataFrame(frame.astype({"head": "Int64", "converged": "bool", **numbers}))

    def heads(self) -> pd.DataFrame:
        """Tabulate what the parameters of heads say."""
        frame = self._table("SELECT * FROM heads ORDER BY layer, head")
        numbers = dict.fromkeys(("gamma_min", "gamma_max", "gamma", "a_norm", "v_norm"), "float64")
        return pd.DataFrame(frame.astype({"head": "Int64", **numbers}))

    def runs(self) -> pd.DataFrame:
        """Tabulate the processes that attacked."""
        return self._table("SELECT * FROM runs ORDER BY id")

    # ---- plumbing

    def _table(self, query: str) -> pd.DataFrame:
        with translated(self.path):
            cursor = self._connection.execute(query)
            names = [column[0] for column in cursor.description]
            return pd.DataFrame(cursor.fetchall(), columns=names)

    def _insert(self, table: str, kind: type[Attack | HeadRow], rows: list[Any], more: str = "") -> None:
        names = [field.name for field in fields(kind)]
        marks = ", ".join("?" * (len(names) + more.count(",")))
        conflict = "OR IGNORE " if kind is HeadRow else ""
        self._connection.executemany(
            f"INSERT {conflict}INTO {table} ({', '.join(names)}{more}) VALUES ({marks})", rows
        )
