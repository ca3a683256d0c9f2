"""A copied part of a model as a map of tokens, which PyTorch differentiates."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import ArgumentError

__all__ = ["ModuleMap", "Part"]


class Part(Protocol):
    """Code of a model and a copy of its weights, as a function of the tokens of one sequence."""

    @property
    def x(self) -> Tensor:
        """The captured tokens (n, d). Other tokens must have the same shape, dtype and device."""

    def run(self, x: Tensor) -> Tensor:
        """Run the part on tokens (n, d), and return its output (n_out, d_out)."""

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Part:
        """Return a copy of the part in another dtype or on another device."""

    def describe(self) -> str:
        """Return a phrase that describes the part, for messages and reports."""


class ModuleMap(TokenMap):
    """The map X (..., n, d) -> (..., n_out, d_out) of a copied part of a model, differentiated by PyTorch."""

    def __init__(self, part: Part) -> None:
        self.part = part

    @property
    def n(self) -> int:
        """Number of tokens in the captured forward pass. It fixes the positions and masks of the map."""
        return self.part.x.shape[0]

    @property
    def d(self) -> int:
        """Dimension of the map's input tokens."""
        return self.part.x.shape[1]

    @cached_property
    def d_out(self) -> int:
        """Dimension of the map's output tokens."""
        with torch.no_grad():
            return self.part.run(self.part.x).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and tokens of the map."""
        return self.part.x.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights and tokens of the map."""
        return self.part.x.device

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return self.part.describe()

    def check_length(self, n: int) -> None:
        """Raise ArgumentError unless ``n`` is the number of tokens in the captured forward pass."""
        if n != self.n:
            raise ArgumentError("X", expected=f"n = {self.n} tokens, as captured", got=f"n = {n}")

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """Return the same map with weights in another dtype or on another device."""
        other = copy.copy(self)
        other.part = self.part.to(dtype=dtype, device=device)
        return other

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        if weighting is not None:
            raise ArgumentError(
                "measure",
                expected="a map that is known to act on measures",
                got="a part of a model",
                remedy="Call the map on tokens.",
            )
        members = [self.part.run(member) for member in x.reshape(-1, *x.shape[-2:])]
        return torch.stack(members).reshape(*x.shape[:-2], *members[0].shape)
