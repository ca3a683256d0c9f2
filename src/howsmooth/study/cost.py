"""What measurements cost, by which the time left is told; apart, so that a look at a study loads no model."""

from __future__ import annotations

__all__ = ["measurement_cost"]


def measurement_cost(n: int) -> float:
    """Estimate the time that a measurement takes, relative to others, as a function of its length.

    A constant for what every batch pays, the projections' n and the attention's n². Only the shares
    matter, and only for the time left that is shown.
    """
    return 20.0 + n + n * n / 400.0
