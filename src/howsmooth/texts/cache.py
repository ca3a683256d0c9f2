"""What was made from files once is kept, and made again when one of them changes.

Finding prose in a thousand source files takes seconds, in every process. A cache is a convenience: where
it cannot be read or written, or is not as it was written, the work is done as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "kept"]


def cache_folder() -> Path | None:
    """Return where texts are kept: ``$HOWSMOOTH_CACHE`` (empty: nowhere), or the user's cache folder."""
    chosen = os.environ.get("HOWSMOOTH_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - may stay "~"
    # The specification of XDG says that a relative path is to be ignored; "~" stays where there is no home.
    return Path(base, "howsmooth") if base and os.path.isabs(base) else None  # noqa: PTH117


def kept(name: str, made_of: Sequence[Path], make: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Return ``make()``, or what it returned for the same files before.

    Parameters
    ----------
    name
        What is kept, part of the file's name: letters, digits, hyphens.
    made_of
        The files that ``make`` reads, the source of its own code included. They are taken for unchanged
        while path, size and time of change are.
    make
        Does the work: two strings.

    """
    folder = cache_folder()
    if folder is None:
        return make()
    try:
        key = _key(made_of)
    except OSError:
        return make()
    path = folder / f"{name}-{key[:16]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(path.read_text("utf-8"))
        first, second = str(found["first"]), str(found["second"])
        if found["seal"] == _seal(key, first, second):
            return first, second
    first, second = make()
    with suppress(OSError, UnicodeEncodeError):
        _write(path, json.dumps({"first": first, "second": second, "seal": _seal(key, first, second)}))
    return first, second


def _key(made_of: Sequence[Path]) -> str:
    stamps = []
    for path in made_of:
        about = path.stat()
        stamps.append((str(path), about.st_size, about.st_mtime_ns))
    return hashlib.sha256(json.dumps([sys.version, stamps]).encode()).hexdigest()


def _seal(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _write(path: Path, content: str) -> None:
    """Put a file in place whole or not at all, whoever else does the same at this moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(prefix=f".{path.stem}.", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(content)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
