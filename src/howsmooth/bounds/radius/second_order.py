"""The margin on a ball by the second-order Taylor expansion, with every remainder bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoids import radii
from howsmooth.bounds.radius.errors import Errors, Source, partial_jacobians
from howsmooth.bounds.radius.network import Network
from howsmooth.bounds.radius.remainders import Left, remainder_of

__all__ = ["FirstDerivatives", "Losses", "SecondOrder", "stage_bounds", "stage_losses"]


class Losses(NamedTuple):
    """A lower bound of the margin on a ball, and what each part of the expansion takes from it."""

    lower: float
    polynomial: float
    stages: Tensor


class FirstDerivatives:
    """All that both expansions need: states, Jacobians, adjoints and their derivatives along δ, at x (n, d).

    For changes injection (n, d, k) δ: ``tangents`` G_l, ``adjoints`` a_l, ``bent`` N_s, the derivative along
    δ of the adjoint of the output of the map of stage s; the margin's gradient g, and its Hessian H.
    """

    def __init__(
        self, network: Network, x: Tensor, injection: Tensor, functional: Tensor, offset: float
    ) -> None:
        self.stages = network.stages
        self.states = list(network.states(x))
        self.tangents = [injection]
        for stage, state in zip(self.stages, self.states, strict=False):
            self.tangents.append(stage.push(state, self.tangents[-1]))
        steps = list(zip(self.stages, self.states, self.tangents, strict=False))[::-1]
        adjoint, bent = functional, torch.zeros(*self.states[-1].shape, injection.shape[2], dtype=x.dtype)
        self.adjoints = [functional]
        self.bent: list[Tensor] = []
        for stage, state, tangents in steps:
            self.bent.insert(0, stage.output_adjoint(state, bent))
            bent = stage.pull(state, bent) + stage.curvature(state, adjoint, tangents)
            adjoint = stage.pull(state, adjoint[..., None])[..., 0]
            self.adjoints.insert(0, adjoint)
        self.bent_roots = [_narrow(found) for found in self.bent]
        self.margin = float((functional * self.states[-1]).sum()) + offset
        self.gradient = torch.einsum("nd,ndk->k", adjoint, injection)
        H = torch.einsum("ndk,ndl->kl", injection, bent)
        self.values, vectors = torch.linalg.eigh((H + H.T) / 2)
        self.along = vectors.T @ self.gradient

    def own_adjoint(self, stage: int) -> Tensor:
        """Return the adjoint of the output of the map of a stage."""
        return self.stages[stage].output_adjoint(self.states[stage], self.adjoints[stage + 1])

    def quadratic_loss(self, epsilon: float) -> float:
        """Bound the maximum of −g·δ − ½ δᵀHδ on the ball, by ½ λ ε² + ½ gᵀ(H + λ)⁻¹g for the best λ."""
        floor = max(0.0, -float(self.values[0]))

        def value(shift: float) -> float:
            shifted = self.values + floor + shift
            return 0.5 * (floor + shift) * epsilon**2 + 0.5 * float((self.along**2 / shifted).sum())

        size = float(self.gradient.norm()) / epsilon + 1e-12
        return min(value(size * 2.0 ** (-j / 4)) for j in range(-8, 60))


class SecondOrder:
    """m(X + δ) ≥ m − max(−g·δ − ½ δᵀHδ) − Σ_s (ε Σ_j ‖N_{s,j}‖ ρ_{s,j} + margin_s).

    ρ and the effect on the margin are those of :mod:`howsmooth.bounds.radius.remainders`.
    """

    def __init__(
        self,
        network: Network,
        x: Tensor,
        injection: Tensor,
        functional: Tensor,
        offset: float,
        jacobians: list[list[Source]] | None = None,
    ) -> None:
        """Expand at x (n, d), for changes injection (n, d, k) δ, along the partial Jacobians at x."""
        self.first = first = FirstDerivatives(network, x, injection, functional, offset)
        jacobians = jacobians or partial_jacobians(network, first.states)
        self.errors: list[Errors] = []
        self.remainders = []
        for place, stage in enumerate(network.stages):
            state = first.states[place]
            self.errors.append(Errors(jacobians[place], state[:, stage.branch]))
            tangents = first.tangents[place][:, stage.branch]
            own = first.own_adjoint(place)
            self.remainders.append(remainder_of(stage.map, state[:, stage.branch], tangents, own))

    def __call__(self, epsilon: float) -> Losses:
        """Return a lower bound of the margin for |δ| ≤ ε."""
        stages = stage_losses(self.first, self.bounds(epsilon), epsilon)
        polynomial = self.first.quadratic_loss(epsilon)
        return Losses(self.first.margin - polynomial - float(stages.sum()), polynomial, stages)

    def bounds(self, epsilon: float) -> list[Left]:
        """Return what each stage leaves out for |δ| ≤ ε."""
        return stage_bounds(self.errors, self.remainders, epsilon)


def stage_bounds(
    errors: list[Errors], remainders: Sequence[Callable[[float, Tensor], Left]], epsilon: float
) -> list[Left]:
    """Evaluate the remainders of all stages, each at the errors that those before it cause."""
    found: list[Left] = []
    for error, remainder in zip(errors, remainders, strict=True):
        found.append(remainder(epsilon, error([left.shape for left in found])))
    return found


def stage_losses(first: FirstDerivatives, found: list[Left], epsilon: float) -> Tensor:
    """Bound what each stage takes from the margin: (N δ) · R token by token, and its own effect."""
    losses = []
    for left, bent in zip(found, first.bent_roots, strict=True):
        crossed = radii(left.shape, bent.mT)
        losses.append(epsilon * crossed.sum() + left.margin)
    return torch.stack(losses)


def _narrow(matrices: Tensor) -> Tensor:
    """Return matrices (n, d, at most d) with the same products A Aᵀ as those given (n, d, k)."""
    if matrices.shape[2] <= matrices.shape[1]:
        return matrices
    values, vectors = torch.linalg.eigh(matrices @ matrices.mT)
    root: Tensor = vectors * values.clamp_min(0).sqrt()[:, None]
    return root
