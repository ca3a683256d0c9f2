"""How the remainders of earlier stages reach a later state, through their partial Jacobians."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoids import ellipsoid_sum
from howsmooth.bounds.radius.network import Network, Stage
from howsmooth.bounds.radius.stages import Attention

__all__ = ["Errors", "Source", "partial_jacobians"]


@dataclass(frozen=True, eq=False)
class Source:
    """The Jacobian of a state with respect to the outputs of one earlier stage.

    It has the shape (n, width, n_s, d_s); or (n, width, d_s) where every token depends on itself alone.
    """

    jacobian: Tensor

    @staticmethod
    def of(stage: Stage, x: Tensor, output: Tensor) -> Source:
        """Return the source of a stage at its own output: an identity, zero on columns that it keeps."""
        kept = x.shape[1] if stage.keep else 0
        own = torch.eye(output.shape[1], dtype=x.dtype)[:, kept:]
        return Source(own.expand(len(output), -1, -1))

    @property
    def alone(self) -> bool:
        """Whether every token depends on itself alone."""
        return self.jacobian.ndim == 3

    def pushed(self, stage: Stage, x: Tensor, mixes: bool) -> Source:
        """Return the source at the output of a stage; ``mixes`` says that the stage mixes tokens."""
        own = self.jacobian
        if self.alone and not mixes:
            return Source(stage.push(x, own))
        if self.alone:
            spread = torch.zeros(*own.shape[:2], len(own), own.shape[2], dtype=own.dtype)
            each = torch.arange(len(own))
            spread[each, :, each] = own
            own = spread
        found = stage.push(x, own.flatten(2))
        return Source(found.unflatten(2, own.shape[2:]))


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
                shapes.append(J @ remainder @ J.mT)
            else:
                blocks = J.permute(2, 0, 1, 3)
                shapes += list(blocks @ remainder[:, None] @ blocks.mT)
        return ellipsoid_sum(*shapes)


def partial_jacobians(network: Network, states: list[Tensor]) -> list[list[Source]]:
    """Return, for each stage, the Jacobians of what its map reads by the outputs of all earlier stages.

    ``states`` are those of :meth:`Network.states`. The Jacobians do not depend on which tokens move.
    """
    found, sources = [], list[Source]()
    for place, stage in enumerate(network.stages):
        found.append([Source(source.jacobian[:, stage.branch]) for source in sources])
        state, mixes = states[place], isinstance(stage.map, Attention)
        sources = [source.pushed(stage, state, mixes) for source in sources]
        sources.append(Source.of(stage, state, states[place + 1]))
    return found
