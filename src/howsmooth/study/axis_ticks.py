"""Choose round numbers for the ticks of an axis."""

from __future__ import annotations

import math

__all__ = ["linear_ticks", "log_ticks", "nice_step", "number"]


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five round numbers between ``low`` and ``high``."""
    step = nice_step((high - low) / 7)
    step = max(1.0, step) if whole else step
    return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return four to eight round numbers between two positive ones, spaced for a logarithmic axis."""
    decades = math.log10(high / low)
    if decades < 0.5:
        step = nice_step((high - low) / 8)
        if whole:
            step = max(1.0, step)
        first = math.ceil(low / step)
        return [round(k * step, 12) for k in range(first, math.floor(high / step) + 1)]
    digits: tuple[int, ...] = (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
    if decades < 1:
        digits = (1, 2, 3, 4, 6, 8)
    stride = max(1, round(decades / 6)) if digits == (1,) else 1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers if power % stride == 0 for digit in digits]
    return [tick for tick in ticks if low <= tick <= high and (not whole or tick >= 1)]


def nice_step(step: float) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= step * 0.999)


def number(value: float, position: int | None = None) -> str:
    """Format the number of a tick; ``position`` is ignored, but matplotlib passes it."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.6g}"
