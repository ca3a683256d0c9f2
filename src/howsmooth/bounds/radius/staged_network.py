"""A Transformer as a list of stages, with its partial Jacobians at given tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.rounded_tensor import FUZZ, exact
from howsmooth.bounds.radius.stages import Attention, Map

__all__ = ["Network", "Stage"]


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage x ↦ [x] ⊕ ([residual] + map(branch)), where branch and residual are columns of the state x.

    The state has the shape (n, width). ``keep`` says that the whole state stands before the output, as in a
    pre-norm block, where the norm's output feeds the branch and its input the residual.
    """

    name: str
    map: Map
    branch: slice
    residual: slice | None = None
    keep: bool = False

    @property
    def rows(self) -> Tensor | slice:
        """The tokens that are computed: all, unless the map is attention with fewer rows."""
        return self.map.rows if isinstance(self.map, Attention) else slice(None)

    def _wired(self, state: Tensor, output: Tensor) -> Tensor:
        if self.residual is not None:
            output = output + state[self.rows, self.residual]
        return torch.cat([state[self.rows], output], 1) if self.keep else output

    def value(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return self._wired(x, self.map.value(x[:, self.branch]))

    def push(self, x: Tensor, tangents: Tensor) -> Tensor:
        """Return the derivative at x along tangents (n, width, k)."""
        return self._wired(tangents, self.map.push(x[:, self.branch], tangents[:, self.branch]))

    def pull(self, x: Tensor, adjoints: Tensor) -> Tensor:
        """Return the transposed derivative at x of adjoints (n', width', k)."""
        found = x.new_zeros(*x.shape, adjoints.shape[-1])
        if self.keep:
            found[self.rows] += adjoints[:, : x.shape[1]]
            adjoints = adjoints[:, x.shape[1] :]
        found[:, self.branch] += self.map.pull(x[:, self.branch], adjoints)
        if self.residual is not None:
            found[self.rows, self.residual] += adjoints
        return found

    def output_adjoint(self, x: Tensor, adjoint: Tensor) -> Tensor:
        """Return the part of an adjoint (n', width', ...) that belongs to the output of the map."""
        return adjoint[:, x.shape[1] :] if self.keep else adjoint

    def curvature(self, x: Tensor, adjoint: Tensor, tangents: Tensor) -> Tensor:
        """Return the second derivative of ⟨adjoint, value⟩ at x applied to tangents (n, width, k)."""
        found = x.new_zeros(*x.shape, tangents.shape[-1])
        own = self.output_adjoint(x, adjoint)
        found[:, self.branch] = self.map.curvature(x[:, self.branch], own, tangents[:, self.branch])
        return found

    def second(self, x: Tensor, tangents: Tensor, pairs: Pairs) -> Tensor:
        """Return D²F[G, G] at x as quadratic forms of the map's output (n', d_out, p)."""
        return self.map.second(x[:, self.branch], tangents[:, self.branch], pairs)

    def push_forms(self, x: Tensor, tangents: Tensor, forms: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the next quadratic forms (n', width', p), and the part that this stage adds."""
        own = self.second(x, tangents, pairs)
        pushed = self.push(x, forms)
        pushed[:, -own.shape[1] :] += own
        return pushed, own


def _rounded(layer: Any) -> Any:
    weights = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return replace(
        layer,
        **{
            name: exact(weight, FUZZ * float(weight.norm()))
            for name, weight in weights.items()
            if isinstance(weight, Tensor) and weight.is_floating_point()
        },
    )


@dataclass(frozen=True, eq=False)
class Network:
    """Stages one after another, then a linear readout: logits = ⟨readout, last state⟩ + offset.

    ``readout`` has the shape (classes, n', width') of the last state, ``offset`` (classes,).
    """

    stages: tuple[Stage, ...]
    readout: Tensor
    offset: Tensor

    def rounded(self) -> Network:
        """Return the network with weights that carry bounds on rounding errors through every operation.

        A weight may differ from the exact one by the rounding of a factor that was multiplied to it.
        """
        return replace(self, stages=tuple(replace(s, map=_rounded(s.map)) for s in self.stages))

    def states(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input and the state after each stage."""
        yield x
        for stage in self.stages:
            x = stage.value(x)
            yield x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (classes,) of tokens (n, d)."""
        *_, last = self.states(x)
        return torch.einsum("cnd,nd->c", self.readout, last) + self.offset
