"""The Jacobian of a flow map, which maps the start of a flow to its end, as the product of the Jacobians of
all time steps.

Each Runge–Kutta step is differentiated stage by stage, with the Jacobian of the velocity at the stage's
point. The chain rule multiplies the steps, and the adjoint runs backward through them. Derivation:
documentation page "Growth along a flow, clusters, rescaled tokens", section "The operator".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.spectral import LinearOperator

__all__ = ["TABLEAUX", "ChainJacobian", "ProjectionJacobian", "StepJacobian", "TangentJacobian"]


@dataclass(frozen=True)
class Tableau:
    """The coefficients (Butcher tableau) of an explicit Runge–Kutta method, with a strictly lower triangular
    matrix a.

    A step of length h is k_i = f(t + c_i h, x + h Σ_j a_ij k_j) and x⁺ = x + h Σ_i b_i k_i.
    """

    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    c: tuple[float, ...]


_EULER = Tableau(a=((),), b=(1.0,), c=(0.0,))

# These are torchdiffeq's methods (its rk4 is the 3/8 rule). "residual" is a layer X + h f(X).
TABLEAUX = {
    "euler": _EULER,
    "residual": _EULER,
    "midpoint": Tableau(a=((), (0.5,)), b=(0.0, 1.0), c=(0.0, 0.5)),
    "heun2": Tableau(a=((), (1.0,)), b=(0.5, 0.5), c=(0.0, 1.0)),
    "heun3": Tableau(a=((), (1 / 3,), (0.0, 2 / 3)), b=(0.25, 0.0, 0.75), c=(0.0, 1 / 3, 2 / 3)),
    "rk4": Tableau(
        a=((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)),
        b=(1 / 8, 3 / 8, 3 / 8, 1 / 8),
        c=(0.0, 1 / 3, 2 / 3, 1.0),
    ),
}


class StepJacobian(LinearOperator):
    """The Jacobian of one explicit Runge–Kutta step, computed from the Jacobians of the velocity at the
    stages of the step.

    There is one Jacobian of the velocity for each stage. Forward: dk_i = J_i (dx + h Σ_j a_ij dk_j), dx⁺ = dx
    + h Σ_i b_i dk_i. Backward, from the last stage to the first: w_i = J_iᵀ (h b_i u + h Σ_{j>i} a_ji w_j),
    and the result is u + Σ_i w_i.
    """

    def __init__(self, stages: Sequence[LinearOperator], tableau: Tableau, step: float) -> None:
        first = stages[0]
        # The relative rounding of a step is that of its worst stage.
        rounding = first.rounding
        for stage in stages[1:]:
            rounding = torch.maximum(rounding, stage.rounding)
        super().__init__(first.batch, first.in_shape, first.out_shape, first.dtype, first.device, rounding)
        self.stages = stages
        self.tableau = tableau
        self.step = step

    def _product(self, e: Tensor) -> Tensor:
        images: list[Tensor] = []
        for stage, row in zip(self.stages, self.tableau.a, strict=True):
            images.append(stage.product(_plus(e, self.step, row, images)))
        return _plus(e, self.step, self.tableau.b, images)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        s = len(self.stages)
        images: list[Tensor] = [u] * s  # becomes the w_i of the class docstring
        for i in reversed(range(s)):
            # Stage i was an input of all later stages j with weight a_ji.
            later = [self.tableau.a[j][i] for j in range(i + 1, s)]
            pulled = _plus(self.step * self.tableau.b[i] * u, self.step, later, images[i + 1 :])
            images[i] = self.stages[i].adjoint_product(pulled)
        return _plus(u, 1.0, [1.0] * s, images)


class TangentJacobian(LinearOperator):
    """The Jacobian of a velocity field that is projected onto the tangent space of a sphere.

    The projected velocity is w(x) = v − ⟨v, x⟩ x / |x|², and ``inner`` is the Jacobian of v. For each token,
    with x̂ = x/|x|, s = ⟨v, x̂⟩, Π = 1 − x̂x̂ᵀ and a tangent e of x, the tangent of w is dw = Π dv − (⟨v, e⟩
    x̂ + s e − 2 s ⟨x̂, e⟩ x̂) / |x|.
    """

    def __init__(self, inner: LinearOperator, x: Tensor, v: Tensor) -> None:
        super().__init__(
            inner.batch, inner.in_shape, inner.out_shape, inner.dtype, inner.device, inner.rounding
        )
        self.inner = inner
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        self.unit = x / length
        self.v = v / length
        self.s = _dot(self.v, self.unit)

    def _product(self, e: Tensor) -> Tensor:
        dv = self.inner.product(e)
        along = _dot(self.unit, dv) + _dot(self.v, e) - 2 * self.s * _dot(self.unit, e)
        moved: Tensor = dv - along * self.unit - self.s * e
        return moved

    def _adjoint_product(self, u: Tensor) -> Tensor:
        along = _dot(self.unit, u)
        pulled = self.inner.adjoint_product(u - along * self.unit)
        moved: Tensor = pulled - along * self.v - self.s * u + 2 * self.s * along * self.unit
        return moved


class ProjectionJacobian(LinearOperator):
    """The Jacobian of the map that scales each token to a given norm, x ↦ radius · x/|x|.

    Without a radius, it is the projection orthogonal to x.
    """

    def __init__(self, x: Tensor, *, radius: float | None = None) -> None:
        batch, n, d = x.shape
        super().__init__(batch, (n, d), (n, d), x.dtype, x.device)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        self.unit = x / length
        self.factor = torch.ones_like(length) if radius is None else radius / length

    def _product(self, e: Tensor) -> Tensor:
        along: Tensor = e - _dot(self.unit, e) * self.unit
        return self.factor * along

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self._product(u)


class ChainJacobian(LinearOperator):
    """The Jacobian of ``count`` >= 1 time steps of a flow: the product of the Jacobians ``step(i)`` of the
    single steps, which may be computed again at each call.
    """

    def __init__(self, step: Callable[[int], LinearOperator], count: int, rounding: Tensor) -> None:
        first = step(0)
        super().__init__(first.batch, first.in_shape, first.in_shape, first.dtype, first.device, rounding)
        self.step = step
        self.count = count

    def _product(self, e: Tensor) -> Tensor:
        for i in range(self.count):
            e = self.step(i).product(e)
        return e

    def _adjoint_product(self, u: Tensor) -> Tensor:
        for i in reversed(range(self.count)):
            u = self.step(i).adjoint_product(u)
        return u


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=-1, keepdim=True)


def _plus(base: Tensor, factor: float, weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    """Add a weighted sum of tensors to ``base``: base + factor · Σ_i weights_i terms_i."""
    for weight, term in zip(weights, terms, strict=True):
        if weight:
            base = base + (factor * weight) * term
    return base
