"""What long work tells while it goes on, and at its end; apart, so that listening needs none of its tools."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

__all__ = ["SILENT", "Listener", "Outcome", "Silent"]


@runtime_checkable
class Listener(Protocol):
    """Whoever is told how far long work is."""

    def phase(self, words: str) -> None:
        """Hear what begins now."""

    def advance(self, done: float, total: float, words: str) -> None:
        """Hear how much of the present phase is done: ``done`` of ``total`` in units of time."""


class Silent:
    """A listener that passes nothing on."""

    def phase(self, words: str) -> None:
        """Ignore what begins now."""

    def advance(self, done: float, total: float, words: str) -> None:
        """Ignore how much is done."""


SILENT = Silent()
"""The listener of whoever wants to hear nothing."""


@dataclass
class Outcome:
    """What a run did; counts are by the table of the rows.

    Attributes
    ----------
    made
        Rows that this process added, of those asked for.
    kept
        Rows asked for that the store had before.
    unsettled
        Rows added whose numbers are less precise than asked for.
    left_out
        Attentions whose bounds were left out, as they would have taken too long.
    failed
        What could not be computed, and is recorded in the store.
    first_failure
        The reason of the first of these.
    seconds
        Wall time, checks included.

    """

    made: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    unsettled: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    failed: int = 0
    first_failure: str = ""
    seconds: float = 0.0
