"""The files of the stores: opened, checked, kept from two writers, and what is wrong with them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

from howsmooth.errors import StoreError
from howsmooth.study.tables import ATTACKS, MEASUREMENTS, SCHEMA_VERSION, Schema

__all__ = [
    "ATTACKS", "MEASUREMENTS", "SCHEMA_VERSION", "Schema", "begun", "check_schema", "connected", "in_use",
    "locked", "reason", "sealed_columns", "store_there", "translated",
]  # fmt: skip

# Whoever only looks whether a store is in use holds its lock for less than this.
_PATIENCE = 0.5


@contextmanager
def begun(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold a transaction: committed at the end, rolled back whatever goes wrong."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk this may fail too: then the journal stays, and the next opening takes it back.
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's complaints into one sentence of ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error) or "I/O" in str(error):
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
    except UnicodeDecodeError as error:
        # SQLite's own words, about a name that was damaged.
        raise _damaged(path, "it holds names that are no letters") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} cannot be read: {error}. Move it away, or choose another --out; nothing was changed."
        ) from error


def check_schema(
    connection: sqlite3.Connection, path: Path, *, write: bool, schema: Schema = MEASUREMENTS
) -> None:
    """Make the schema in an empty file, or see that it is ours, whole, and of a version that we know.

    A file of an earlier version is brought to the present one if ``write``, in one transaction.
    """
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    connection.create_function("seal", -1, _seal, deterministic=True)
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
    if tables == 0 and application == 0:
        raise StoreError(
            f"{path} is empty: the run that made it was stopped before it wrote anything. Run it again."
        )
    if application != schema.application_id:
        raise StoreError(f"{path} is not a store of howsmooth {schema.holds}. Choose another --out.")
    if version != schema.version and version not in schema.migrations:
        raise StoreError(
            f"{path} has schema version {version}, and this howsmooth reads up to version {schema.version}. "
            "Use the howsmooth that wrote it, or choose another --out."
        )
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _damaged(path, verdict)
    made_by = schema.statements if version == schema.version else schema.earlier.get(version)
    if made_by is not None:
        if _shape(connection) != _wanted_shape(made_by):
            raise _damaged(path, "its tables are not those that were made")
        _check_seals(connection, path, schema)
    if version != schema.version and write:
        _migrate(connection, schema, version)


def _shape(connection: sqlite3.Connection) -> frozenset[tuple[object, ...]]:
    """Describe tables and indices: the seals cover what is in the columns, not what these are called."""
    found: set[tuple[object, ...]] = set()
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        found.add((kind, name, "" if kind == "table" else " ".join(str(sql).split())))
        for pragma in ("table_info", "foreign_key_list"):
            rows = connection.execute(f"SELECT * FROM pragma_{pragma}(?)", (name,)).fetchall()
            found |= {(pragma, name, *row[1:]) for row in rows}
    return frozenset(found)


@cache
def _wanted_shape(statements: tuple[str, ...]) -> frozenset[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in statements:
            connection.execute(statement)
        return _shape(connection)


def _damaged(path: Path, verdict: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({verdict}). Restore a copy, or choose another --out; nothing was changed."
    )


def _migrate(connection: sqlite3.Connection, schema: Schema, version: int) -> None:
    """Bring a file to the present version: wholly or, whatever happens, not at all."""
    with begun(connection):
        for earlier in range(version, schema.version):
            for statement in schema.migrations[earlier]:
                connection.execute(statement)
        for table in schema.sealed:
            connection.execute(f"UPDATE {table} SET seal = seal({_values_of(connection, table)})")
        connection.execute(f"PRAGMA user_version = {schema.version}")


def _check_seals(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """See that the values of every row are those that were written; SQLite checks its own structure only."""
    there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in (table for table in schema.sealed if table in there):
        seal = f"seal({_values_of(connection, table)})"
        try:
            row = connection.execute(f"SELECT rowid FROM {table} WHERE seal IS NOT {seal} LIMIT 1").fetchone()
        except sqlite3.OperationalError as error:
            if "user-defined function" not in str(error):
                raise
            raise _damaged(path, f"a row of {table} holds letters that are none") from error
        if row is not None:
            raise _damaged(path, f"row {row[0]} of {table} is not what was written")


def _values_of(connection: sqlite3.Connection, table: str) -> str:
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    return ", ".join(sealed_columns(names))


def sealed_columns(names: Iterable[str]) -> list[str]:
    """Sort the columns that a seal covers: all but itself, and the row's number, which SQLite gives."""
    return sorted(name for name in names if name not in ("id", "seal"))


def _seal(*values: object) -> str:
    """Digest of the values of a row, the same for an integer and the float that a column makes of it."""
    plain = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return blake2b(repr(plain).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def store_there(folder: Path, schema: Schema) -> bool:
    """Whether the folder holds something under the name of the store; an empty file is nothing yet.

    Raises
    ------
    StoreError
        If the folder is there but is not a folder, or cannot be looked into.

    """
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"out: expected a folder, got the file {folder}. Choose another --out.")
        path = folder / schema.file
        return path.exists() and not (path.is_file() and path.stat().st_size == 0)
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
            connection = _opened(path, "rwc" if write else "ro")
            try:
                try:
                    check_schema(connection, path, write=write, schema=schema)
                except sqlite3.OperationalError as error:
                    # A killed writer left a batch half written, which must be taken back before reading.
                    if write or getattr(error, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
                        raise
                    connection.close()
                    _rolled_back(folder, schema)
                    connection = _opened(path, "ro")
                    check_schema(connection, path, write=False, schema=schema)
                if not write and _version(connection) != schema.version:
                    connection = _migrated_copy(connection, schema)
            except BaseException:
                connection.close()
                raise
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return connection, lock


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path.resolve()))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _rolled_back(folder: Path, schema: Schema) -> None:
    """Let SQLite take back what a killed writer left unfinished, unless another one is at work."""
    lock = locked(folder, schema)
    try:
        with closing(_opened(folder / schema.file, "rw")) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        lock.release()


def _migrated_copy(connection: sqlite3.Connection, schema: Schema) -> sqlite3.Connection:
    """Copy a store of an earlier version into memory, at the present version, for reading."""
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.backup(copy)
        copy.create_function("seal", -1, _seal, deterministic=True)
        _migrate(copy, schema, _version(copy))
    except BaseException:
        copy.close()
        raise
    connection.close()
    return copy


def in_use(folder: Path, schema: Schema) -> bool:
    """Whether another process has the store open for writing."""
    if not _lock_file(folder, schema).exists():
        return False
    lock = FileLock(_lock_file(folder, schema))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False  # nobody can write here
    lock.release()
    return False


def _lock_file(folder: Path, schema: Schema) -> Path:
    return folder / f".{Path(schema.file).stem}.lock"


def locked(folder: Path, schema: Schema) -> FileLock:
    """Make the folder and keep other writers out of its store."""
    lock = FileLock(_lock_file(folder, schema))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_PATIENCE)
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
