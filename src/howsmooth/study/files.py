"""Files that a study writes beside its store: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from howsmooth.errors import StoreError

__all__ = ["replace_file", "write_table"]


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
        replace_file(path, table.to_csv(index=False, lineterminator="\n"))
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
