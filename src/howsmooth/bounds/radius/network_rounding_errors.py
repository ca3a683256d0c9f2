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

__all__ = ["Residuals", "length", "rounding_loss"]


class Residuals(NamedTuple):
    """Bounds on the rounding errors of the output and the derivatives of one layer, all in Frobenius norms.

    ``state``, ``tangents``, ``forms``, ``adjoint`` and ``bent`` bound F(X) − X', DF G − G', the same of the
    quadratic forms, DFᵀa' − a and DFᵀN' + M G − N. ``size_of_tangents``, ``size_of_forms``,
    ``size_of_adjoint`` and ``size_of_bent`` are the norms of G, Q, a' and N'. ``sources`` has, for the
    Jacobian J by the input of each attention layer, the residual of its next step DF J − J'.
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
    sources: tuple[float, ...] = ()

    def beyond(self, epsilon: float, causes: Sequence[float]) -> float:
        """Bound the rounding error that one layer adds to its output, for changes |δ| ≤ ε of the network's
        input.

        ``causes`` bounds the errors at the input of each attention layer that arose since the one before.
        """
        found = self.state + self.tangents * epsilon + self.forms * epsilon**2 / 2
        return found + sum(of * cause for of, cause in zip(self.sources, causes, strict=True))


def length(shapes: Tensor) -> float:
    """Bound the Frobenius norm of n vectors that lie in n given ellipsoids (n, d, d)."""
    return float(shapes.diagonal(dim1=1, dim2=2).sum().clamp_min(0).sqrt())


def rounding_loss(residuals: Sequence[Residuals], errors: Sequence[Tensor], epsilon: float) -> float:
    """Bound how much the rounding errors of the values and derivatives of a network can reduce its margin.

    ``errors`` are ellipsoids of the state's error before each stage and at the end. The part of rounding in
    the remainders of the stages is not included.
    """
    total = 0.0
    for at, error in zip(residuals, errors, strict=True):
        e = at.size_of_forms * epsilon**2 / 2 + length(error)
        total += at.size_of_adjoint * at.state + at.bent * epsilon * e
        total += at.adjoint * (at.size_of_tangents * epsilon + e)
    return total
