"""Tokens and measures as the one tensor that is integrated, and back (docs/theory/flows.md)."""

from __future__ import annotations

import abc
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.attention import AbstractMeasure, Weighting
from howsmooth.dynamics.fields import Field, Velocity
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure, Gaussian, affine_action, affine_action_at

__all__ = ["Atoms", "Moments", "System", "Tokens", "system_of"]


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

    def restart(self, y: Tensor) -> Tensor:
        """Return the tensor from which the flow goes on after a stretch, as if it started there."""
        return y

    def finite(self, y: Tensor) -> bool:
        """Tell whether what the tensor stands for is finite."""
        return bool(torch.isfinite(y).all())

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


class Moments(System):
    """A Gaussian, as a tensor (d, 1 + d): its mean α in the first column, then a square root L of Σ.

    A map that acts on N(α, Σ) by x ↦ M x + c moves it by α' = M α + c and Σ' = M Σ + Σ Mᵀ. The latter follows
    from L' = M L, by which Σ = L Lᵀ has no negative eigenvalue, whatever the step.
    """

    def __init__(self, field: Field, start: Gaussian) -> None:
        super().__init__(field)
        if start.mean.requires_grad or start.covariance.requires_grad:
            raise ArgumentError(
                "start",
                expected="a Gaussian without gradients",
                got="one that requires them",
                remedy="Give it detached, or let a sample flow, which keeps them.",
            )
        for begin, end in pairwise([0.0, *field.switches, field.until]):
            affine_action(field.map_at(begin, end), start)
        self.start = _pack(start.mean, start.covariance)

    def velocity(self, begin: float, end: float) -> Velocity:
        """Return M (α, L) + (c, 0)."""
        f = self.field.map_at(begin, end)

        def affine(t: Tensor, y: Tensor) -> Tensor:
            mean, covariance = _unpack(y)
            matrix, shift = affine_action_at(f, mean, covariance)
            moved = matrix @ y
            return torch.cat((moved[:, :1] + shift[:, None], moved[:, 1:]), dim=1)

        return affine

    def layer(self, begin: float, end: float) -> Velocity:
        """Return the same: a residual layer moves N(α, Σ) by x ↦ x + h (M x + c)."""
        return self.velocity(begin, end)

    def restart(self, y: Tensor) -> Tensor:
        """Return the symmetric root in place of L, with which a flow from this Gaussian starts."""
        return _pack(*_unpack(y))

    def settle(self, y: Tensor) -> Tensor:
        """Return the state."""
        return y

    def drift(self, y: Tensor) -> None:
        """Return None: nothing is preserved."""

    def finite(self, y: Tensor) -> bool:
        """Tell whether mean and covariance are finite; the latter overflows before its root does."""
        return super().finite(y) and super().finite(_unpack(y)[1])

    def distance(self, y: Tensor, other: Tensor) -> float:
        """Return √(|α − α'|² + ‖L − L'‖²): that of x = α + L z and x' = α' + L' z, root mean square."""
        return float(torch.linalg.vector_norm(y - other))

    def state(self, y: Tensor) -> AbstractMeasure:
        """Return the Gaussian."""
        return Gaussian(*_unpack(y))

    def states(self, ys: list[Tensor]) -> tuple[AbstractMeasure, ...]:
        """Return the Gaussians."""
        return tuple(self.state(y) for y in ys)


def system_of(field: Field, start: object) -> System:
    """Return what is integrated for a start."""
    match start:
        case Tensor():
            return Tokens(field, start)
        case DiscreteMeasure():
            return Atoms(field, *start.weighted_tokens())
        case Gaussian():
            return Moments(field, start)
        case _:
            raise ArgumentError(
                "start",
                expected="tokens (n, d), or a measure of howsmooth.measures",
                got=type(start).__name__,
                remedy="Use torch.as_tensor for an array.",
            )


def _pack(mean: Tensor, covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return torch.cat((mean[:, None], root), dim=1)


def _unpack(y: Tensor) -> tuple[Tensor, Tensor]:
    root = y[:, 1:]
    covariance = root @ root.mT
    return y[:, 0], 0.5 * covariance + 0.5 * covariance.mT
