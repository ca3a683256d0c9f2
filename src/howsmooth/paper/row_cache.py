"""Keep computed rows of figures in cache files, so that no row is computed twice.

One file holds the rows of one unit of work, and is written completely or not at all. The key of a unit
contains all values on which its rows depend, so a changed model or text has another file. The cache is for
constants at constructed tokens, eigenvalues of heads and the like. Measurements at sequences of a text are
kept in the store of a study instead.
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
    """Create a folder, and convert an OSError of the ``with`` block to a StoreError."""
    with written_beside(folder, "finished measurements"):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def kept_rows(folder: Path, key: Key, measure: Callable[[], Iterable[Row]]) -> list[Row]:
    """Return the rows in the cache file of the given key; if there is no such file, measure the rows and
    write the file.

    ``key`` contains all values on which the rows depend, and determines the name of the file.

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
