"""Partial Jacobians of a network, and the propagation of the Taylor remainders of its layers along them.
Bounds on the rounding errors in the values and derivatives of the network, and on their effect on its margin.

The expansion of the margin holds around any states, with any Jacobians and any adjoints, if what each stage
makes of the computed numbers before it differs from the computed numbers after it by bounded residuals.
Proof: documentation page "A proved radius for a whole network", section "Rounding".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoid_arithmetic import ellipsoid_image, ellipsoid_sum
from howsmooth.bounds.radius.transformer_layers import Attention
from howsmooth.bounds.radius.transformer_network import Network, Stage
from howsmooth.rounding.rounded_tensor import exact, settled

__all__ = ["Errors", "PartialJacobians", "Residuals", "Step", "partial_jacobians", "rounding_loss"]


class Step(NamedTuple):
    """The Jacobians that carry errors of a network's hidden state through one stage.

    ``own`` (n, width', width) is the Jacobian of a stage that does not mix tokens. Attention has none, but
    ``sources``: the Jacobians (m, n', width', width_s) of its output with respect to each of the m tokens at
    the input of this attention layer, which stands last, and of all earlier ones.
    """

    own: Tensor | None
    sources: tuple[Tensor, ...] = ()


class PartialJacobians(NamedTuple):
    """The states of a network at one input, and the Jacobians that carry errors of the states on.

    ``stages`` are the network's, with weights that carry rounding errors; ``states`` are the computed states,
    ``state_errors`` the rounding errors of the step to each. ``steps`` are the Jacobians for each stage;
    ``residuals`` has, for each stage, the rounding error of its step of every Jacobian that starts at an
    attention layer.
    """

    stages: tuple[Stage, ...]
    states: list[Tensor]
    state_errors: list[float]
    steps: list[Step]
    residuals: list[tuple[float, ...]]


def partial_jacobians(network: Network, x: Tensor) -> PartialJacobians:
    """Return the states of a network at tokens x (n, d), the Jacobians of each stage that acts on single
    tokens, and those of each attention's output by the inputs of it and earlier attentions.

    The results do not depend on which tokens are allowed to change.
    """
    stages = network.rounded().stages
    states, errors, steps, residuals = [x], list[float](), list[Step](), list[tuple[float, ...]]()
    earlier = list[Tensor]()  # the Jacobians of the state by the inputs of attention layers
    for place, stage in enumerate(stages):
        state = exact(states[-1])
        n, width = state.shape
        output, error = settled(stage.value(state))
        own: Tensor | None = None
        eye = torch.eye(width, dtype=x.dtype)
        if isinstance(stage.map, Attention):
            if place:  # the network's input itself has no error
                spread, each = torch.zeros(n, width, n, width, dtype=x.dtype), torch.arange(n)
                spread[each, :, each] = eye
                earlier.append(spread)
            pushed = [settled(stage.push(state, exact(J.flatten(2)))) for J in earlier]
        else:
            own = exact(*settled(stage.push(state, exact(eye.expand(n, -1, -1)))))
            pushed = [settled(own @ exact(J.flatten(2))) for J in earlier]
        earlier = [found.unflatten(2, J.shape[2:]) for (found, _), J in zip(pushed, earlier, strict=True)]
        # The blocks of one token lie together: products of blocks are twice as fast.
        apart = () if own is not None else tuple(J.permute(2, 0, 1, 3).contiguous() for J in earlier)
        steps.append(Step(own, apart))
        residuals.append(tuple(of_source for _, of_source in pushed))
        states.append(output)
        errors.append(error)
    return PartialJacobians(stages, states, errors, steps, residuals)


class Errors:
    """Ellipsoids that contain the error of each token in a network's state, from stage to stage.

    ``state`` (n, width, width) contains the error that all stages so far have caused. ``lengths`` bounds the
    errors that stages caused between two attention layers, at the input of the second one.
    """

    def __init__(self, x: Tensor) -> None:
        self.state = x.new_zeros(len(x), x.shape[1], x.shape[1])
        self.lengths: list[float] = []
        self._between: list[Tensor] = []
        self._since: list[tuple[Step, Tensor]] = []

    def reach(self, step: Step) -> None:
        """Prepare for the next stage. If it is attention, store the error at its input that was caused by the
        previous attention layer, if there is one, and by all stages since.
        """
        if step.own is None and self._since:
            found = self._since[0][1]
            for later, remainder in self._since[1:]:
                found = _carried(later, found, remainder)
            self._between.append(found)
            self.lengths.append(frobenius_bound(found))

    def leave(self, step: Step, remainder: Tensor, width: int) -> None:
        """Update the errors after a stage whose Taylor remainder lies in given ellipsoids (n', d', d'), in
        the last d' columns of a state of the given width.
        """
        added = remainder
        if remainder.shape[1] < width:
            added = remainder.new_zeros(len(remainder), width, width)
            added[:, -remainder.shape[1] :, -remainder.shape[1] :] = remainder
        if step.own is not None:
            self.state = _carried(step, self.state, added)
            self._since.append((step, added))
            return
        shapes = [added]
        for source, cause in zip(step.sources, self._between, strict=True):
            shapes += list(ellipsoid_image(source, cause[:, None]))
        self.state, self._since = ellipsoid_sum(*shapes), [(step, added)]


def _carried(step: Step, shapes: Tensor, added: Tensor) -> Tensor:
    assert step.own is not None
    return ellipsoid_sum(ellipsoid_image(step.own, shapes), added)


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
        """Bound the rounding error that one layer adds to its output for |δ| ≤ ε. ``causes`` bounds the
        errors at the input of each attention layer that arose since the one before.
        """
        found = self.state + self.tangents * epsilon + self.forms * epsilon**2 / 2
        return found + sum(of * cause for of, cause in zip(self.sources, causes, strict=True))


def frobenius_bound(shapes: Tensor) -> float:
    """Bound the Frobenius norm of n vectors that lie in n given ellipsoids (n, d, d)."""
    return float(shapes.diagonal(dim1=1, dim2=2).sum().clamp_min(0).sqrt())


def rounding_loss(residuals: Sequence[Residuals], errors: Sequence[Tensor], epsilon: float) -> float:
    """Bound what the rounding errors of a network's values and derivatives take from its margin, beside their
    part in the remainders. ``errors`` are ellipsoids of the state's error before each stage and at the end.
    """
    total = 0.0
    for at, error in zip(residuals, errors, strict=True):
        e = at.size_of_forms * epsilon**2 / 2 + frobenius_bound(error)
        total += at.size_of_adjoint * at.state + at.bent * epsilon * e
        total += at.adjoint * (at.size_of_tangents * epsilon + e)
    return total
