"""The file of a store: opened, checked, kept from two writers, and what is wrong with it.

It is written with a rollback journal and full synchronisation, so that a process killed at any moment leaves
whole transactions, and the file can be copied while no process writes. A lock file beside it keeps a second
writer out; the operating system releases it with the process that held it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

from howsmooth.errors import StoreError

__all__ = ["STORE_NAME", "begun", "connected", "in_use", "locked", "reason", "store_there", "translated"]

STORE_NAME = "study.sqlite"
"""The name of the file in the folder of a study."""

_LOCK_NAME = ".study.lock"
# "hsmo": says whose file it is.
_APPLICATION = 0x68736D6F
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


def store_there(folder: Path) -> bool:
    """Whether the folder holds something under the name of the store; an empty file is nothing yet.

    Raises
    ------
    StoreError
        If the folder is there but is not a folder, or cannot be looked into.

    """
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"out: expected a folder, got the file {folder}. Choose another --out.")
        path = folder / STORE_NAME
        return path.exists() and not (path.is_file() and path.stat().st_size == 0)
    except OSError as error:
        raise StoreError(
            f"out: expected a usable folder, got {folder} ({reason(error)}). Choose another --out."
        ) from error


def connected(
    folder: Path, statements: Sequence[str], *, write: bool
) -> tuple[sqlite3.Connection, FileLock | None]:
    """Open the store in a folder, making both if they are not there and ``write`` is true.

    Parameters
    ----------
    folder
        Of the study.
    statements
        Those that make the tables.
    write
        Whether rows will be added.

    Returns
    -------
    connection, lock
        The lock is held if ``write``.

    Raises
    ------
    StoreError
        If the store is damaged, not a store, in use by another process, or in a folder that cannot be
        written.

    """
    path = folder / STORE_NAME
    there = store_there(folder)
    if not write and not there:
        raise StoreError(f"out: expected a folder with {STORE_NAME}, got {folder}, which has none.")
    if there and not path.is_file():
        raise StoreError(f"{path} is not a file, so it cannot be a store. Choose another --out.")
    lock = locked(folder) if write else None
    try:
        with translated(path):
            return _checked(folder, statements, write=write), lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _checked(folder: Path, statements: Sequence[str], *, write: bool) -> sqlite3.Connection:
    path = folder / STORE_NAME
    connection = _opened(path, "rwc" if write else "ro")
    try:
        _check(connection, path, statements, write=write)
    except sqlite3.OperationalError as error:
        connection.close()
        # A killed writer left a transaction half written, which must be taken back before reading.
        if write or getattr(error, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
            raise
        _take_back(folder)
        return _checked(folder, statements, write=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path.resolve()))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)


def _check(connection: sqlite3.Connection, path: Path, statements: Sequence[str], *, write: bool) -> None:
    """Make the tables in an empty file, or see that the file is ours, whole, and as it was written."""
    connection.execute("PRAGMA synchronous = FULL")
    connection.create_function("seal", -1, _seal, deterministic=True)
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    made = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    # An empty file is what a process killed while making the store leaves behind.
    if not made and not application:
        if not write:
            raise StoreError(
                f"{path} is empty: the run that made it was stopped before it wrote anything. Run it again."
            )
        with begun(connection):
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        return
    if application != _APPLICATION:
        raise StoreError(f"{path} is not a store of howsmooth. Choose another --out.")
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _damaged(path, verdict)
    if sorted(sql for (sql,) in made) != sorted(statements):
        raise _damaged(path, "its tables are not those that this howsmooth makes")
    _check_seals(connection, path)


def _check_seals(connection: sqlite3.Connection, path: Path) -> None:
    """See that the values of every row are those that were written; SQLite checks its own structure only."""
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "seal"]
        try:
            row = connection.execute(
                f"SELECT rowid FROM {table} WHERE seal IS NOT seal({', '.join(names)}) LIMIT 1"
            ).fetchone()
        except sqlite3.OperationalError as error:
            if "user-defined function" not in str(error):
                raise
            raise _damaged(path, f"a row of {table} holds letters that are none") from error
        if row is not None:
            raise _damaged(path, f"row {row[0]} of {table} is not what was written")


def _seal(*values: object) -> str:
    """Digest the values of a row; an integer and the float that a column makes of it have the same."""
    plain = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return blake2b(repr(plain).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _damaged(path: Path, verdict: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({verdict}). Restore a copy, or choose another --out; nothing was changed."
    )


def _take_back(folder: Path) -> None:
    """Let SQLite take back what a killed writer left unfinished, unless another one is at work."""
    lock = locked(folder)
    try:
        with closing(_opened(folder / STORE_NAME, "rw")) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        lock.release()


def in_use(folder: Path) -> bool:
    """Whether another process has the store open for writing."""
    path = folder / _LOCK_NAME
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False  # nobody can write here
    lock.release()
    return False


def locked(folder: Path) -> FileLock:
    """Make the folder and keep other writers out of its store."""
    lock = FileLock(folder / _LOCK_NAME)
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
