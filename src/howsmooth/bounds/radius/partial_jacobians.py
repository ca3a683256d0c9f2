"""How the remainders of earlier stages reach a later state, through their partial Jacobians."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoids import ellipsoid_sum, image
from howsmooth.bounds.radius.rounded_tensor import exact, settled
from howsmooth.bounds.radius.staged_network import Network, Stage
from howsmooth.bounds.radius.stages import Attention

__all__ = ["Errors", "PartialJacobians", "Source", "partial_jacobians"]


@dataclass(frozen=True, eq=False)
class Source:
    """The Jacobian of a state with respect to the outputs of one earlier stage.

    It has the shape (n, width, n_s, d_s); or (n, width, d_s) where every token depends on itself alone.
    ``error`` bounds the rounding error of its last step, as a Frobenius norm.
    """

    jacobian: Tensor
    error: float = 0.0

    @staticmethod
    def of(stage: Stage, x: Tensor, output: Tensor) -> Source:
        """Return the source of a stage at its own output: an identity, zero on columns that it keeps."""
        kept = x.shape[1] if stage.keep else 0
        own = torch.eye(output.shape[1], dtype=output.dtype)[:, kept:]
        return Source(own.expand(len(output), -1, -1))

    @cached_property
    def norm(self) -> float:
        """An upper bound of the Frobenius norm."""
        return exact(self.jacobian).frobenius

    @property
    def alone(self) -> bool:
        """True if every token depends on itself alone."""
        return self.jacobian.ndim == 3

    def read(self, branch: slice) -> Source:
        """Return the source of some columns of the state, stored in the order that :class:`Errors` reads."""
        own = self.jacobian[:, branch]
        if self.alone:
            return Source(own)
        # Block by block of a token of the stage: products of blocks are twice as fast, with the same shape.
        return Source(own.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3))

    def pushed(self, stage: Stage, x: Tensor, mixes: bool) -> Source:
        """Return the source at the output of a stage; ``mixes`` says that the stage mixes tokens."""
        own: Tensor = exact(self.jacobian, frobenius=self.norm)
        if self.alone and not mixes:
            return Source(*settled(stage.push(x, own)))
        if self.alone:
            spread = own.new_zeros(*own.shape[:2], len(own), own.shape[2])
            each = torch.arange(len(own))
            spread[each, :, each] = own
            own = spread
        found, error = settled(stage.push(x, own.flatten(2)))
        return Source(found.unflatten(2, own.shape[2:]), error)


class Errors:
    """Ellipsoids that contain e = Σ_s J_s R_s token by token, from ellipsoids for the remainders R_s."""

    def __init__(self, sources: list[Source], state: Tensor) -> None:
        self.sources = sources
        self.zero = state.new_zeros(len(state), state.shape[1], state.shape[1])

    def __call__(self, remainders: list[Tensor]) -> Tensor:
        """Return matrices (n, width, width) from one tensor (n_s, d_s, d_s) for each source."""
        shapes = [self.zero]
        for source, remainder in zip(self.sources, remainders, strict=True):
            J = source.jacobian
            if source.alone:
                shapes.append(image(J, remainder))
            else:
                shapes += list(image(J.permute(2, 0, 1, 3), remainder[:, None]))
        return ellipsoid_sum(*shapes)


class PartialJacobians(NamedTuple):
    """A network at one input: the Jacobians of what each stage reads by the outputs of all earlier stages.

    ``stages`` are the network's, with weights that carry rounding errors; ``states`` are the computed states,
    ``state_errors`` the rounding errors of the step to each. ``sources`` are the Jacobians for each stage;
    ``residuals`` has, for each stage and for the end, the Frobenius norm of every Jacobian before it and the
    rounding error of its next step.
    """

    stages: tuple[Stage, ...]
    states: list[Tensor]
    state_errors: list[float]
    sources: list[list[Source]]
    residuals: list[tuple[tuple[float, float], ...]]


def partial_jacobians(network: Network, x: Tensor) -> PartialJacobians:
    """Return the partial Jacobians of a network at x (n, d). They do not depend on which tokens move."""
    stages = network.rounded().stages
    states, errors, found, residuals, sources = [x], [], [], [], list[Source]()
    for stage in stages:
        found.append([source.read(stage.branch) for source in sources])
        state, mixes = exact(states[-1]), isinstance(stage.map, Attention)
        output, error = settled(stage.value(state))
        pushed = [source.pushed(stage, state, mixes) for source in sources]
        residuals.append(tuple((s.norm, p.error) for s, p in zip(sources, pushed, strict=True)))
        sources = [*pushed, Source.of(stage, states[-1], output)]
        states.append(output)
        errors.append(error)
    residuals.append(tuple((source.norm, 0.0) for source in sources))
    return PartialJacobians(stages, states, errors, found, residuals)
