"""A lower bound on the margin of a classifier on a ball around its input, by a third-order Taylor expansion.

The remainder of every stage is bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.partial_jacobians import Errors, PartialJacobians, partial_jacobians
from howsmooth.bounds.radius.second_order_margin import FirstDerivatives, Losses, stage_bounds
from howsmooth.bounds.radius.second_order_remainders import Left
from howsmooth.bounds.radius.spectral_norm_bounds import spectral_norm
from howsmooth.bounds.radius.tensor_with_error_bound import exact, settled
from howsmooth.bounds.radius.third_order_remainders import Expansion, cubic_remainder_of
from howsmooth.bounds.radius.transformer_network import Network

__all__ = ["ThirdOrder"]


class ThirdOrder:
    """A lower bound on the margin of a network on every ball |δ| ≤ ε, by a third-order Taylor expansion.

    The margin m(X + δ) is m + g·δ + ½ δᵀHδ + c[δ, δ, δ] up to Σ_s (ε Σ_j ‖N_{s,j}‖ σ_{s,j} + margin_s).
    """

    def __init__(
        self,
        network: Network,
        x: Tensor,
        injection: Tensor,
        functional: Tensor,
        offset: Tensor | float,
        jacobians: PartialJacobians | None = None,
    ) -> None:
        """Expand the margin to third order in δ at the tokens x + ``injection`` @ δ, where x has shape (n,
        d).

        The arguments are those of ``SecondOrder``. The quadratic forms of all stages are computed, too.
        """
        jacobians = jacobians or partial_jacobians(network, x)
        self.first = first = FirstDerivatives(jacobians, injection, functional, offset)
        pairs = Pairs(injection.shape[2])
        forms = torch.zeros(*x.shape, len(pairs.i), dtype=x.dtype)
        cubic: Tensor = exact(torch.zeros(pairs.k, len(pairs.i), dtype=x.dtype))
        self.errors: list[Errors] = []
        self.remainders = []
        for place, stage in enumerate(first.stages):
            state = exact(first.states[place])
            tangents, curved = exact(first.tangents[place]), exact(forms)
            at = Expansion(
                state[:, stage.branch],
                tangents[:, stage.branch],
                curved[:, stage.branch],
                pairs,
                exact(first.own_adjoint(place)),
            )
            self.errors.append(Errors(jacobians.sources[place], first.states[place][:, stage.branch]))
            remainder = cubic_remainder_of(stage.map, at)
            self.remainders.append(remainder)
            size = float(forms.norm())
            pushed, own = stage.push_forms(state, tangents, curved, pairs)
            forms, of_forms = settled(pushed)
            cubic += remainder.cubic + torch.einsum("ndk,ndp->kp", exact(first.bent[place]), own) / 2
            first.residuals[place] = first.residuals[place]._replace(forms=of_forms, size_of_forms=size)
        first.residuals[-1] = first.residuals[-1]._replace(size_of_forms=float(forms.norm()))
        self.cubic = _symmetric_norm(cubic, pairs)

    def __call__(self, epsilon: float) -> Losses:
        """Return a lower bound on the margin over all changes |δ| ≤ ε, with the error terms that
        reduce it.
        """
        polynomial = self.first.quadratic_loss(epsilon) + float(self.cubic) * epsilon**3
        return self.first.losses(epsilon, polynomial, self.bounds(epsilon))

    def bounds(self, epsilon: float) -> list[Left]:
        """Return bounds on the Taylor remainder of each layer for |δ| ≤ ε."""
        return stage_bounds(self.errors, self.remainders, self.first.residuals, epsilon)


def _symmetric_norm(cubic: Tensor, pairs: Pairs) -> Tensor:
    """Bound the absolute value of the cubic form c[δ, δ, δ] over all |δ| ≤ 1.

    The bound is the spectral norm of the unfolded symmetric part of c, which has the shape (k, p).
    """
    full = pairs.matrices(cubic)
    symmetric = (full + full.permute(1, 0, 2) + full.permute(2, 1, 0)) / 3
    symmetric = (symmetric + symmetric.mT) / 2
    return spectral_norm(symmetric.flatten(1))
