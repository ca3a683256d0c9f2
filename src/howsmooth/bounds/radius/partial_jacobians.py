"""Partial Jacobians of a network: the derivatives of the input of each layer with respect to the outputs of
earlier layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoids import ellipsoid_sum, image
from howsmooth.bounds.radius.tensor_with_error_bound import exact, settled
from howsmooth.bounds.radius.transformer_layers import Attention
from howsmooth.bounds.radius.transformer_network import Network, Stage

__all__ = ["Errors", "PartialJacobians", "Source", "partial_jacobians"]


@dataclass(frozen=True, eq=False)
class Source:
    """The Jacobian of the activations at a later point of a network with respect to the output of one earlier
    layer.

    It has the shape (n, width, n_s, d_s); or (n, width, d_s) where every token depends on itself alone.
    ``error`` bounds the rounding error of its last step, as a Frobenius norm.
    """

    jacobian: Tensor
    error: float = 0.0

    @staticmethod
    def of(stage: Stage, x: Tensor, output: Tensor) -> Source:
        """Return the Jacobian of the output of a layer with residual connection with respect to the output of
        the layer alone.

        It is zero on the columns that the stage keeps from its input.
        """
        kept = x.shape[1] if stage.keep else 0
        own = torch.eye(output.shape[1], dtype=output.dtype)[:, kept:]
        return Source(own.expand(len(output), -1, -1))

    @cached_property
    def norm(self) -> float:
        """An upper bound on the Frobenius norm of this partial Jacobian."""
        return exact(self.jacobian).frobenius

    @property
    def alone(self) -> bool:
        """True if each token of the later point depends only on the same token of the earlier output."""
        return self.jacobian.ndim == 3

    def read(self, branch: slice) -> Source:
        """Return the rows of this partial Jacobian that belong to the entries that a later layer takes as its
        input.
        """
        own = self.jacobian[:, branch]
        if self.alone:
            return Source(own)
        # The blocks of one token of the earlier stage lie together: products of blocks are twice as fast.
        return Source(own.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3))

    def pushed(self, stage: Stage, x: Tensor, mixes: bool) -> Source:
        """Return the partial Jacobian after one more layer, by multiplication with the Jacobian of that
        layer.

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
    """A function that bounds the combined effect of the errors of all earlier layers on the input of a later
    layer.

    The effect is e = Σ_s J_s R_s, where R_s is the remainder of stage s and J_s the partial Jacobian. Both
    are enclosed in ellipsoids, token by token.
    """

    def __init__(self, sources: list[Source], state: Tensor) -> None:
        self.sources = sources
        self.zero = state.new_zeros(len(state), state.shape[1], state.shape[1])

    def __call__(self, remainders: list[Tensor]) -> Tensor:
        """Return ellipsoids that contain the change of a layer's input that the errors of earlier layers
        cause.

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
    """The Jacobians of the input of each layer with respect to the outputs of all earlier layers, at one
    network input.

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
    """Return the Jacobians of the input of each layer with respect to the outputs of all earlier layers, at x
    (n, d).

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
