"""The tables of the store, and what SQLite may say about the file that holds them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from howsmooth.errors import StoreError

__all__ = ["SCHEMA_VERSION", "begun", "check_schema", "translated"]

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x68736D31  # "hsm1", so that the file says whose it is

_SCHEMA = (
    """CREATE TABLE studies (
        id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, seed INTEGER NOT NULL,
        dtype TEXT NOT NULL, rtol REAL NOT NULL, confidence REAL NOT NULL,
        max_iterations INTEGER NOT NULL, method TEXT NOT NULL, windows TEXT NOT NULL,
        special_tokens TEXT NOT NULL)""",
    """CREATE TABLE models (
        label TEXT PRIMARY KEY, name TEXT NOT NULL, random_init INTEGER NOT NULL, as_decoder INTEGER NOT NULL,
        source TEXT NOT NULL, layers INTEGER NOT NULL, heads INTEGER NOT NULL, max_length INTEGER)""",
    """CREATE TABLE texts (
        name TEXT PRIMARY KEY, digest TEXT NOT NULL, source TEXT NOT NULL, characters INTEGER NOT NULL)""",
    """CREATE TABLE inputs (
        model TEXT NOT NULL REFERENCES models (label), text TEXT NOT NULL REFERENCES texts (name),
        fingerprint TEXT NOT NULL, tokenizer_source TEXT NOT NULL, tokens INTEGER NOT NULL,
        PRIMARY KEY (model, text))""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, started TEXT NOT NULL, finished TEXT, command TEXT NOT NULL,
        device TEXT NOT NULL, environment TEXT NOT NULL)""",
    """CREATE TABLE measurements (
        model TEXT NOT NULL, layer INTEGER NOT NULL, head INTEGER, scope TEXT NOT NULL,
        causal INTEGER NOT NULL, text TEXT NOT NULL, sample INTEGER NOT NULL, n INTEGER NOT NULL,
        radius_mean REAL NOT NULL, radius_max REAL NOT NULL, lipschitz REAL NOT NULL, lower REAL NOT NULL,
        upper REAL NOT NULL, confidence REAL NOT NULL, converged INTEGER NOT NULL,
        iterations INTEGER NOT NULL, seconds REAL NOT NULL, seed INTEGER NOT NULL, dtype TEXT NOT NULL,
        method TEXT NOT NULL, masking TEXT NOT NULL, site TEXT NOT NULL, start INTEGER NOT NULL,
        run INTEGER NOT NULL REFERENCES runs (id),
        FOREIGN KEY (model, text) REFERENCES inputs (model, text))""",
    # A NULL head would make every row of a plain UNIQUE constraint different.
    """CREATE UNIQUE INDEX one_row_a_measurement ON measurements
        (model, text, scope, layer, ifnull(head, -1), n, sample)""",
)


@contextmanager
def begun(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold a transaction: committed at the end, rolled back whatever goes wrong."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's complaints into one sentence of ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            remedy = "Make room on the disk and run the same command again."
        elif "readonly" in str(error) or "unable to open" in str(error):
            remedy = "Make it writable, or choose another --out."
        else:
            remedy = "Run the same command again, or choose another --out."
        raise StoreError(
            f"{path} cannot be used: {error}. {remedy} Rows already written are kept."
        ) from error
    except sqlite3.IntegrityError:
        raise  # a row twice would be our mistake, not the user's
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} cannot be read: {error}. Move it away, or choose another --out; nothing was changed."
        ) from error


def check_schema(connection: sqlite3.Connection, path: Path, *, write: bool) -> None:
    """Make the schema in an empty file, or see that it is ours, whole, and of a version that we know."""
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    # An empty file is what a process killed while making the store leaves behind.
    if tables == 0 and application == 0 and write:
        with begun(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return
    if application != _APPLICATION_ID:
        raise StoreError(f"{path} is not a store of howsmooth measurements. Choose another --out.")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, and this howsmooth reads version {SCHEMA_VERSION}. "
            "Use the howsmooth that wrote it, or choose another --out."
        )
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise StoreError(
            f"{path} is damaged ({verdict}). Restore a copy, or choose another --out; nothing was changed."
        )
