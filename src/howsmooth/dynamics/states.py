"""Tokens and measures as the one tensor that is integrated, and back."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from howsmooth.attention import AbstractMeasure, Weighting
from howsmooth.dynamics.fields import Field, Velocity
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure

__all__ = ["System", "Tokens", "system_of"]


class System(abc.ABC):
    """A state as a tensor, whose rows move along a field."""

    start: Tensor

    def __init__(self, field: Field) -> None:
        self.field = field

    @property
    def switches(self) -> tuple[float, ...]:
        """Times at which the field jumps."""
        return self.field.switches

    @abc.abstractmethod
    def velocity(self, begin: float, end: float) -> Velocity:
        """Return the velocity of the tensor between two times without a switch between them."""

    @abc.abstractmethod
    def layer(self, begin: float, end: float) -> Velocity:
        """Return the velocity that a residual layer adds."""

    def settle(self, y: Tensor) -> Tensor:
        """Return the tensor put back on what the flow preserves."""
        return self.field.settle(y)

    def drift(self, y: Tensor) -> float | None:
        """Return how far the tensor is from what the flow preserves; None if there is nothing."""
        return self.field.drift(y)

    @abc.abstractmethod
    def distance(self, y: Tensor, other: Tensor) -> float:
        """Return an upper bound of the distance W₂ of two states: that of tokens matched as they stand."""

    @abc.abstractmethod
    def state(self, y: Tensor) -> Tensor | AbstractMeasure:
        """Return what the tensor stands for."""

    @abc.abstractmethod
    def states(self, ys: list[Tensor]) -> Tensor | tuple[AbstractMeasure, ...]:
        """Return what the tensors stand for, as a trajectory keeps it."""


class Tokens(System):
    """Tokens (..., n, d)."""

    def __init__(self, field: Field, start: Tensor, weighting: Weighting | None = None) -> None:
        super().__init__(field)
        if start.dtype not in (torch.float32, torch.float64):
            raise ArgumentError("start", expected="float32 or float64", got=str(start.dtype))
        field.check(start)
        if not bool(torch.isfinite(start).all()):
            raise NonFiniteError("start", expected="finite numbers", got="NaN or infinity")
        self.start = start
        self.weighting = weighting

    def velocity(self, begin: float, end: float) -> Velocity:
        """Return the field, with the weights of the atoms."""
        return self.field.velocity(begin, end, self.weighting)

    def layer(self, begin: float, end: float) -> Velocity:
        """Return the field of a residual layer, with the weights of the atoms."""
        return self.field.layer(begin, end, self.weighting)

    def distance(self, y: Tensor, other: Tensor) -> float:
        """Return the root mean square distance of corresponding tokens, the largest of a batch."""
        squares = (y - other).square().sum(dim=-1)
        if self.weighting is None:
            mean = squares.mean(dim=-1)
        else:
            mean = squares @ self.weighting.log_weights.detach().exp().to(squares.dtype)
        return float(mean.max().sqrt())

    def state(self, y: Tensor) -> Tensor | AbstractMeasure:
        """Return the tokens."""
        return y

    def states(self, ys: list[Tensor]) -> Tensor | tuple[AbstractMeasure, ...]:
        """Return the tokens at all times, stacked."""
        return torch.stack(ys)


class Atoms(Tokens):
    """The atoms (n, d) of a discrete measure, whose weights and positions stay as they are."""

    def state(self, y: Tensor) -> AbstractMeasure:
        """Return the measure with its atoms there."""
        assert self.weighting is not None
        return DiscreteMeasure(y, log_weights=self.weighting.log_weights, positions=self.weighting.positions)

    def states(self, ys: list[Tensor]) -> tuple[AbstractMeasure, ...]:
        """Return the measures."""
        return tuple(self.state(y) for y in ys)


def system_of(field: Field, start: object) -> System:
    """Return what is integrated for a start."""
    if isinstance(start, Tensor):
        return Tokens(field, start)
    if isinstance(start, DiscreteMeasure):
        return Atoms(field, *start.weighted_tokens())
    raise ArgumentError(
        "start",
        expected="tokens (n, d), or a measure of howsmooth.measures",
        got=type(start).__name__,
        remedy="Use torch.as_tensor for an array.",
    )
