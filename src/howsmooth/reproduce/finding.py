"""What an experiment found, and the note in its folder that says what was asked of it.

Apart from :mod:`howsmooth.reproduce.experiment`, so that drawing needs nothing that measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.files import replace_file

__all__ = ["Finding", "Picture", "read_note", "write_note"]

_NOTE = "asked.json"


@dataclass(frozen=True)
class Picture:
    """A drawn figure: its two files, a caption for the page, and words for the reader who does not see it."""

    pdf: Path
    png: Path
    alt: str
    caption: str = ""


@dataclass(frozen=True, eq=False)
class Finding:
    """What an experiment found.

    Attributes
    ----------
    pictures
        Drawn from the folder.
    seen
        What is seen, in sentences that are written from the numbers.
    tables
        Captions with their tables.
    made
        How the numbers came about, as pairs of words: models, texts with their digests, settings.

    """

    pictures: list[Picture]
    seen: list[str]
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    made: list[tuple[str, str]] = field(default_factory=list)


def write_note(folder: Path, note: Mapping[str, Any]) -> None:
    """Write down in an experiment's folder what was asked last, so that ``draw`` shows that.

    Raises
    ------
    StoreError
        If it cannot be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _NOTE, json.dumps(note, indent=2, sort_keys=True))
    except OSError as error:
        raise StoreError(
            f"out: expected a writable folder, got {folder} ({error.strerror}). Choose another --out."
        ) from error


def read_note(folder: Path) -> dict[str, Any]:
    """Read what was asked last.

    Raises
    ------
    StoreError
        If it cannot be read.

    """
    path = folder / _NOTE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(
            f"{path} says what was measured here, and cannot be read. Choose another --out."
        ) from error
