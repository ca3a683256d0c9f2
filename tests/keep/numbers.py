"""The kinds of numbers that stay, how each is compared, and inputs that are equal on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Two evaluations of one formula in float64 differ by rounding alone, on any processor.
RTOL = 1e-9

#: An interval may become this much wider than it was, or as wide as was asked for: its upper end depends on
#: the random start of the solver.
WIDER = 10.0


@dataclass(frozen=True)
class Close:
    """A number that stays, up to a relative and an absolute tolerance."""

    value: float
    rtol: float = RTOL
    atol: float = 0.0

    def stored(self) -> float:
        return self.value

    def differs(self, golden: float) -> str:
        if math.isclose(self.value, golden, rel_tol=self.rtol, abs_tol=self.atol):
            return ""
        return f"{self.value!r} is not {golden!r} to {self.rtol:g} relative"


@dataclass(frozen=True)
class Interval:
    """A measured constant with its interval.

    The old and the new interval overlap, and the new one is as narrow as ``asked``, or not much wider than
    the old; in float64 the values agree as well. In float32 the value has no tolerance of its own: the
    interval says what it is worth.
    """

    lower: float
    value: float
    upper: float
    rtol: float | None = RTOL
    asked: float = 1e-6

    def stored(self) -> list[float]:
        return [self.lower, self.value, self.upper]

    def differs(self, golden: list[float]) -> str:
        lower, value, upper = golden
        if not self.lower <= self.value <= self.upper:
            return f"{self.value!r} is outside of its own interval [{self.lower!r}, {self.upper!r}]"
        if self.lower > upper or self.upper < lower:
            return f"[{self.lower!r}, {self.upper!r}] does not meet [{lower!r}, {upper!r}]"
        if self.upper - self.lower > max(WIDER * (upper - lower), self.asked * abs(value)):
            return f"an interval of width {self.upper - self.lower:g} where it was {upper - lower:g}"
        return "" if self.rtol is None else Close(self.value, self.rtol).differs(value)


@dataclass(frozen=True)
class AtLeast:
    """What a search found, a lower bound or a worst input: it may become better, up to the bound ``most``
    that nothing exceeds, and not worse by more than its tolerance. Searches choose among near ties, so that
    their ends differ from processor to processor.
    """

    value: float
    most: float
    rtol: float = 2e-3

    def stored(self) -> float:
        return self.value

    def differs(self, golden: float) -> str:
        if not self.value <= self.most * (1 + RTOL):
            return f"{self.value!r} is more than can be, {self.most!r}"
        if self.value >= golden * (1 - self.rtol):
            return ""
        return f"only {self.value!r} where {golden!r} was found"


@dataclass(frozen=True)
class AtMost:
    """An upper bound that a search made small: the mirror image of ``AtLeast``."""

    value: float
    least: float
    rtol: float = 5e-3

    def stored(self) -> float:
        return self.value

    def differs(self, golden: float) -> str:
        if not self.value >= self.least * (1 - RTOL):
            return f"{self.value!r} is less than what it bounds, {self.least!r}"
        if self.value <= golden * (1 + self.rtol):
            return ""
        return f"{self.value!r} where {golden!r} sufficed"


Kind = Close | Interval | AtLeast | AtMost
Number = float | Kind
Case = Callable[[], Mapping[str, Number]]

#: name -> the numbers of a case; the part before the slash is the group.
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Add a function of no arguments that computes named numbers."""

    def add(made: Case) -> Case:
        assert name not in CASES, f"two cases are named {name}"
        CASES[name] = made
        return made

    return add


def as_number(found: Number) -> Kind:
    return found if isinstance(found, Kind) else Close(float(found))


def interval(estimate: Any, rtol: float | None = RTOL) -> Interval:
    """Read an estimate of one constant."""
    lower, value, upper = (float(getattr(estimate, name)) for name in ("lower", "value", "upper"))
    return Interval(lower, value, upper, rtol, float(estimate.rtol))


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of mean zero and variance one, spread evenly, from integers alone: every machine, and every
    release of NumPy and PyTorch, makes the same.
    """
    with np.errstate(over="ignore"):
        # The finaliser of SplitMix64, by G. Steele, D. Lea and C. Flood (2014).
        z = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(1 << 32)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    uniform = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((2 * uniform - 1) * math.sqrt(3.0)).reshape(shape).to(dtype)


def digest(values: Tensor, seed: int = 0) -> float:
    """One number that depends on every entry of a tensor."""
    flat = values.detach().double().flatten()
    return float(flat @ numbers(900 + seed, flat.numel())) / math.sqrt(flat.numel())


def digest_of(values: Tensor, seed: int = 0, rtol: float = RTOL) -> Close:
    """The same, with a tolerance relative to the size of the entries, which may cancel."""
    size = float(values.detach().double().square().mean().sqrt())
    return Close(digest(values, seed), rtol=rtol, atol=rtol * size)
