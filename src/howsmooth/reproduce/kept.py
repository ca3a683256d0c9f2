"""Finished units of work of an experiment, one file each: a unit is kept whole or not at all.

For what is no study of sequences (those are kept in a study's store): constants at constructed tokens,
eigenvalues of heads. A unit's key says all that its rows depend on, so that a changed model or text is
another unit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError

__all__ = ["Kept", "Key"]

Key = Mapping[str, str | int | None]
"""What a unit depends on, by name."""


class Kept:
    """The finished units in a folder.

    Parameters
    ----------
    folder
        Made when the first unit is added.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, key: Key) -> bool:
        """Tell whether a unit is finished."""
        return self._path(key).exists()

    def add(self, key: Key, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the rows of a unit.

        Raises
        ------
        StoreError
            If they cannot be written; then nothing is kept of them.

        """
        path = self._path(key)
        content = {"key": dict(key), "rows": [dict(row) for row in rows]}
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({**content, "seal": _seal(content)}), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StoreError(
                f"{path} cannot be written: {error.strerror}. What was finished before is kept; make room "
                "or make the folder writable, and run the same command again."
            ) from error

    def table(self, keys: Iterable[Key]) -> pd.DataFrame:
        """Tabulate the rows of some units, in their order; the names of a key are columns as well.

        Raises
        ------
        StoreError
            If one of them is not there, or is not as it was written.

        """
        rows: list[dict[str, Any]] = []
        for key in keys:
            rows += [{**key, **row} for row in self._read(key)]
        return pd.DataFrame(rows)

    def _read(self, key: Key) -> list[dict[str, Any]]:
        path = self._path(key)
        remedy = "Delete it, and run the same command again: only what is missing is measured."
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            content = {"key": written["key"], "rows": written["rows"]}
            whole = written["seal"] == _seal(content)
        except FileNotFoundError as error:
            raise StoreError(
                f"{path} is missing, which an experiment that was finished has. Run the same command again."
            ) from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path} is damaged. {remedy}") from error
        if not whole:
            raise StoreError(f"{path} is damaged: it is not as it was written. {remedy}")
        return list(content["rows"])

    def _path(self, key: Key) -> Path:
        return self.folder / f"{hashlib.sha256(_written(dict(key)).encode()).hexdigest()[:24]}.json"


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_written(content).encode()).hexdigest()


def _written(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=True)
