"""How the remainders of earlier stages reach a later state: their partial Jacobians, and norms of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.radius.network import Stage
from howsmooth.bounds.radius.norms import spectral_norm

__all__ = ["Reach", "Source", "reached"]


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


class Reach:
    """Norms of A J for one matrix A and all sources: they turn bounds of remainders into bounds of A e.

    ``__call__`` takes one tensor (n_s,) for each source, bounds of the remainders token by token.
    """

    def __init__(self, coefficients: list[Tensor]) -> None:
        self.coefficients = coefficients

    def __call__(self, remainders: list[Tensor]) -> Tensor | float:
        """Return Σ_s Σ_i ‖A_j J_{s,ji}‖ ρ_{s,i}, of shape (n,) or (n, m)."""
        total: Tensor | float = 0.0
        for found, remainder in zip(self.coefficients, remainders, strict=True):
            total = total + found(remainder)
        return total


def reached(sources: list[Source], matrix: Tensor, by_row: bool) -> Reach:
    """Measure A e for e = Σ_s J_s R_s, with A of shape (m, width) or (n, m, width).

    By row, each of the m entries is bounded by itself; otherwise the norm of the vector of each token.
    """
    found = []
    for source in sources:
        product = (matrix @ source.jacobian.flatten(2)).unflatten(2, source.jacobian.shape[2:])
        if source.alone:
            norm = torch.linalg.vector_norm(product, dim=2) if by_row else spectral_norm(product)
            found.append(lambda rho, c=norm: c * (rho[:, None] if c.ndim == 2 else rho))
        else:
            norm = (
                torch.linalg.vector_norm(product, dim=3) if by_row else spectral_norm(product.transpose(1, 2))
            )
            found.append(lambda rho, c=norm: c @ rho)
    return Reach(found)
