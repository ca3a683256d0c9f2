"""The margin on a ball by the third-order Taylor expansion, with every remainder bounded."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.bounds.radius.cubic_remainders import Expansion, cubic_remainder_of
from howsmooth.bounds.radius.errors import Errors, Source, partial_jacobians
from howsmooth.bounds.radius.network import Network
from howsmooth.bounds.radius.norms import spectral_norm
from howsmooth.bounds.radius.pairs import Pairs
from howsmooth.bounds.radius.remainders import Left
from howsmooth.bounds.radius.second_order import FirstDerivatives, Losses, stage_bounds, stage_losses

__all__ = ["ThirdOrder"]


class ThirdOrder:
    """m(X + δ) = m + g·δ + ½ δᵀHδ + c[δ, δ, δ] up to Σ_s (ε Σ_j ‖N_{s,j}‖ σ_{s,j} + margin_s)."""

    def __init__(
        self,
        network: Network,
        x: Tensor,
        injection: Tensor,
        functional: Tensor,
        offset: float,
        jacobians: list[list[Source]] | None = None,
    ) -> None:
        self.first = FirstDerivatives(network, x, injection, functional, offset)
        jacobians = jacobians or partial_jacobians(network, self.first.states)
        pairs = Pairs(injection.shape[2])
        first = self.first
        forms = torch.zeros(*x.shape, len(pairs.i), dtype=x.dtype)
        cubic = torch.zeros(pairs.k, len(pairs.i), dtype=x.dtype)
        self.errors: list[Errors] = []
        self.remainders = []
        for place, stage in enumerate(network.stages):
            state = first.states[place]
            at = Expansion(
                state[:, stage.branch],
                first.tangents[place][:, stage.branch],
                forms[:, stage.branch],
                pairs,
                first.own_adjoint(place),
            )
            self.errors.append(Errors(jacobians[place], at.u))
            remainder = cubic_remainder_of(stage.map, at)
            self.remainders.append(remainder)
            forms, own = stage.push_forms(state, first.tangents[place], forms, pairs)
            cubic += remainder.cubic + torch.einsum("ndk,ndp->kp", first.bent[place], own) / 2
        self.cubic = _symmetric_norm(cubic, pairs)

    def __call__(self, epsilon: float) -> Losses:
        """Return a lower bound of the margin for |δ| ≤ ε."""
        stages = stage_losses(self.first, self.bounds(epsilon), epsilon)
        polynomial = self.first.quadratic_loss(epsilon) + float(self.cubic) * epsilon**3
        return Losses(self.first.margin - polynomial - float(stages.sum()), polynomial, stages)

    def bounds(self, epsilon: float) -> list[Left]:
        """Return what each stage leaves out for |δ| ≤ ε."""
        return stage_bounds(self.errors, self.remainders, epsilon)


def _symmetric_norm(cubic: Tensor, pairs: Pairs) -> Tensor:
    """Bound |c[δ, δ, δ]| for |δ| ≤ 1 by the unfolding of the symmetric part of c (k, p)."""
    full = pairs.matrices(cubic)
    symmetric = (full + full.permute(1, 0, 2) + full.permute(2, 1, 0)) / 3
    symmetric = (symmetric + symmetric.mT) / 2
    return spectral_norm(symmetric.flatten(1))
