"""Differential equations of flows. The state of a flow (tokens, a discrete measure or a Gaussian) is
represented by one tensor.

Derivation for Gaussians: documentation page "Flows: tokens, measures and Gaussians through depth".
"""

from __future__ import annotations

import abc
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import AbstractMeasure
from howsmooth.dynamics.velocity_fields import Field, Velocity
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure, Gaussian, affine_action
from howsmooth.measures.gaussian import affine_action_at

__all__ = ["Atoms", "Moments", "System", "Tokens", "system_of"]


class System(abc.ABC):
    """The differential equation of a flow, whose unknown ``y`` is one tensor that represents the state."""

    start: Tensor

    def __init__(self, field: Field) -> None:
        self.field = field

    @property
    def switches(self) -> tuple[float, ...]:
        """The times at which the velocity of the flow jumps, for example from one layer to the next."""
        return self.field.switches

    @abc.abstractmethod
    def velocity(self, begin: float, end: float) -> Velocity:
        """Return the velocity of ``y`` between the times, where it does not jump, as a function (t, y)."""

    def layer(self, begin: float, end: float) -> Velocity:
        """Return the velocity v of the residual layers y ↦ y + h v(y) with step size h."""
        return self.velocity(begin, end)

    def project(self, y: Tensor) -> Tensor:
        """Project the state ``y`` of the flow onto the set in which the flow must stay, such as a sphere."""
        return self.field.project(y)

    def drift(self, y: Tensor) -> float | None:
        """Return the relative distance of ``y`` from the set in which the flow must stay, or None."""
        return self.field.drift(y)

    def restart(self, y: Tensor) -> Tensor:
        """Return a tensor of the same state, from which the integration continues after an output time."""
        return y

    def finite(self, y: Tensor) -> bool:
        """Return True if all numbers of the state that the tensor ``y`` represents are finite."""
        return bool(torch.isfinite(y).all())

    @abc.abstractmethod
    def distance(self, y: Tensor, other: Tensor) -> float:
        """Return an upper bound on W₂ between two states, which matches tokens in their given order."""

    @abc.abstractmethod
    def states(self, ys: list[Tensor]) -> Tensor | tuple[AbstractMeasure, ...]:
        """Convert the tensors at all output times to what a trajectory stores."""


class Tokens(System):
    """The differential equation of a flow of tokens (..., n, d), which represent themselves."""

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
        """Return the velocity of the tokens, which depends on the weights if they are atoms."""
        return self.field.velocity(begin, end, self.weighting)

    def layer(self, begin: float, end: float) -> Velocity:
        """Return the velocity v of the residual layers x ↦ x + h v(x)."""
        return self.field.layer(begin, end, self.weighting)

    def distance(self, y: Tensor, other: Tensor) -> float:
        """Return the root mean square distance of corresponding tokens, the largest of a batch."""
        squares = (y - other).square().sum(dim=-1)
        if self.weighting is None:
            mean = squares.mean(dim=-1)
        else:
            mean = squares @ self.weighting.log_weights.detach().exp().to(squares.dtype)
        return float(mean.max().sqrt())

    def states(self, ys: list[Tensor]) -> Tensor | tuple[AbstractMeasure, ...]:
        """Return the tokens at all times, stacked along a new first axis."""
        return torch.stack(ys)


class Atoms(Tokens):
    """The differential equation of a flow of a discrete measure, represented by its atoms (n, d)."""

    def states(self, ys: list[Tensor]) -> tuple[AbstractMeasure, ...]:
        """Return one discrete measure for each tensor in ``ys``, whose rows are the atoms of the measure."""
        assert self.weighting is not None
        weights = {"log_weights": self.weighting.log_weights, "positions": self.weighting.positions}
        return tuple(DiscreteMeasure(y, **weights) for y in ys)


class Moments(System):
    """The differential equation of a flow of a Gaussian. The tensor that represents the Gaussian consists of
    its mean and a root of its covariance matrix.

    For the Gaussian N(α, Σ), the tensor (d, 1 + d) is the mean α beside a root L of Σ. If a map acts on N(α,
    Σ) as x ↦ M x + c, the Gaussian moves by α' = M α + c and Σ' = M Σ + Σ Mᵀ. The second equation follows
    from L' = M L. Integrating L instead of Σ ensures that Σ = L Lᵀ has no negative eigenvalue for any step.
    """

    def __init__(self, field: Field, start: Gaussian) -> None:
        super().__init__(field)
        if start.mean.requires_grad or start.covariance.requires_grad:
            raise ArgumentError(
                "start",
                expected="a Gaussian without gradients",
                got="a Gaussian that requires gradients",
                remedy="Detach its mean and covariance, or let a sample of it flow, which keeps gradients.",
            )
        # Raises ArgumentError here, before the flow begins, if a layer cannot act on a Gaussian.
        for begin, end in pairwise([0.0, *field.switches, field.until]):
            affine_action(field.map_at(begin, end), start)
        self.start = _pack(start.mean, start.covariance)

    def velocity(self, begin: float, end: float) -> Velocity:
        """Return (M α + c, M L) where the map acts on the Gaussian as x ↦ M x + c."""
        f = self.field.map_at(begin, end)

        def affine(t: Tensor, y: Tensor) -> Tensor:
            mean, covariance = _unpack(y)
            matrix, shift = affine_action_at(f, mean, covariance)
            moved = matrix @ y
            return torch.cat((moved[:, :1] + shift[:, None], moved[:, 1:]), dim=1)

        return affine

    def restart(self, y: Tensor) -> Tensor:
        """Represent the Gaussian by the symmetric square root of its covariance."""
        return _pack(*_unpack(y))

    def finite(self, y: Tensor) -> bool:
        """Check the covariance as well as its root, because it overflows before the root."""
        return super().finite(y) and super().finite(_unpack(y)[1])

    def distance(self, y: Tensor, other: Tensor) -> float:
        """Return √(|α − α'|² + ‖L − L'‖²), an upper bound on the distance W₂ between Gaussians with means α,
        α' and covariance roots L, L'.

        This is the root mean square distance of x = α + L z and x' = α' + L' z for a standard Gaussian z.
        """
        return float(torch.linalg.vector_norm(y - other))

    def states(self, ys: list[Tensor]) -> tuple[AbstractMeasure, ...]:
        """Return one Gaussian for each tensor in ``ys``, which represents the Gaussian at one time."""
        return tuple(Gaussian(*_unpack(y)) for y in ys)


def system_of(field: Field, start: object) -> System:
    """Return the differential equation of a flow that starts at tokens, a discrete measure or a Gaussian."""
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
    # The symmetric square root; negative eigenvalues are rounding.
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return torch.cat((mean[:, None], root), dim=1)


def _unpack(y: Tensor) -> tuple[Tensor, Tensor]:
    root = y[:, 1:]
    covariance = root @ root.mT
    return y[:, 0], 0.5 * covariance + 0.5 * covariance.mT
