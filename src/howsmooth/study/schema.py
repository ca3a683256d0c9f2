"""The tables of the stores, and what SQLite and the file system may say about the files that hold them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

from howsmooth.errors import StoreError

__all__ = [
    "ATTACKS", "MEASUREMENTS", "SCHEMA_VERSION", "Schema", "begun", "check_schema", "connected", "locked",
    "reason", "store_there", "translated",
]  # fmt: skip

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Schema:
    """The tables of one kind of store.

    ``file`` is its name in a folder, ``holds`` what is in it; ``application_id`` stands in the file and says
    whose it is.
    """

    file: str
    holds: str
    application_id: int
    version: int
    statements: tuple[str, ...]


_MEASUREMENT_TABLES = (
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


_ATTACK_TABLES = (
    """CREATE TABLE studies (
        id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, identity TEXT NOT NULL)""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, started TEXT NOT NULL, finished TEXT, command TEXT NOT NULL,
        environment TEXT NOT NULL)""",
    """CREATE TABLE heads (
        layer INTEGER NOT NULL, head INTEGER, radius REAL NOT NULL, gamma_min REAL, gamma_max REAL,
        gamma REAL, a_norm REAL, v_norm REAL)""",
    "CREATE UNIQUE INDEX one_row_a_head ON heads (layer, ifnull(head, -1))",
    """CREATE TABLE attacks (
        layer INTEGER NOT NULL, head INTEGER, scope TEXT NOT NULL, masking TEXT NOT NULL, n INTEGER NOT NULL,
        radius REAL NOT NULL, radius_from TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value REAL,
        log_value REAL NOT NULL, lower REAL, upper REAL, converged INTEGER NOT NULL, radius_max REAL,
        seconds REAL NOT NULL, evaluations INTEGER NOT NULL, seed INTEGER NOT NULL, file TEXT,
        run INTEGER NOT NULL REFERENCES runs (id))""",
    "CREATE UNIQUE INDEX one_row_an_attack ON attacks (layer, ifnull(head, -1), n, kind, name)",
)

# The numbers are "hsm1" and "hsa1".
MEASUREMENTS = Schema("measurements.sqlite", "measurements", 0x68736D31, SCHEMA_VERSION, _MEASUREMENT_TABLES)
ATTACKS = Schema("attacks.sqlite", "attacks", 0x68736131, 1, _ATTACK_TABLES)


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


def check_schema(
    connection: sqlite3.Connection, path: Path, *, write: bool, schema: Schema = MEASUREMENTS
) -> None:
    """Make the schema in an empty file, or see that it is ours, whole, and of a version that we know."""
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    # An empty file is what a process killed while making the store leaves behind.
    if tables == 0 and application == 0 and write:
        with begun(connection):
            for statement in schema.statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {schema.application_id}")
            connection.execute(f"PRAGMA user_version = {schema.version}")
        return
    if application != schema.application_id:
        raise StoreError(f"{path} is not a store of howsmooth {schema.holds}. Choose another --out.")
    if version != schema.version:
        raise StoreError(
            f"{path} has schema version {version}, and this howsmooth reads version {schema.version}. "
            "Use the howsmooth that wrote it, or choose another --out."
        )
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise StoreError(
            f"{path} is damaged ({verdict}). Restore a copy, or choose another --out; nothing was changed."
        )


def store_there(folder: Path, schema: Schema) -> bool:
    """Whether the folder holds something under the name of the store.

    Raises
    ------
    StoreError
        If the folder is there but is not a folder, or cannot be looked into.

    """
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"out: expected a folder, got the file {folder}. Choose another --out.")
        return (folder / schema.file).exists()
    except OSError as error:
        raise StoreError(
            f"out: expected a usable folder, got {folder} ({reason(error)}). Choose another --out."
        ) from error


def connected(folder: Path, schema: Schema, *, write: bool) -> tuple[sqlite3.Connection, FileLock | None]:
    """Open the store in a folder, making both if they are not there and ``write`` is true.

    Returns
    -------
    connection, lock
        The lock is held if ``write``.

    Raises
    ------
    StoreError
        If the store is damaged, not a store, of a newer schema, in use by another process, or in a
        folder that cannot be written.

    """
    path = folder / schema.file
    there = store_there(folder, schema)
    if not write and not there:
        raise StoreError(f"out: expected a folder with {schema.file}, got {folder}, which has none.")
    if there and not path.is_file():
        raise StoreError(f"{path} is not a file, so it cannot be a store. Choose another --out.")
    lock = locked(folder, schema) if write else None
    try:
        with translated(path):
            mode = "rwc" if write else "ro"
            connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path.resolve()))}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=30,
            )
            try:
                check_schema(connection, path, write=write, schema=schema)
            except BaseException:
                connection.close()
                raise
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return connection, lock


def locked(folder: Path, schema: Schema) -> FileLock:
    """Make the folder and keep other writers out of its store."""
    lock = FileLock(folder / f".{Path(schema.file).stem}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StoreError(
            f"{folder} is in use by another howsmooth process. Wait until it ends, or choose another --out."
        ) from error
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({reason(error)}). Choose another --out."
        ) from error
    return lock


def reason(error: OSError) -> str:
    """Say in words why a file could not be used."""
    return error.strerror or type(error).__name__
