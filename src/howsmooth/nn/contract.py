"""What every layer of this room promises: a constant that is proved, and how far its outputs reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from howsmooth.bounds import Bound

__all__ = ["LipschitzModule"]


class LipschitzModule(nn.Module, ABC):
    """A map of tokens (batch, n, d) whose Lipschitz constant is bounded by a proof.

    Constants are between Frobenius norms of token matrices (n, d), over all sequences of ``length`` tokens of
    norm at most ``radius``, in exact arithmetic, for the weights as they are when asked.
    """

    @abstractmethod
    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return an upper bound on the Lipschitz constant."""

    @abstractmethod
    def output_radius(self, length: int, radius: float) -> float:
        """Return an upper bound on the norm of an output token."""

    def output_length(self, length: int) -> int:
        """Return the number of output tokens."""
        return length

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments, JSON values, with which the constructor builds it, weights aside."""
