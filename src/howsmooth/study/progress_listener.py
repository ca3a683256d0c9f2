"""Define listeners, to which long computations report their progress, and the outcome of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["SILENT", "Listener", "Outcome"]


class Listener:
    """Receives progress reports from long computations. This base class ignores them."""

    def phase(self, words: str) -> None:
        """Receive the name of the phase that starts."""

    def advance(self, done: float, total: float, words: str, left: float | None = None) -> None:
        """Receive the finished and the total amount of work and, if known, the seconds that are ``left``."""

    def counter(self, noun: str) -> Callable[[float, int], None]:
        """Return a function (done, total) that reports progress, such as "layer 3 of 12" for noun "layer"."""
        return lambda done, total: self.advance(done, float(total), f"{noun} {math.ceil(done)} of {total}")


SILENT = Listener()


@dataclass
class Outcome:
    """The outcome of a run: how many rows it computed, by table, and how many computations failed."""

    made: Counter[str] = field(default_factory=Counter)  #: Requested rows that this run added.
    kept: Counter[str] = field(default_factory=Counter)  #: Requested rows that the store already had.
    unsettled: Counter[str] = field(default_factory=Counter)  #: Added rows that did not converge.
    failed: int = 0
    first_failure: str = ""  #: The reason of the first failure.
    seconds: float = 0.0  #: Wall time, with the checks at the start.
