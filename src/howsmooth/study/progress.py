"""What a run tells while it works; apart, so that listening to it needs none of what it works with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run is, told after every write.

    ``done`` and ``planned`` count measurements of this process, ``kept`` those that the store had;
    ``cost_done`` and ``cost_planned`` weigh them by the time they take. ``layer`` is the one just
    measured, -1 before the first.
    """

    done: int
    planned: int
    kept: int
    cost_done: float
    cost_planned: float
    model: str
    text: str
    n: int
    scope: str
    layer: int
