"""What an experiment is: it measures into a folder, and says what is seen from the folder alone.

Each experiment is a module of its own, which :mod:`howsmooth.reproduce.registry` lists. Its
``measure`` continues where it was interrupted; its ``draw`` never measures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.plan import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.study.tools import Tools

__all__ = [
    "TEXTS", "Experiment", "Finding", "OnStep", "Picture", "Request", "Step", "read_note", "write_note",
]  # fmt: skip

TEXTS = ("python-docs", "python-code")
"""The texts of an experiment if none is asked for: every Python carries them."""

_NOTE = "asked.json"


@dataclass(frozen=True)
class Request:
    """What the user asks of an experiment; what is left out, the experiment decides.

    Attributes
    ----------
    models
        Instead of the experiment's own; empty for these.
    texts
        Names or paths for :func:`howsmooth.texts.load_text`.
    lengths
        Numbers of tokens; None for the experiment's own.
    samples
        Sequences a length; None for the experiment's own.
    layers
        None for the experiment's own.
    seed
        From which every other seed derives.
    device, dtype
        Where and in what precision to compute.
    as_published
        Also measure what the code published with the paper computes.
    command
        As typed, to be recorded with the measurements.

    """

    models: tuple[ModelSpec, ...] = ()
    texts: tuple[str, ...] = TEXTS
    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    layers: Ranges | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    as_published: bool = False
    command: str = ""


@dataclass(frozen=True)
class Step:
    """How far an experiment is: ``done`` of ``planned`` in units of time that it takes, and where."""

    done: float
    planned: float
    words: str


OnStep = Callable[[Step], None]


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


@dataclass(frozen=True)
class Experiment:
    """One of the paper's figures, or a table that belongs to it.

    Attributes
    ----------
    name
        As typed: ``figure-1``.
    title
        For people.
    paper
        Where it stands in the paper: ``Figure 1``.
    about
        What it shows and how, in a few sentences.
    measure
        Measures what the folder lacks: ``(request, folder, tools, on_step)``. The folder is the
        experiment's own, and made by it.
    draw
        Draws into the folder and says what is seen in it: ``(folder)``; never measures.

    """

    name: str
    title: str
    paper: str
    about: str
    measure: Callable[[Request, Path, Tools, OnStep], None]
    draw: Callable[[Path], Finding]


def write_note(folder: Path, note: Mapping[str, Any]) -> None:
    """Write down in an experiment's folder what was asked last, so that ``draw`` shows that.

    Raises
    ------
    StoreError
        If it cannot be written.

    """
    path = folder / _NOTE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{_NOTE}.partial")
        partial.write_text(json.dumps(note, indent=2, sort_keys=True), encoding="utf-8")
        partial.replace(path)
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
