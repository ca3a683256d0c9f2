"""Bounds on the rounding errors in the values and derivatives of a network, and on their effect on its
margin.

The expansion of the margin holds around any states, with any Jacobians and any adjoints, if what each stage
makes of the computed numbers before it differs from the computed numbers after it by bounded residuals.
Proof: documentation page "A proved radius for a whole network", section "Rounding".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Residuals", "lengths", "rounding_loss"]


class Residuals(NamedTuple):
    """Bounds on the rounding errors of the output and the derivatives of one layer, all in Frobenius norms.

    ``state``, ``tangents``, ``forms``, ``adjoint`` and ``bent`` bound F(X) − X', DF G − G', the same of the
    quadratic forms, DFᵀa' − a and DFᵀN' + M G − N. ``size_of_tangents``, ``size_of_forms``,
    ``size_of_adjoint`` and ``size_of_bent`` are the norms of G, Q, a' and N'. ``sources`` has the norm of the
    Jacobian J of each earlier stage, and the residual of its next step DF J − J'.
    """

    state: float = 0.0
    tangents: float = 0.0
    forms: float = 0.0
    adjoint: float = 0.0
    bent: float = 0.0
    size_of_tangents: float = 0.0
    size_of_forms: float = 0.0
    size_of_adjoint: float = 0.0
    size_of_bent: float = 0.0
    sources: tuple[tuple[float, float], ...] = ()

    def beyond(self, epsilon: float, earlier: Sequence[float]) -> float:
        """Bound the rounding error that one layer adds to its output, for changes |δ| ≤ ε of the network's
        input.

        ``earlier`` bounds the errors of the stages before it.
        """
        found = self.state + self.tangents * epsilon + self.forms * epsilon**2 / 2
        return found + sum(of * length for (_, of), length in zip(self.sources, earlier, strict=False))


def lengths(shapes: Sequence[Tensor]) -> list[float]:
    """Bound the Frobenius norm of n vectors that lie in n given ellipsoids (n, d, d), for each layer of a
    network.
    """
    return [float(shape.diagonal(dim1=1, dim2=2).sum().sqrt()) for shape in shapes]


def rounding_loss(residuals: Sequence[Residuals], shapes: Sequence[Tensor], epsilon: float) -> float:
    """Bound how much the rounding errors of the values and derivatives of a network can reduce its margin.

    The part of rounding in the remainders of the stages is not included.
    """
    earlier, total = lengths(shapes), 0.0
    for at in residuals:
        e = at.size_of_forms * epsilon**2 / 2
        e += sum(norm * length for (norm, _), length in zip(at.sources, earlier, strict=False))
        total += at.size_of_adjoint * at.state + at.bent * epsilon * e
        total += at.adjoint * (at.size_of_tangents * epsilon + e)
    return total
