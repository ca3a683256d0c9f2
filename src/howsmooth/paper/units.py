"""Finished units of work of a figure, one file each: a unit is kept whole or not at all.

For what is no study of sequences (those are kept in a study's store): constants at constructed tokens,
eigenvalues of heads. A unit's key says all that its rows depend on, so that a changed model or text is
another unit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from howsmooth.errors import StoreError
from howsmooth.study.files import replace_file

__all__ = ["Key", "Row", "kept_rows", "writing"]

Key = Mapping[str, str | int | None]
"""What a unit depends on, by name."""

Row = dict[str, Any]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a folder that is written into, and say what to do if something there cannot be written.

    Raises
    ------
    StoreError
        If so.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. What was measured is kept; "
            "make room or make it writable, and run the same command again, or choose another --out."
        ) from error


def kept_rows(folder: Path, key: Key, measure: Callable[[], Iterable[Row]]) -> list[Row]:
    """Return the rows of a unit as its file in a folder has them; without a file, measure and write it first.

    Raises
    ------
    StoreError
        If the file cannot be written, and then there is none; if it cannot be read, or is not as it was
        written.

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
            f"{path} is damaged: it is not as it was written. Delete it, and run the same command again: "
            "only what is missing is measured."
        )
    return list(kept["rows"])


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
