"""What a map on tokens needs to know of a probability measure in order to act on it."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth.attention.weighting import Weighting

if TYPE_CHECKING:
    from howsmooth.attention.map import TokenMap

__all__ = ["AbstractMeasure"]


class AbstractMeasure(abc.ABC):
    """A probability measure on tokens that a :class:`~howsmooth.attention.TokenMap` can be called on.

    The measures themselves are in :mod:`howsmooth.measures`.
    """

    @property
    @abc.abstractmethod
    def d(self) -> int:
        """Dimension of a token."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of the measure."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the measure."""

    @abc.abstractmethod
    def push_forward(self, f: TokenMap) -> AbstractMeasure:
        """Return the image F(μ) = (Γ_μ)_# μ under the mean-field map of ``f``, a measure of the same kind."""

    @abc.abstractmethod
    def weighted_tokens(self) -> tuple[Tensor, Weighting]:
        """Return the atoms (n, d) with their weighting.

        Raises
        ------
        ArgumentError
            If the measure has no atoms.

        """
