"""The margin on a ball by the second-order Taylor expansion, with every remainder bounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.errors import Source
from howsmooth.bounds.radius.network import Network
from howsmooth.bounds.radius.norms import spectral_norm
from howsmooth.bounds.radius.remainders import (
    AttentionRemainder,
    FeedForwardRemainder,
    NormRemainder,
)
from howsmooth.bounds.radius.stages import Attention, FeedForward

__all__ = ["Losses", "SecondOrder"]


class Losses(NamedTuple):
    """A lower bound of the margin on a ball, and what each part of the expansion takes from it."""

    lower: float
    quadratic: float
    stages: Tensor


class SecondOrder:
    """m(X + δ) ≥ m − max(−g·δ − ½ δᵀHδ) − Σ_s (ε Σ_j ‖N_{s,j}‖ ρ_{s,j} + margin_s).

    N_s is the derivative along δ of the adjoint of the output of stage s; ρ and the effect on the margin are
    those of :mod:`howsmooth.bounds.radius.remainders`.
    """

    def __init__(self, network: Network, x: Tensor, injection: Tensor, functional: Tensor, offset: float) -> None:
        """Measure all partial Jacobians at x (n, d), for changes injection (n, d, k) δ."""
        states = list(network.states(x))
        stages = network.stages
        tangents = [injection]
        for stage, state in zip(stages, states, strict=False):
            tangents.append(stage.push(state, tangents[-1]))
        adjoints = [functional]
        for stage, state in zip(reversed(stages), reversed(states[:-1]), strict=True):
            adjoints.append(stage.pull(state, adjoints[-1][..., None])[..., 0])
        adjoints.reverse()
        bent = torch.zeros(*states[-1].shape, injection.shape[2], dtype=x.dtype)
        self.bent: list[Tensor] = []
        for stage, state, G, a in zip(
            reversed(stages), reversed(states[:-1]), reversed(tangents[:-1]), reversed(adjoints[1:]), strict=True
        ):
            self.bent.append(spectral_norm(stage.output_adjoint(state, bent)))
            bent = stage.pull(state, bent) + stage.curvature(state, a, G)
        self.bent.reverse()
        self.margin = float((functional * states[-1]).sum()) + offset
        self.gradient = torch.einsum("nd,ndk->k", adjoints[0], injection)
        H = torch.einsum("ndk,ndl->kl", injection, bent)
        self.values, vectors = torch.linalg.eigh((H + H.T) / 2)
        self.along = vectors.T @ self.gradient
        sources: list[Source] = []
        self.remainders = []
        for stage, state, output, G, a in zip(
            stages, states[:-1], states[1:], tangents[:-1], adjoints[1:], strict=True
        ):
            kind = (
                AttentionRemainder
                if isinstance(stage.map, Attention)
                else FeedForwardRemainder
                if isinstance(stage.map, FeedForward)
                else NormRemainder
            )
            branch = [Source(source.jacobian[:, stage.branch]) for source in sources]
            own = stage.output_adjoint(state, a)
            self.remainders.append(kind(stage.map, state[:, stage.branch], G[:, stage.branch], branch, own))
            sources = [s.pushed(stage, state, isinstance(stage.map, Attention)) for s in sources]
            sources.append(Source.of(stage, state, output))

    def quadratic_loss(self, epsilon: float) -> float:
        """Bound the maximum of −g·δ − ½ δᵀHδ on the ball, by ½ λ ε² + ½ gᵀ(H + λ)⁻¹g for the best λ."""
        floor = max(0.0, -float(self.values[0]))

        def value(shift: float) -> float:
            shifted = self.values + floor + shift
            return 0.5 * (floor + shift) * epsilon**2 + 0.5 * float((self.along**2 / shifted).sum())

        size = float(self.gradient.norm()) / epsilon + 1e-12
        return min(value(size * 2.0 ** (-j / 4)) for j in range(-8, 60))

    def __call__(self, epsilon: float) -> Losses:
        """Return a lower bound of the margin for |δ| ≤ ε."""
        vectors: list[Tensor] = []
        losses = []
        for remainder, bent in zip(self.remainders, self.bent, strict=True):
            left = remainder(epsilon, vectors)
            vectors.append(left.vector)
            losses.append(epsilon * (bent * left.vector).sum() + left.margin)
        stages = torch.stack(losses)
        quadratic = self.quadratic_loss(epsilon)
        return Losses(self.margin - quadratic - float(stages.sum()), quadratic, stages)
