"""Lower bounds on the margin of a classifier on a ball around its input, by Taylor expansions of second and
third order with bounded remainders of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoid_arithmetic import balls, ellipsoid_sum, radii
from howsmooth.bounds.radius.error_propagation import Errors, PartialJacobians, Residuals, rounding_loss
from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.second_order_remainders import Left, Remainder, remainder_of
from howsmooth.bounds.radius.spectral_norm_bounds import spectral_norm
from howsmooth.bounds.radius.third_order_remainders import Expansion, cubic_remainder_of
from howsmooth.rounding import INFLATION
from howsmooth.rounding.rounded_tensor import FUZZ, exact, plain, settled

__all__ = ["Bounds", "FirstDerivatives", "Losses", "SecondOrder", "ThirdOrder"]


# Covers all underflows in a network whose numbers stay below 2^100.
_UNDERFLOWN = 2.0**-200


class Losses(NamedTuple):
    """A lower bound on the margin on a ball, and how much each error term of the expansion reduces it."""

    lower: float
    polynomial: float
    stages: Tensor
    rounding: float


class Bounds(NamedTuple):
    """Bounds on the Taylor remainder of each layer, and ellipsoids ``errors`` (n, width, width) that contain
    the error of the state before each stage, and of the last state.
    """

    stages: list[Left]
    errors: list[Tensor]


class FirstDerivatives:
    """The values and derivatives of a network at tokens x that the second- and third-order expansions use.

    For changes injection (n, d, k) δ: ``tangents`` G_l, ``adjoints`` a_l, ``bent`` N_s, the derivative along
    δ of the adjoint of the output of the map of stage s; the margin's gradient g, and its Hessian H. They are
    computed numbers; ``residuals`` says how far each is from what its stage makes of the one before.
    """

    def __init__(
        self, jacobians: PartialJacobians, injection: Tensor, functional: Tensor, offset: Tensor | float
    ) -> None:
        self.jacobians, self.stages, self.states = jacobians, jacobians.stages, jacobians.states
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
        size = float(self.tangents[-1].norm())
        self.residuals.append(Residuals(adjoint=of_functional, size_of_tangents=size))
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
        self.hessian = H = (H + H.T) / 2
        # With z = Vᵀδ, −g·δ − ½ δᵀHδ is −c·z − ½ Σ λ_i z_i², where |z|² ≤ ``stretch`` |δ|².
        self.values, vectors = torch.linalg.eigh(H)
        self.along = vectors.T @ self.gradient
        V, exact_H = exact(vectors), exact(H, FUZZ * float(H.norm()))
        self.hessian_error += float(torch.linalg.vector_norm(exact_H - (V * exact(self.values)) @ V.mT))
        of_gradient = exact(self.gradient) - V @ exact(self.along)
        self.gradient_error += float(torch.linalg.vector_norm(of_gradient))
        self.stretch = 1 + float(torch.linalg.vector_norm(V.mT @ V - torch.eye(len(H), dtype=H.dtype)))

    def own_adjoint(self, stage: int) -> Tensor:
        """Return the gradient of the margin by the output of a stage's layer, before the residual."""
        return self.stages[stage].output_adjoint(self.states[stage], self.adjoints[stage + 1])

    def quadratic_loss(self, epsilon: float) -> float:
        """Bound −g·δ − ½ δᵀHδ for |δ| ≤ ε by ½ λ ε² + ½ gᵀ(H + λ)⁻¹g, taken at the best λ."""
        floor = max(0.0, -float(self.values[0]))

        def value(shift: float) -> float:
            shifted = self.values + floor + shift
            own = 0.5 * float((self.along**2 / shifted).sum())
            return own + 0.5 * (floor + shift) * epsilon**2 * self.stretch

        size = float(self.gradient.norm()) / epsilon + 1e-12
        return min(value(size * 2.0 ** (-j / 4)) for j in range(-8, 60))

    def rounding_loss(self, epsilon: float) -> float:
        """Bound what the rounding errors of the margin, its gradient and its Hessian take from the margin."""
        found = self.margin_error + self.gradient_error * epsilon + self.hessian_error * epsilon**2 / 2
        return found + _UNDERFLOWN

    def stage_losses(self, found: Sequence[Left], epsilon: float) -> Tensor:
        """Bound what the remainder R of each layer takes from the margin: (N δ) · R token by token, and its
        own effect.
        """
        losses = []
        for left, (root, slack) in zip(found, self.bent_roots, strict=True):
            crossed = radii(left.shape, root.mT)
            crossed = crossed + (slack * left.shape.diagonal(dim1=1, dim2=2).sum(1)).sqrt()
            losses.append(epsilon * crossed.sum() + left.margin)
        return torch.stack(losses)


class SecondOrder:
    """A lower bound on the margin of a network on every ball |δ| ≤ ε, by a second-order Taylor expansion.

    It is m(X + δ) ≥ m − max(−g·δ − ½ δᵀHδ) − Σ_s (ε Σ_j ‖N_{s,j}‖ ρ_{s,j} + margin_s). ρ and the effect on
    the margin are those of :mod:`howsmooth.bounds.radius.second_order_remainders`.
    """

    def __init__(self, first: FirstDerivatives, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called between steps of this and of later computations, and may raise to end them."""
        self.first, self.check = first, check
        self.residuals = list(first.residuals)
        #: Bounds the cubic form of the margin on the ball |δ| ≤ 1.
        self.cubic = 0.0
        self.remainders = self._remainders()

    def _remainders(self) -> list[Remainder]:
        first, found = self.first, list[Remainder]()
        for place, stage in enumerate(first.stages):
            self.check()
            state, tangents = (every[place][:, stage.branch] for every in (first.states, first.tangents))
            own = exact(first.own_adjoint(place))
            found.append(remainder_of(stage.map, exact(state), exact(tangents), own))
        return found

    def __call__(self, epsilon: float) -> Losses:
        """Return a lower bound on the margin for all |δ| ≤ ε, with the error terms that reduce it."""
        first, found = self.first, self.bounds(epsilon)
        polynomial = first.quadratic_loss(epsilon) + self.cubic * epsilon**3
        stages = first.stage_losses(found.stages, epsilon)
        rounding = rounding_loss(self.residuals, found.errors, epsilon) + first.rounding_loss(epsilon)
        loss = (polynomial + float(stages.sum()) + rounding) * INFLATION
        lower = first.margin - loss - FUZZ * (abs(first.margin) + loss)
        return Losses(lower, polynomial, stages, rounding)

    def bounds(self, epsilon: float) -> Bounds:
        """Bound the Taylor remainder of each layer for |δ| ≤ ε, with its rounding errors, and the errors that
        the remainders cause in the later states. ``INFLATION`` covers the rounding of all formulas.
        """
        stages, states = self.first.stages, self.first.states
        errors, found = Errors(states[0]), Bounds([], [])
        every = zip(stages, self.first.jacobians.steps, self.remainders, self.residuals, strict=False)
        for place, (stage, step, remainder, residual) in enumerate(every):
            self.check()
            errors.reach(step)
            found.errors.append(errors.state)
            shape, margin = remainder(epsilon, errors.state[:, stage.branch, stage.branch])
            size = residual.beyond(epsilon, errors.lengths) * INFLATION
            radius = torch.full(shape.shape[:1], size, dtype=shape.dtype)
            shape = ellipsoid_sum(shape * INFLATION, balls(radius, shape.shape[1]))
            found.stages.append(Left(shape, margin * INFLATION))
            errors.leave(step, shape, states[place + 1].shape[1])
        found.errors.append(errors.state)
        return found


class ThirdOrder(SecondOrder):
    """A lower bound on the margin of a network on every ball |δ| ≤ ε, by a third-order Taylor expansion.

    The margin m(X + δ) is m + g·δ + ½ δᵀHδ + c[δ, δ, δ] up to Σ_s (ε Σ_j ‖N_{s,j}‖ σ_{s,j} + margin_s).
    """

    def _remainders(self) -> list[Remainder]:
        """Return the remainders of all layers, and bound the cubic form of the margin. The quadratic forms of
        all states are computed on the way.
        """
        first, found = self.first, list[Remainder]()
        n, width, k = first.tangents[0].shape
        pairs = Pairs(k)
        forms = first.states[0].new_zeros(n, width, len(pairs.i))
        cubic: Tensor = exact(forms.new_zeros(k, len(pairs.i)))
        for place, stage in enumerate(first.stages):
            self.check()
            state, tangents = exact(first.states[place]), exact(first.tangents[place])
            curved, own = exact(forms), exact(first.own_adjoint(place))
            u, G, Q = (part[:, stage.branch] for part in (state, tangents, curved))
            at = Expansion(u, G, Q, pairs, own, place == 0, self.check)
            remainder = cubic_remainder_of(stage.map, at)
            found.append(remainder)
            self.check()
            size = float(forms.norm())
            second = stage.second(state, tangents, pairs)
            pushed = stage.push_forms(state, None if place == 0 else curved, second)
            forms, of_forms = settled(pushed)
            cubic += remainder.cubic + torch.einsum("ndk,ndp->kp", exact(first.bent[place]), second) / 2
            self.residuals[place] = self.residuals[place]._replace(forms=of_forms, size_of_forms=size)
        self.residuals[-1] = self.residuals[-1]._replace(size_of_forms=float(forms.norm()))
        # |c[δ, δ, δ]| for |δ| ≤ 1 is at most the norm of the unfolded symmetric part of c.
        full = pairs.matrices(cubic)
        symmetric = (full + full.permute(1, 0, 2) + full.permute(2, 1, 0)) / 3
        symmetric = (symmetric + symmetric.mT) / 2
        self.cubic = float(spectral_norm(symmetric.flatten(1)))
        return found


def _narrow(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices B with at most d columns, and small numbers s (n,), such that A Aᵀ ≤ B Bᵀ + s I for the
    given matrices A (n, d, k).
    """
    if matrices.shape[2] <= matrices.shape[1]:
        return matrices, matrices.new_zeros(len(matrices))
    A = exact(matrices)
    gram = A @ A.mT
    values, vectors = torch.linalg.eigh(plain(gram))
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    B = exact(root)
    return root, torch.linalg.vector_norm(gram - B @ B.mT, dim=(1, 2))
