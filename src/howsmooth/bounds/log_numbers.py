"""Numbers >= 0 stored as logarithms, which may lie far outside the range of floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["Log", "Number", "maximum", "minimum"]


class Log:
    """A number >= 0, or a tensor of such numbers, stored as natural logarithms in float64.

    Its sums, products, quotients and powers are those of the numbers, so that a formula reads as it is
    written, and are differentiable. Zero times infinity is zero: a factor that overflows does not matter
    where another one is zero.
    """

    def __init__(self, log: Tensor | float) -> None:
        self.log = log if isinstance(log, Tensor) else torch.tensor(log, dtype=torch.float64)

    @classmethod
    def of(cls, number: Number) -> Log:
        """Convert a number or a tensor of numbers to its logarithm. Integers may have any size."""
        if isinstance(number, Log):
            return number
        if isinstance(number, Tensor):
            return cls(number.double().log())
        return cls(-math.inf if number == 0 else math.log(number))

    @property
    def value(self) -> Tensor:
        """The number itself, inf where it overflows."""
        return self.log.exp()

    def __add__(self, other: Number) -> Log:
        return Log(torch.logaddexp(self.log, Log.of(other).log))

    def __mul__(self, other: Number) -> Log:
        one, two = self.log, Log.of(other).log
        return Log(torch.where(torch.isneginf(one) | torch.isneginf(two), -torch.inf, one + two))

    def __truediv__(self, other: Number) -> Log:
        return self * Log(-Log.of(other).log)

    def __rtruediv__(self, other: Number) -> Log:
        return Log.of(other) / self

    def __pow__(self, power: float) -> Log:
        return Log(power * self.log)

    __radd__, __rmul__ = __add__, __mul__

    def sum(self) -> Log:
        """Return the sum of all numbers of the tensor."""
        return Log(torch.logsumexp(self.log.flatten(), dim=0))

    @classmethod
    def total(cls, terms: Iterable[Log]) -> Log:
        """Return the sum of several numbers."""
        return cls(torch.stack([term.log for term in terms])).sum()


Number = Log | Tensor | float
"""A number in a formula. The logarithm is taken of tensors and floats, and of integers of any size."""


def minimum(*numbers: Number) -> Log:
    """Return the smallest of several numbers, or the smallest in each entry of several tensors."""
    return _chosen(torch.minimum, numbers)


def maximum(*numbers: Number) -> Log:
    """Return the largest of several numbers, or the largest in each entry of several tensors."""
    return _chosen(torch.maximum, numbers)


def _chosen(choose: Callable[[Tensor, Tensor], Tensor], numbers: tuple[Number, ...]) -> Log:
    first, *others = (Log.of(number).log for number in numbers)
    for other in others:
        first = choose(first, other)
    return Log(first)
