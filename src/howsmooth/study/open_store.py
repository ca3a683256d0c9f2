"""What all stores have in common: how they are opened, held by one writer, and closed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from filelock import FileLock

from howsmooth.study.schema import Schema, begun, connected, store_there, translated

__all__ = ["OpenStore", "now"]

Opened = TypeVar("Opened", bound="OpenStore")


class OpenStore:
    """An open store; use it as a context manager, or call :meth:`close`.

    Parameters
    ----------
    connection
        To a file whose schema has been checked.
    path
        Of that file, for messages.
    lock
        Held while the store is open for writing; ``None`` for a reader.

    """

    # Of the file, its name included.
    _schema: ClassVar[Schema]

    def __init__(self, connection: sqlite3.Connection, path: Path, lock: FileLock | None) -> None:
        self._connection = connection
        self._lock = lock
        self._held = False
        self.path = path

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether the folder holds something under the store's name.

        Raises
        ------
        StoreError
            If the folder is there but is not a folder, or cannot be looked into.

        """
        return store_there(folder, cls._schema)

    @classmethod
    def open(cls: type[Opened], folder: Path, *, write: bool = True) -> Opened:
        """Open the store in a folder, making both if they are not there and ``write`` is true.

        Raises
        ------
        StoreError
            If the store is damaged, not a store, of a newer schema, in use by another process, or in a
            folder that cannot be written.

        """
        connection, lock = connected(folder, cls._schema, write=write)
        return cls(connection, folder / cls._schema.file, lock)

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let other processes write."""
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._held:
            yield  # part of a larger one
            return
        with translated(self.path), begun(self._connection):
            yield


def now() -> str:
    """Return the time as stores write it: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
