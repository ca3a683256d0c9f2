"""Open and check the SQLite file of a store, and keep a second writer out.

The file is written with a rollback journal and full synchronisation. So a process killed at any moment leaves
only whole transactions, and the file can be copied while no process writes. A lock file beside it keeps a
second writer out. The operating system releases the lock when the process that holds it ends.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

from howsmooth.errors import StoreError, reason
from howsmooth.words import RUN_AGAIN

__all__ = ["STORE_NAME", "begun", "connected", "empty", "locked", "store_there", "translated"]

STORE_NAME = "study.sqlite"
"""The name of the store file in the folder of a study."""

_LOCK_NAME = ".study.lock"
# "hsmo" in ASCII: SQLite's application id, which marks the file as a store of howsmooth.
_APPLICATION = 0x68736D6F
# Seconds to wait for the lock.
_PATIENCE = 0.5


@contextmanager
def begun(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the ``with`` block as one transaction: commit at its end, roll back after any error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk the rollback may fail too. Then the journal remains, and SQLite rolls back when the
        # file is opened next.
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an SQLite error in the ``with`` block into a StoreError that says what the user can do."""
    path = Path(path)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error) or "I/O" in str(error):
            remedy = f"Make room on the disk and {RUN_AGAIN}."
        elif "readonly" in str(error) or "unable to open" in str(error):
            remedy = "Make it writable, or choose another output folder."
        else:
            remedy = "Run the same command again, or choose another output folder."
        raise StoreError(
            f"{path} cannot be used: {error}. {remedy} Rows already written are kept."
        ) from error
    except sqlite3.IntegrityError:
        raise  # a repeated key would be a bug of howsmooth, not an error of the user
    except UnicodeDecodeError as error:
        # A damaged name of a table or column made SQLite's error message invalid UTF-8.
        raise _damaged(path, "a table or column name is not valid UTF-8") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} cannot be read: {error}. Move it away, or choose another output folder; nothing was "
            "changed."
        ) from error


def store_there(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has a store: anything named like one, except an empty file."""
    folder = Path(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"out: expected a folder, got the file {folder}. Choose another output folder.")
        path = folder / STORE_NAME
        return path.exists() and not (path.is_file() and path.stat().st_size == 0)
    except OSError as error:
        raise StoreError(
            f"out: expected a usable folder, got {folder} ({reason(error)}). Choose another output folder."
        ) from error


def connected(
    folder: str | os.PathLike[str], statements: Sequence[str], *, write: bool
) -> tuple[sqlite3.Connection, FileLock | None]:
    """Connect to the store file in a folder; with ``write``, also lock it, and create it if needed.

    ``statements`` are the SQL statements that create the tables.
    """
    folder = Path(folder)
    path = folder / STORE_NAME
    there = store_there(folder)
    if not write and not there:
        raise StoreError(f"out: expected a folder with {STORE_NAME}, got {folder}, which has none.")
    if there and not path.is_file():
        raise StoreError(f"{path} is not a file, so it cannot be a store. Choose another output folder.")
    lock = locked(folder) if write else None
    try:
        with translated(path):
            return _checked(path, statements, write=write), lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def empty(statements: Sequence[str]) -> sqlite3.Connection:
    """Connect to an empty store in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    _check(connection, Path(":memory:"), statements, write=True)
    return connection


def _checked(path: Path, statements: Sequence[str], *, write: bool) -> sqlite3.Connection:
    # A reader may have to roll back what a killed writer left, so it opens the file for writing, too; where
    # it may not write, SQLite opens the file for reading.
    uri = f"file:{quote(os.fsencode(path.resolve()))}?mode={'rwc' if write else 'rw'}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
    try:
        _check(connection, path, statements, write=write)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path, statements: Sequence[str], *, write: bool) -> None:
    """Create the tables in an empty file, or check that the file is an undamaged store of howsmooth."""
    connection.execute("PRAGMA synchronous = FULL")
    connection.create_function("seal", -1, _seal, deterministic=True)
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    made = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    # A process that is killed while it creates the store leaves an empty file.
    if not made and not application:
        if not write:
            raise StoreError(
                f"{path} is empty: the run that created it stopped before it wrote anything. Run it again."
            )
        with begun(connection):
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        return
    if application != _APPLICATION:
        raise StoreError(f"{path} is not a store of howsmooth. Choose another output folder.")
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _damaged(path, verdict)
    if sorted(sql for (sql,) in made) != sorted(statements):
        raise _damaged(path, "its tables are not those of this version of howsmooth")
    _check_seals(connection, path)


def _check_seals(connection: sqlite3.Connection, path: Path) -> None:
    """Check the stored digest of each row. SQLite itself checks only the structure of the file."""
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "seal"]
        try:
            row = connection.execute(
                f"SELECT rowid FROM {table} WHERE seal IS NOT seal({', '.join(names)}) LIMIT 1"
            ).fetchone()
        except sqlite3.OperationalError as error:
            if "user-defined function" not in str(error):
                raise
            raise _damaged(path, f"a row of {table} holds text that is not valid UTF-8") from error
        if row is not None:
            raise _damaged(path, f"row {row[0]} of {table} was changed after it was written")


def _seal(*values: object) -> str:
    """Return a digest of the values of a row. The numbers 1 and 1.0 give the same digest."""
    plain = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return blake2b(repr(plain).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _damaged(path: Path, verdict: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({verdict}). Restore a copy, or choose another output folder; nothing was "
        "changed."
    )


def locked(folder: str | os.PathLike[str]) -> FileLock:
    """Create the folder of a store, and take the lock that keeps other writers out of the store."""
    folder = Path(folder)
    lock = FileLock(folder / _LOCK_NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_PATIENCE)
    except Timeout as error:
        raise StoreError(
            f"{folder} is in use by another howsmooth process. Wait until it ends, or choose another output "
            "folder."
        ) from error
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({reason(error)}). Choose another output folder."
        ) from error
    return lock
