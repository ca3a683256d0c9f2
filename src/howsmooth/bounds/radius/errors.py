"""How the remainders of earlier stages reach a later state: their partial Jacobians, and norms of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.radius.network import Stage
from howsmooth.bounds.radius.norms import spectral_norm

__all__ = ["Ellipsoid", "Reach", "Source", "reached"]


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

    The coefficients of a source have the shape (n, n_s) or (n, m, n_s); or (n,) or (n, m) where every token
    depends on itself alone.
    """

    def __init__(self, coefficients: list[Tensor], by_row: bool = False) -> None:
        self.coefficients = coefficients
        self.axes = 2 if by_row else 1

    def __call__(self, remainders: list[Tensor]) -> Tensor | float:
        """Return Σ_s Σ_i ‖A_j J_{s,ji}‖ ρ_{s,i}, of shape (n,) or (n, m)."""
        total: Tensor | float = 0.0
        for found, remainder in zip(self.coefficients, remainders, strict=True):
            if found.ndim > self.axes:
                total = total + found @ remainder
            else:
                total = total + found * (remainder[:, None] if self.axes == 2 else remainder)
        return total


def reached(sources: list[Source], matrix: Tensor, by_row: bool) -> Reach:
    """Measure A e for e = Σ_s J_s R_s, with A of shape (m, width) or (n, m, width).

    By row, each of the m entries is bounded by itself; otherwise the norm of the vector of each token.
    """
    found = []
    for source in sources:
        product = (matrix @ source.jacobian.flatten(2)).unflatten(2, source.jacobian.shape[2:])
        if by_row:
            found.append(torch.linalg.vector_norm(product, dim=-1))
        else:
            found.append(spectral_norm(product if source.alone else product.transpose(1, 2)))
    return Reach(found, by_row)


class Ellipsoid:
    """An ellipsoid for each token that contains e = Σ_s J_s R_s, from bounds of the remainders R_s.

    A sum of balls J_i {|r| ≤ ρ_i} lies in the ellipsoid with the matrix Σ_i ρ_i² J_i J_iᵀ / w_i for all
    weights w_i > 0 of sum 1 (Cauchy and Schwarz). Those that make the trace of W₁ · W₁ᵀ smallest are taken.
    """

    def __init__(self, sources: list[Source], matrix: Tensor) -> None:
        gram = matrix.mT @ matrix
        self.squares, self.sizes = [], []
        for source in sources:
            J = source.jacobian[:, :, None] if source.alone else source.jacobian
            J = J.transpose(1, 2)  # (n, n_s or 1, width, d_s)
            square = J @ J.mT
            self.squares.append(square)
            self.sizes.append(torch.einsum("niab,ab->ni", square, gram).clamp_min(0).sqrt())
        self.alone = [source.alone for source in sources]

    def __call__(self, remainders: list[Tensor]) -> Tensor | None:
        """Return the matrices (n, width, width), or None without sources."""
        if not self.squares:
            return None
        rho = [r[:, None] if own else r for r, own in zip(remainders, self.alone, strict=True)]
        sizes = [size * r for size, r in zip(self.sizes, rho, strict=True)]
        total = sum(size.sum(1, keepdim=True) for size in sizes)
        found = torch.zeros_like(self.squares[0][:, 0])
        for square, r, size, plain in zip(self.squares, rho, sizes, self.sizes, strict=True):
            scale = torch.where(size > 0, r * total / plain.clamp_min(1e-300), 0.0)
            found += torch.einsum("ni,niab->nab", scale, square)
        return found
