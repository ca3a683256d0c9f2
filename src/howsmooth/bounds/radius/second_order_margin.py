"""A lower bound on the margin of a classifier on a ball around its input, by a second-order Taylor expansion.

The remainder of every stage is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoids import balls, ellipsoid_sum, radii
from howsmooth.bounds.radius.network_rounding_errors import Residuals, lengths, rounding_loss
from howsmooth.bounds.radius.partial_jacobians import Errors, PartialJacobians, partial_jacobians
from howsmooth.bounds.radius.second_order_remainders import Left, remainder_of
from howsmooth.bounds.radius.tensor_with_error_bound import FUZZ, INFLATION, exact, plain, settled
from howsmooth.bounds.radius.transformer_network import Network

__all__ = ["FirstDerivatives", "Losses", "SecondOrder", "stage_bounds", "stage_losses"]


# Covers all underflows in a network whose numbers stay below 2^100.
_UNDERFLOWN = 2.0**-200


class Losses(NamedTuple):
    """A lower bound on the margin on a ball, and how much each error term of the Taylor expansion
    reduces it.
    """

    lower: float
    polynomial: float
    stages: Tensor
    rounding: float


class FirstDerivatives:
    """The values and derivatives of a network at tokens x that the second- and third-order expansions use.

    For changes injection (n, d, k) δ: ``tangents`` G_l, ``adjoints`` a_l, ``bent`` N_s, the derivative along
    δ of the adjoint of the output of the map of stage s; the margin's gradient g, and its Hessian H. They are
    computed numbers; ``residuals`` says how far each is from what its stage makes of the one before.
    """

    def __init__(
        self, jacobians: PartialJacobians, injection: Tensor, functional: Tensor, offset: Tensor | float
    ) -> None:
        self.stages, self.states = jacobians.stages, jacobians.states
        self.tangents, self.residuals = [injection], list[Residuals]()
        every = zip(self.stages, self.states, jacobians.state_errors, jacobians.residuals, strict=False)
        for stage, state, of_state, sources in every:
            pushed, of_tangents = settled(stage.push(exact(state), exact(self.tangents[-1])))
            size = float(self.tangents[-1].norm())
            self.residuals.append(
                Residuals(state=of_state, tangents=of_tangents, size_of_tangents=size, sources=sources)
            )
            self.tangents.append(pushed)
        adjoint, of_functional = settled(functional)
        end = Residuals(
            adjoint=of_functional,
            size_of_tangents=float(self.tangents[-1].norm()),
            sources=jacobians.residuals[-1],
        )
        bent = torch.zeros(*self.states[-1].shape, injection.shape[2], dtype=injection.dtype)
        self.adjoints = [adjoint]
        self.bent: list[Tensor] = []
        for place in reversed(range(len(self.stages))):
            stage, state = self.stages[place], exact(self.states[place])
            own = exact(adjoint)
            self.bent.insert(0, stage.output_adjoint(self.states[place], bent))
            sizes = float(adjoint.norm()), float(bent.norm())
            pulled, of_adjoint = settled(stage.pull(state, own[..., None]))
            curved = stage.curvature(state, own, exact(self.tangents[place]))
            bent, of_bent = settled(stage.pull(state, exact(bent)) + curved)
            adjoint = pulled[..., 0]
            self.adjoints.insert(0, adjoint)
            self.residuals[place] = self.residuals[place]._replace(
                adjoint=of_adjoint, bent=of_bent, size_of_adjoint=sizes[0], size_of_bent=sizes[1]
            )
        self.bent_roots = [_narrow(found) for found in self.bent]
        margin, self.margin_error = settled((functional * exact(self.states[-1])).sum() + offset)
        self.margin = float(margin)
        injected = exact(injection)
        self.gradient, self.gradient_error = settled(torch.einsum("nd,ndk->k", adjoint, injected))
        H, self.hessian_error = settled(torch.einsum("ndk,ndl->kl", injected, bent))
        self.hessian_error += sum(
            at.tangents * at.size_of_bent + at.size_of_tangents * at.bent for at in self.residuals
        )
        self.residuals.append(end)
        self.hessian = (H + H.T) / 2
        self._diagonalise(self.hessian)

    def _diagonalise(self, H: Tensor) -> None:
        """Diagonalise the quadratic polynomial −g·δ − ½ δᵀHδ of the margin, and bound the effect of rounding.

        With z = Vᵀδ it is −c·z − ½ Σ λ_i z_i², where |z|² ≤ ``stretch`` |δ|².
        """
        self.values, vectors = torch.linalg.eigh(H)
        self.along = vectors.T @ self.gradient
        V, exact_H = exact(vectors), exact(H, FUZZ * float(H.norm()))
        self.hessian_error += float(torch.linalg.vector_norm(exact_H - (V * exact(self.values)) @ V.mT))
        of_gradient = exact(self.gradient) - V @ exact(self.along)
        self.gradient_error += float(torch.linalg.vector_norm(of_gradient))
        self.stretch = 1 + float(torch.linalg.vector_norm(V.mT @ V - torch.eye(len(H), dtype=H.dtype)))

    def own_adjoint(self, stage: int) -> Tensor:
        """Return the gradient of the margin with respect to the output of one layer before its residual is
        added.
        """
        return self.stages[stage].output_adjoint(self.states[stage], self.adjoints[stage + 1])

    def quadratic_loss(self, epsilon: float) -> float:
        """Bound how much the quadratic polynomial g·δ + ½ δᵀHδ can reduce the margin for |δ| ≤ ε.

        The maximum of −g·δ − ½ δᵀHδ is at most ½ λ ε² + ½ gᵀ(H + λ)⁻¹g, taken at the best λ.
        """
        floor = max(0.0, -float(self.values[0]))

        def value(shift: float) -> float:
            shifted = self.values + floor + shift
            own = 0.5 * float((self.along**2 / shifted).sum())
            return own + 0.5 * (floor + shift) * epsilon**2 * self.stretch

        size = float(self.gradient.norm()) / epsilon + 1e-12
        return min(value(size * 2.0 ** (-j / 4)) for j in range(-8, 60))

    def losses(self, epsilon: float, polynomial: float, found: list[Left]) -> Losses:
        """Return a lower bound on the margin, and how much the polynomial, the remainders and rounding reduce
        it.
        """
        stages = stage_losses(self, found, epsilon)
        rounding = rounding_loss(self.residuals, [left.shape for left in found], epsilon)
        rounding += self.margin_error + self.gradient_error * epsilon + self.hessian_error * epsilon**2 / 2
        rounding += _UNDERFLOWN
        loss = (polynomial + float(stages.sum()) + rounding) * INFLATION
        lower = self.margin - loss - FUZZ * (abs(self.margin) + loss)
        return Losses(lower, polynomial, stages, rounding)


class SecondOrder:
    """A lower bound on the margin of a network on every ball |δ| ≤ ε, by a second-order Taylor expansion.

    It is m(X + δ) ≥ m − max(−g·δ − ½ δᵀHδ) − Σ_s (ε Σ_j ‖N_{s,j}‖ ρ_{s,j} + margin_s). ρ and the effect on
    the margin are those of :mod:`howsmooth.bounds.radius.second_order_remainders`.
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
        """Expand the margin to second order in δ at the tokens x + ``injection`` @ δ, where x has shape (n,
        d).

        ``injection`` has the shape (n, d, k); ``jacobians`` are the partial Jacobians at x, if they are
        known.
        """
        jacobians = jacobians or partial_jacobians(network, x)
        self.first = first = FirstDerivatives(jacobians, injection, functional, offset)
        self.errors: list[Errors] = []
        self.remainders = []
        for place, stage in enumerate(first.stages):
            state = first.states[place][:, stage.branch]
            self.errors.append(Errors(jacobians.sources[place], state))
            tangents = exact(first.tangents[place][:, stage.branch])
            own = exact(first.own_adjoint(place))
            self.remainders.append(remainder_of(stage.map, exact(state), tangents, own))

    def __call__(self, epsilon: float) -> Losses:
        """Return a lower bound on the margin over all changes |δ| ≤ ε, with the error terms that
        reduce it.
        """
        return self.first.losses(epsilon, self.first.quadratic_loss(epsilon), self.bounds(epsilon))

    def bounds(self, epsilon: float) -> list[Left]:
        """Return bounds on the Taylor remainder of each layer for |δ| ≤ ε."""
        return stage_bounds(self.errors, self.remainders, self.first.residuals, epsilon)


def stage_bounds(
    errors: list[Errors],
    remainders: Sequence[Callable[[float, Tensor], Left]],
    residuals: list[Residuals],
    epsilon: float,
) -> list[Left]:
    """Bound the Taylor remainder of each layer for |δ| ≤ ε, given the errors of the earlier layers.

    What a stage leaves out contains its residuals. The factor covers the rounding of all formulas.
    """
    found: list[Left] = []
    for error, remainder, residual in zip(errors, remainders, residuals, strict=False):
        shapes = [left.shape for left in found]
        shape, margin = remainder(epsilon, error(shapes))
        radius = torch.full(shape.shape[:1], residual.beyond(epsilon, lengths(shapes)), dtype=shape.dtype)
        shape = ellipsoid_sum(shape * INFLATION, balls(radius * INFLATION, shape.shape[1]))
        found.append(Left(shape, margin * INFLATION))
    return found


def stage_losses(first: FirstDerivatives, found: list[Left], epsilon: float) -> Tensor:
    """Bound how much the Taylor remainder of each layer can reduce the margin.

    That is (N δ) · R token by token, and the remainder's own effect on the margin.
    """
    losses = []
    for left, (root, slack) in zip(found, first.bent_roots, strict=True):
        crossed = radii(left.shape, root.mT)
        crossed = crossed + (slack * left.shape.diagonal(dim1=1, dim2=2).sum(1)).sqrt()
        losses.append(epsilon * crossed.sum() + left.margin)
    return torch.stack(losses)


def _narrow(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Compress matrices A with many columns to matrices B with few columns, such that A Aᵀ ≤ B Bᵀ + s I.

    The matrices A have the shape (n, d, k), and B at most d columns.

    The results are B and the numbers s (n,).
    """
    if matrices.shape[2] <= matrices.shape[1]:
        return matrices, matrices.new_zeros(len(matrices))
    A = exact(matrices)
    gram = A @ A.mT
    values, vectors = torch.linalg.eigh(plain(gram))
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    B = exact(root)
    return root, torch.linalg.vector_norm(gram - B @ B.mT, dim=(1, 2))
