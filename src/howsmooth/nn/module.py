"""The base class of all layers with a proved Lipschitz constant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from howsmooth.bounds import Bound

__all__ = ["LipschitzModule"]


class LipschitzModule(nn.Module, ABC):
    """A module on tokens (batch, n, d) with a proved upper bound on its Lipschitz constant.

    The constants refer to Frobenius norms of token matrices (n, d) and to all sequences of ``length`` tokens
    of norm at most ``radius``. They hold in exact arithmetic, for the weights at the time of the call.
    """

    @abstractmethod
    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return an upper bound on the Lipschitz constant, on tokens of norm at most ``radius``."""

    @abstractmethod
    def output_radius(self, length: int, radius: float) -> float:
        """Return an upper bound on the norms of output tokens, for inputs of norm at most ``radius``."""

    def output_length(self, length: int) -> int:
        """Return the number of output tokens for ``length`` input tokens."""
        return length

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the constructor's keyword arguments as JSON values; weights are not among them."""
