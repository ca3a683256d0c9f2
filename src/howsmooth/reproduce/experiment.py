"""What an experiment is: it measures into a folder, and says what is seen from the folder alone.

Each experiment is a module of its own, which :mod:`howsmooth.reproduce.registry` lists. Its
``measure`` continues where it was interrupted; its ``draw`` never measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from howsmooth.reproduce.finding import Finding
from howsmooth.study.plan import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.study.tools import Tools

__all__ = ["TEXTS", "Experiment", "OnStep", "Request", "Step"]

TEXTS = ("python-docs", "python-code")
"""The texts of an experiment if none is asked for: every Python carries them."""


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
