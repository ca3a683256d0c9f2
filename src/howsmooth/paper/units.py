"""Finished units of work of a figure, one file each: a unit is kept whole or not at all.

For what is no study of sequences (those are kept in a study's store): constants at constructed tokens,
eigenvalues of heads. A unit's key says all that its rows depend on, so that a changed model or text is
another unit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from howsmooth.errors import StoreError
from howsmooth.study.files import replace_file

__all__ = ["Key", "Row", "load_rows", "save_rows", "writing"]

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


def save_rows(folder: Path, key: Key, rows: Sequence[Row]) -> None:
    """Keep the rows of a unit.

    Raises
    ------
    StoreError
        If they cannot be written; then nothing is kept of them.

    """
    content = {"key": dict(key), "rows": list(rows)}
    with writing(folder):
        replace_file(_path(folder, key), json.dumps({**content, "digest": _digest(content)}))


def load_rows(folder: Path, key: Key) -> list[Row] | None:
    """Return the rows of a unit; None if it is not kept.

    Raises
    ------
    StoreError
        If the unit cannot be read, or is not as it was written.

    """
    path = _path(folder, key)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        content = {"key": kept["key"], "rows": kept["rows"]}
        whole = kept["digest"] == _digest(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        raise StoreError(
            f"{path} is damaged: it is not as it was written. Delete it, and run the same command again: "
            "only what is missing is measured."
        )
    return list(content["rows"])


def _path(folder: Path, key: Key) -> Path:
    return folder / f"{_digest(dict(key))[:24]}.json"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
