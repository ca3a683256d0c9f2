"""Checks of the times, the integration method, the step and the tolerances that users give to a flow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.dynamics.integrate import ADAPTIVE, FIXED, Integration
from howsmooth.dynamics.velocity_fields import Field, Layers, Sphere
from howsmooth.errors import ArgumentError, check_number, check_whole

__all__ = ["check_plan", "check_times"]

# Times and steps that a user computes count as the same if they differ by this fraction.
_SAME = 1e-9
# Default rtol, default atol, and the smallest rtol that is accepted. Below the smallest rtol, the error of a
# step cannot be told from rounding.
_TOLERANCES = {torch.float64: (1e-7, 1e-9, 1e-13), torch.float32: (1e-4, 1e-6, 1e-5)}


def check_times(times: object, field: Field) -> list[float]:
    """Check that the output times of a flow increase and that the velocity is defined at them, and return
    them as floats.
    """
    expected = "at least two finite, increasing times"
    if not isinstance(times, (Tensor, Sequence)) or isinstance(times, str):
        raise ArgumentError("times", expected=expected, got=type(times).__name__)
    try:
        moments = [float(time) for time in times]
    except (TypeError, ValueError) as error:
        raise ArgumentError("times", expected=expected, got=repr(times)) from error
    if len(moments) < 2 or not all(map(math.isfinite, moments)):
        raise ArgumentError("times", expected=expected, got=f"{moments[:5]}")
    for before, after in pairwise(moments):
        if not before < after:
            raise ArgumentError("times", expected=expected, got=f"{after:g} after {before:g}")
    # The last time may exceed the field's end by rounding.
    slack = _SAME * (abs(field.until) if math.isfinite(field.until) else 0.0)
    if math.isfinite(field.until) and (moments[0] < 0 or moments[-1] > field.until + slack):
        raise ArgumentError(
            "times",
            expected=f"times from 0 to {field.until:g}, between which the layers lie",
            got=f"times from {moments[0]:g} to {moments[-1]:g}",
        )
    return moments


def check_plan(
    field: Field,
    moments: list[float],
    dtype: torch.dtype,
    method: object,
    step: object,
    rtol: object,
    atol: object,
    max_steps: object,
) -> Integration:
    """Check the integration method of a flow and its step or tolerances. Return them as a :class:`Plan`."""
    if not isinstance(method, str) or method not in ADAPTIVE + FIXED:
        raise ArgumentError("method", expected=f"one of {', '.join(ADAPTIVE + FIXED)}", got=repr(method))
    most = check_whole("max_steps", max_steps)
    relative, absolute, smallest = _TOLERANCES[dtype]
    gap = min(after - before for before, after in pairwise(moments))
    if method in ADAPTIVE:
        if step is not None:
            raise ArgumentError(
                "step",
                expected=f"None, because {method} chooses its steps",
                got=repr(step),
                remedy=f"Give rtol and atol, or a method with a step: {', '.join(FIXED)}.",
            )
        relative = relative if rtol is None else check_number("rtol", rtol)
        absolute = absolute if atol is None else check_number("atol", atol)
        if not smallest <= relative < 1:
            raise ArgumentError(
                "rtol",
                expected=f"a number from {smallest:g}, below which rounding in {dtype} dominates, to 1",
                got=f"{relative:g}",
            )
        return Integration(method, None, relative, absolute, most)
    for name, given in (("rtol", rtol), ("atol", atol)):
        if given is not None:
            raise ArgumentError(
                name, expected=f"None, because {method} has a fixed step and no tolerances", got=repr(given)
            )
    layers = field.field if isinstance(field, Sphere) else field
    # Residual layers of Layers take one step each, counted from time 0. All other steps have the given size
    # and are counted from the first time.
    if method == "residual" and isinstance(layers, Layers):
        if step is not None and not _whole(check_number("step", step), layers.duration, once=True):
            raise ArgumentError(
                "step", expected=f"None, or {layers.duration:g} for one step per layer", got=repr(step)
            )
        size, origin = layers.duration, 0.0
    else:
        if step is None:
            raise ArgumentError("step", expected=f"a number > 0 for {method}", got="None")
        size, origin = check_number("step", step), moments[0]
    # A step must not jump over an output time.
    if size > gap * (1 + _SAME):
        raise ArgumentError(
            "step",
            expected=f"at most {gap:g}, the smallest difference of two times",
            got=f"{size:g}",
            remedy="Take a smaller step, or fewer times.",
        )
    if method == "residual":
        for time in moments:
            if not _whole(time - origin, size):
                raise ArgumentError(
                    "times",
                    expected=f"whole multiples of {size:g} after {origin:g}, where residual layers end",
                    got=f"{time:g}",
                )
    plan = Integration(method, size, relative, absolute, most)
    longest = max(plan.steps(after - before) for before, after in pairwise(moments))
    if longest > most:
        raise ArgumentError(
            "step",
            expected=f"at most max_steps = {most} steps between two times",
            got=f"{longest} steps of {size:g}",
        )
    return plan


def _whole(length: float, unit: float, *, once: bool = False) -> bool:
    """Return True if ``length`` is a multiple of ``unit`` (with ``once``, is ``unit``), up to rounding."""
    count = 1 if once else round(length / unit)
    return abs(length - count * unit) <= _SAME * max(unit, abs(length))
