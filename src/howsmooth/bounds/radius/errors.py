"""How the remainders of earlier stages reach a later state, through their partial Jacobians."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoids import ellipsoid_sum, image
from howsmooth.bounds.radius.network import Stage
from howsmooth.bounds.radius.rounding import Rounded, exact, settled

__all__ = ["Errors", "Source", "advanced"]


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
        """Whether every token depends on itself alone."""
        return self.jacobian.ndim == 3

    def pushed(self, stage: Stage, x: Tensor, mixes: bool) -> Source:
        """Return the source at the output of a stage; ``mixes`` says that the stage mixes tokens.

        Where the state x is a rounded tensor, the step is rounded, and its error is kept.
        """
        own = exact(self.jacobian, frobenius=self.norm) if isinstance(x, Rounded) else self.jacobian
        if self.alone and not mixes:
            return Source(*settled(stage.push(x, own)))
        if self.alone:
            spread = own.new_zeros(*own.shape[:2], len(own), own.shape[2])
            each = torch.arange(len(own))
            spread[each, :, each] = own
            own = spread
        found, error = settled(stage.push(x, own.flatten(2)))
        return Source(found.unflatten(2, own.shape[2:]), error)


def advanced(
    sources: list[Source], stage: Stage, state: Tensor, output: Tensor, mixes: bool
) -> tuple[list[Source], tuple[tuple[float, float], ...]]:
    """Return the sources at the output of a stage, and the norm of each before and its residual."""
    pushed = [source.pushed(stage, state, mixes) for source in sources]
    residuals = tuple((s.norm, p.error) for s, p in zip(sources, pushed, strict=True))
    return [*pushed, Source.of(stage, state, output)], residuals


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
