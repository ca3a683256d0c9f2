"""What a run tells while it works and at its end; apart, so that listening needs none of its tools."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome", "Progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run is, told after every write.

    ``done`` and ``planned`` count measurements of this process, ``kept`` those that the store had;
    ``cost_done`` and ``cost_planned`` weigh them by the time they take. ``layer`` is the one just
    measured, -1 before the first; ``failed`` counts what could not be measured. ``bounding`` says that
    all is measured and bounds are computed.
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
    failed: int = 0
    bounding: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run did.

    Attributes
    ----------
    measured
        Rows that this process added.
    kept
        Rows of the plan that the store had before.
    unconverged
        Of the rows added, those whose interval is wider than asked for.
    seconds
        Wall time, checks included.
    failed
        What could not be measured, and is recorded in the store.
    first_failure
        The reason of the first of these.

    """

    measured: int
    kept: int
    unconverged: int
    seconds: float
    failed: int = 0
    first_failure: str = ""
