"""Partial Jacobians of a network: how each stage's input depends on the outputs of all earlier stages."""

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
    """The Jacobian of the activations at a later point of a network with respect to one stage's output.

    It has the shape (n, width, n_s, d_s); or (n, width, d_s) where every token depends on itself alone.
    ``error`` bounds the rounding error of its last step, as a Frobenius norm.
    """

    jacobian: Tensor
    error: float = 0.0

    @staticmethod
    def of(stage: Stage, x: Tensor, output: Tensor) -> Source:
        """Return the Jacobian of a stage's output with respect to the output of the stage's own layer.

        It is zero on the columns that the stage keeps from its input.
        """
        kept = x.shape[1] if stage.keep else 0
        own = torch.eye(output.shape[1], dtype=output.dtype)[:, kept:]
        return Source(own.expand(len(output), -1, -1))

    @cached_property
    def norm(self) -> float:
        """An upper bound on the Frobenius norm of this Jacobian."""
        return exact(self.jacobian).frobenius

    @property
    def alone(self) -> bool:
        """True if each later token depends only on the same token of the earlier stage's output."""
        return self.jacobian.ndim == 3

    def read(self, branch: slice) -> Source:
        """Return the rows of this Jacobian for the columns of the state that a later stage reads."""
        own = self.jacobian[:, branch]
        if self.alone:
            return Source(own)
        # The blocks of one token of the earlier stage lie together: products of blocks are twice as fast.
        return Source(own.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3))

    def pushed(self, stage: Stage, x: Tensor, mixes: bool) -> Source:
        """Carry this Jacobian through one more stage: multiply the stage's Jacobian by it.

        ``mixes`` says that the stage mixes tokens.
        """
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
    """A function that bounds how the errors of all earlier stages together change a later stage's input.

    The effect is e = Σ_s J_s R_s, where R_s is the remainder of stage s and J_s the partial Jacobian. Both
    are enclosed in ellipsoids, token by token.
    """

    def __init__(self, sources: list[Source], state: Tensor) -> None:
        self.sources = sources
        self.zero = state.new_zeros(len(state), state.shape[1], state.shape[1])

    def __call__(self, remainders: list[Tensor]) -> Tensor:
        """Return ellipsoids that contain the change of a stage's input by the errors of earlier stages.

        They have the shape (n, width, width), one for each token. ``remainders`` has ellipsoids of each
        earlier stage's error.
        """
        shapes = [self.zero]
        for source, remainder in zip(self.sources, remainders, strict=True):
            J = source.jacobian
            if source.alone:
                shapes.append(image(J, remainder))
            else:
                shapes += list(image(J.permute(2, 0, 1, 3), remainder[:, None]))
        return ellipsoid_sum(*shapes)


class PartialJacobians(NamedTuple):
    """The Jacobians of every stage's input with respect to all earlier stages' outputs, at one network input.

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
    """Return the Jacobians of every stage's input with respect to all earlier stages' outputs, at x (n, d).

    They do not depend on which tokens move.
    """
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
