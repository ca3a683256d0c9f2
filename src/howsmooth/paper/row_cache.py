"""Keep the rows that a figure computes in cache files, so that nothing is computed twice.

A file holds the rows of one unit of work, and is written whole or not at all. The cache is for work that is
not a study of sequences, such as constants at constructed tokens, or eigenvalues of heads; studies have a
store. A unit's key holds everything on which its rows depend. So a changed model or text makes a new unit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from howsmooth.errors import StoreError
from howsmooth.study.file_writing import replace_file, written_beside

__all__ = ["Key", "Row", "kept_rows", "writing"]

Key = Mapping[str, str | int | None]
"""The values on which a unit depends, by name."""

Row = dict[str, Any]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create a folder, and report any error of writing in the ``with`` block as a StoreError."""
    with written_beside(folder, "finished measurements"):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def kept_rows(folder: Path, key: Key, measure: Callable[[], Iterable[Row]]) -> list[Row]:
    """Read rows from their cache file; if there is no file, measure the rows and write it.

    ``key`` holds all values on which the rows depend, and determines the name of the file.

    Raises
    ------
    StoreError
        If the file cannot be written, cannot be read, or was changed after it was written.

    """
    path = folder / f"{_digest(dict(key))[:24]}.json"
    if not path.exists():
        content = {"key": dict(key), "rows": list(measure())}
        with writing(folder):
            replace_file(path, json.dumps({**content, "digest": _digest(content)}))
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        whole = kept.pop("digest") == _digest(kept)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise StoreError(
            f"{path} is damaged: it was changed after it was written. Delete it, and run the same command "
            "again, which measures only what is missing."
        )
    return list(kept["rows"])


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
