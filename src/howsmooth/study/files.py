"""Files that a study writes beside its store: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from howsmooth.errors import StoreError

__all__ = ["csv_of", "replace_file", "write_table", "written_beside"]


@contextmanager
def written_beside(folder: Path, kept: str) -> Iterator[None]:
    """Say of a file that cannot be written beside a store that its rows, ``kept`` in words, are safe.

    Raises
    ------
    StoreError
        In place of an OSError.

    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The {kept} are kept in "
            f"{folder}; make it writable or make room, and run the same command again."
        ) from error


def csv_of(table: pd.DataFrame) -> str:
    """Write a table as CSV."""
    return table.to_csv(index=False, lineterminator="\n")


def write_table(table: pd.DataFrame, folder: Path, name: str) -> Path:
    """Write a table as CSV into a folder, which is made if it is not there, and return the file.

    Raises
    ------
    StoreError
        If it cannot be written.

    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, csv_of(table))
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another --out."
        ) from error
    return path


def replace_file(path: Path, content: str) -> None:
    """Write a file in place of the one that is there, if there is one."""
    partial = path.with_name(f".{path.name}.partial")
    # Lone surrogates can come from file names that are not UTF-8.
    partial.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
    partial.replace(path)
