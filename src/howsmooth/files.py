"""Write tables and texts to files. With :func:`replace_file` and :func:`write_parquet` no reader sees an
incomplete file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from howsmooth.errors import ArgumentError, StoreError
from howsmooth.words import RUN_AGAIN

if TYPE_CHECKING:
    import pandas as pd  # takes a second, and a wrong folder is told before

__all__ = [
    "check_parquet", "csv_of", "replace_file", "writable_folder", "write_parquet", "write_table",
    "written_beside",
]  # fmt: skip


@contextmanager
def writable_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a folder if needed, and yield its path for a ``with`` block that writes into it. An OSError,
    also one of the block, becomes a StoreError.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another output folder."
        ) from error


@contextmanager
def written_beside(folder: str | os.PathLike[str], kept: str) -> Iterator[None]:
    """Convert an OSError of the ``with`` block to a StoreError, which says that the stored rows are safe.

    ``kept`` is the name of the rows in the store, such as "measurements".
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The {kept} are saved in "
            f"{folder}. Make it writable or free disk space, and {RUN_AGAIN}."
        ) from error


def csv_of(table: pd.DataFrame) -> str:
    """Return a table as CSV text."""
    return table.to_csv(index=False, lineterminator="\n")


def check_parquet(name: str) -> None:
    """Raise an ArgumentError for the argument ``name`` if pandas has no engine for parquet."""
    if not any(find_spec(engine) for engine in ("pyarrow", "fastparquet")):
        raise ArgumentError(
            name,
            expected="an engine for parquet",
            got="none",
            remedy="Install one with pip install pyarrow, or use the tables in CSV.",
        )


def write_parquet(table: pd.DataFrame, path: str | os.PathLike[str], note: str) -> None:
    """Write a table as a parquet file, with a note in the metadata that pandas reads into ``attrs``. Raise
    ArgumentError if pandas has no engine for parquet.
    """
    check_parquet("path")
    table = table.copy()
    table.attrs["howsmooth"] = note
    partial = _partial(Path(path))
    table.to_parquet(partial, index=False)
    partial.replace(path)


def write_table(table: pd.DataFrame, folder: str | os.PathLike[str], name: str) -> Path:
    """Write a table as a CSV file into a folder, which is created if needed, and return its path. Raise
    StoreError if it cannot be written.
    """
    with writable_folder(folder) as folder:
        replace_file(folder / name, csv_of(table))
    return folder / name


def replace_file(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file, replacing an existing file in one step."""
    path = Path(path)
    partial = _partial(path)
    # File names that are not UTF-8 become lone surrogates in Python, which UTF-8 cannot encode.
    partial.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
    partial.replace(path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
