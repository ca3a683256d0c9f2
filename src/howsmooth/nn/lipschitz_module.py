"""The base classes of modules with a proved Lipschitz constant."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from howsmooth.bounds import Bound, Quantity
from howsmooth.nn.checks import check_ball, check_length

__all__ = ["LipschitzModule", "TokenModule"]


class LipschitzModule(nn.Module, ABC):
    """A module on tokens (batch, n, d) with a proved upper bound on its Lipschitz constant.

    The constants refer to Frobenius norms of token matrices (n, d) and to all sequences of ``length`` tokens
    of norm at most ``radius``. They hold in exact arithmetic, for the weights at the time of the call.

    Deriving from this class proves nothing: a subclass must have a theorem for its ``lipschitz_bound``, and
    name the theorem in the Bound. Certificates trust the bound, the radius and the length that it returns.
    """

    #: The attributes that ``repr`` shows.
    _shown: ClassVar[tuple[str, ...]] = ()

    def extra_repr(self) -> str:
        """Return the settings of the module as text for ``repr``."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)

    @abstractmethod
    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return an upper bound on the Lipschitz constant of the module.

        ``length`` is the number n of input tokens, and ``radius`` their largest Euclidean norm; math.inf for
        all tokens. ArgumentError is raised if the module does not accept such inputs.
        """

    @abstractmethod
    def output_radius(self, length: int, radius: float) -> float:
        """Return an upper bound on the norms of output tokens. For arguments see :meth:`lipschitz_bound`."""

    def output_length(self, length: int) -> int:
        """Return the number of output tokens for ``length`` input tokens, by default the same number."""
        return length


class TokenModule(LipschitzModule):
    """Base class of modules that map tokens to tokens. By default the Lipschitz constant is 1, and neither
    the number of tokens nor the bound on their norms changes.
    """

    _source: ClassVar[str]

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return an upper bound on the Lipschitz constant of the module."""
        n, R = self._check(length), check_ball(radius)
        quantity = Quantity.EVERYWHERE if math.isinf(R) else Quantity.GLOBAL
        return Bound.upper(type(self).__name__, quantity, self._source, formula=self._constant(n, R))

    def output_radius(self, length: int, radius: float) -> float:
        """Return an upper bound on the norms of output tokens for input tokens of norm at most ``radius``."""
        return self._reach(self._check(length), check_ball(radius))

    def output_length(self, length: int) -> int:
        """Return the number of output tokens for ``length`` input tokens."""
        return self._count(self._check(length))

    def _check(self, length: object) -> int:
        return check_length(length)

    def _constant(self, length: int, radius: float) -> float:
        return 1.0

    def _reach(self, length: int, radius: float) -> float:
        return radius

    def _count(self, length: int) -> int:
        return length
