"""One trajectory of a flow with fixed time steps, together with the Jacobian of each step.

Derivation: documentation page "Growth along a flow, clusters, rescaled tokens", section "The operator".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention, StagedAttention, TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.compositions import layers
from howsmooth.dynamics.flow_equations import Tokens
from howsmooth.dynamics.flow_jacobian import (
    TABLEAUX,
    ChainJacobian,
    ProjectionJacobian,
    StepJacobian,
    TangentJacobian,
)
from howsmooth.dynamics.integrate import Integration
from howsmooth.dynamics.velocity_fields import Field, Layers, MapField, Sphere, Velocity
from howsmooth.errors import NonFiniteError
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.autodiff import weighted_autodiff_jacobian
from howsmooth.jacobian.closed_form import ComposedJacobian, has_closed_form
from howsmooth.spectral import LinearOperator

__all__ = ["LinearisedFlow"]

# Reverse-mode differentiation keeps about this many n × n matrices (scores, probabilities and intermediates);
# a closed form keeps one per head.
_AUTODIFF_COPIES = 6


@dataclass(frozen=True)
class _Step:
    """One time step of a flow: its times, the points at which the velocity was evaluated, and the final
    point.

    Points have the shape (n, d). ``interval`` is the interval between switches of the field in which the step
    lies. ``before_projection`` is the resulting point before the projection onto a sphere.
    """

    begin: float
    end: float
    interval: tuple[float, float]
    times: list[float]
    points: list[Tensor]
    before_projection: Tensor

    @property
    def length(self) -> float:
        return self.end - self.begin


class LinearisedFlow:
    """One trajectory of a flow with fixed time steps, together with the Jacobian of each step.

    On a sphere, tokens are projected onto it after each step, and only tangent perturbations count. The first
    of the ``times`` is that of the start, in float64; each interval between two of them, or switches of the
    field, is divided into equal steps. Jacobians that do not fit into ``kept_bytes`` are computed again for
    each use. A NonFiniteError names the time at which the flow leaves the range of float64.
    """

    def __init__(self, system: Tokens, times: list[float], plan: Integration, kept_bytes: int) -> None:
        self.system = system
        self.plan = plan
        self.tableau = TABLEAUX[plan.method]
        self.steps: list[_Step] = []
        self.steps_until = [0]
        self.states = [system.start]
        x = system.start
        for begin, end in pairwise(times):
            for left, right in pairwise([begin, *(s for s in system.switches if begin < s < end), end]):
                residual = plan.method == "residual"
                # Residual layers add the unprojected velocity; the projection onto a sphere follows in
                # `project`.
                velocity = (system.layer if residual else system.velocity)(left, right)
                grid = torch.linspace(left, right, plan.steps(right - left) + 1, dtype=torch.float64).tolist()
                for a, b in pairwise(grid):
                    x = self._advance(velocity, (left, right), a, b, x)
            self.steps_until.append(len(self.steps))
            self.states.append(x)
        self._kept: dict[int, list[LinearOperator]] = {}
        self._keep = kept_bytes // (len(self.tableau.b) * _bytes(system))

    def _advance(
        self, velocity: Velocity, interval: tuple[float, float], begin: float, end: float, x: Tensor
    ) -> Tensor:
        length = end - begin
        times = [begin + node * length for node in self.tableau.c]
        points: list[Tensor] = []
        slopes: list[Tensor] = []
        with torch.no_grad():
            for row, t in zip(self.tableau.a, times, strict=True):
                point = x + length * _combined(row, slopes, x)
                slopes.append(velocity(torch.tensor(t, dtype=torch.float64, device=x.device), point))
                points.append(point)
            before = x + length * _combined(self.tableau.b, slopes, x)
            # Tokens return to the sphere after each step.
            x = self.system.project(before)
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError(
                "times",
                expected="times before the flow leaves the range of float64",
                got=f"NaN or infinity between t = {begin:.6g} and t = {end:.6g}",
                remedy="End earlier; flow() says when it blows up.",
            )
        self.steps.append(_Step(begin, end, interval, times, points, before))
        return x

    def stages(self, i: int) -> list[LinearOperator]:
        """Return the Jacobians of the velocity at all points where Runge–Kutta step ``i`` evaluates it."""
        if i in self._kept:
            return self._kept[i]
        field = self.system.field
        if self.plan.method == "residual" and isinstance(field, Sphere):
            field = field.field
        made = self._linearised(field, self.steps[i])
        if len(self._kept) < self._keep:
            self._kept[i] = made
        return made

    def _linearised(self, field: Field, step: _Step) -> list[LinearOperator]:
        at = zip(step.times, step.points, strict=True)
        return [_linearise(field, step.interval, t, x, self.system.weighting) for t, x in at]

    def rates(self, i: int) -> list[LinearOperator]:
        """Return the Jacobians of the velocity at the stages of step ``i``, which determine the growth rate
        of perturbations.

        There is one for each Runge–Kutta stage. The symmetric part of each gives the rate at which
        perturbations grow. On a sphere the Jacobians are projected onto the tangent spaces.
        """
        stages = self.stages(i)
        if not isinstance(self.system.field, Sphere):
            return stages
        if self.plan.method == "residual":
            # The stages hold the unprojected velocity. With the projection after each layer, the velocity
            # along the sphere is the projected one, so it is differentiated here.
            stages = self._linearised(self.system.field, self.steps[i])
        along = [ProjectionJacobian(x[None]) for x in self.steps[i].points]
        return [
            ComposedJacobian(tangent, ComposedJacobian(stage, tangent))
            for tangent, stage in zip(along, stages, strict=True)
        ]

    def step(self, i: int) -> LinearOperator:
        """Return the Jacobian of the map from the tokens before time step ``i`` to the tokens after it.

        On a sphere it includes the projections before and after the step.
        """
        one = self.steps[i]
        operator = StepJacobian(self.stages(i), self.tableau, one.length)
        if not isinstance(self.system.field, Sphere):
            return operator
        after = ProjectionJacobian(one.before_projection[None], radius=self.system.field.radius)
        # ``points[0]`` is the start of the step, because the first stage of every method is there.
        return ComposedJacobian(after, ComposedJacobian(operator, ProjectionJacobian(one.points[0][None])))

    def until(self, frame: int, rounding: Tensor) -> LinearOperator:
        """Return the Jacobian of the map from the start of the flow to its state at a given output time.

        The later time has the index ``frame`` >= 1.
        """
        return ChainJacobian(self.step, self.steps_until[frame], rounding)


def _combined(weights: tuple[float, ...], terms: list[Tensor], like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for weight, term in zip(weights, terms, strict=True):
        total = total + weight * term
    return total


def _linearise(
    field: Field, interval: tuple[float, float], time: float, x: Tensor, weighting: Weighting | None
) -> LinearOperator:
    """Return the Jacobian at tokens (n, d) and one time; for a measure, in norms that weight each atom."""
    t = torch.tensor(time, dtype=torch.float64, device=x.device)
    if isinstance(field, Sphere):
        with torch.no_grad():
            v = field.field.velocity(*interval, weighting)(t, x)
        return TangentJacobian(_linearise(field.field, interval, time, x, weighting), x[None], v[None])
    if isinstance(field, MapField | Layers):
        f = field.map_at(*interval)
        if has_closed_form(f):
            return closed_form_jacobian(f, x[None], weighting=weighting)
        return AutodiffJacobian(f, x) if weighting is None else weighted_autodiff_jacobian(f, x, weighting)
    velocity = field.velocity(*interval, weighting)
    if weighting is None:
        return AutodiffJacobian(lambda y: velocity(t, y), x)
    # In coordinates √a_i x_i, the Euclidean norm is the weighted norm of displacements.
    root = (weighting.log_weights / 2).exp()[:, None]
    return AutodiffJacobian(lambda y: root * velocity(t, y / root), root * x)


def _bytes(system: Tokens) -> int:
    field = system.field.field if isinstance(system.field, Sphere) else system.field
    maps = field.maps if isinstance(field, Layers) else [field.map] if isinstance(field, MapField) else []
    matrices = max(map(_matrices, maps), default=_AUTODIFF_COPIES)
    return matrices * system.start.shape[0] ** 2 * system.start.element_size()


def _matrices(f: TokenMap) -> int:
    heads = [one.heads for one in layers(f) if isinstance(one, SelfAttention | StagedAttention)]
    return (sum(heads) or 1) if has_closed_form(f) else _AUTODIFF_COPIES
