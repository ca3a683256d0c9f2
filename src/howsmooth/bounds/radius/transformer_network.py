"""The class ``Network``: a Transformer classifier as a chain of stages, layers with their residuals."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.transformer_layers import ACTIVATIONS, Activation, Attention, Map
from howsmooth.rounding.rounded_tensor import FUZZ, Rounded, exact

__all__ = ["Network", "Stage", "with_rounding"]


@dataclass(frozen=True, eq=False)
class Stage:
    """One layer of a network (attention, feed-forward or norm) together with its residual connection.

    It maps a state x, the numbers (n, width) between two stages, to [x] ⊕ ([residual] + map(branch)), where
    ``branch`` and ``residual`` are columns of x. ``keep`` says that the whole state stands before the output,
    as in a pre-norm block, where the norm's output feeds the branch and its input the residual.
    """

    name: str
    map: Map
    branch: slice
    residual: slice | None = None
    keep: bool = False

    @property
    def rows(self) -> Tensor | slice:
        """The tokens whose outputs this stage computes: all, or those that its attention layer selects."""
        return self.map.rows if isinstance(self.map, Attention) else slice(None)

    def _wired(self, state: Tensor, output: Tensor) -> Tensor:
        if self.residual is not None:
            output = output + state[self.rows, self.residual]
        return torch.cat([state[self.rows], output], 1) if self.keep else output

    def value(self, x: Tensor) -> Tensor:
        """Return the output (n', width') for the input x (n, width)."""
        return self._wired(x, self.map.value(x[:, self.branch]))

    def push(self, x: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Jacobian at x by tangents (n, width, k), k vectors at once."""
        return self._wired(tangents, self.map.push(x[:, self.branch], tangents[:, self.branch]))

    def pull(self, x: Tensor, adjoints: Tensor) -> Tensor:
        """Multiply the transposed Jacobian at x by adjoints (n', width', k)."""
        found = x.new_zeros(*x.shape, adjoints.shape[-1])
        if self.keep:
            found[self.rows] += adjoints[:, : x.shape[1]]
            adjoints = adjoints[:, x.shape[1] :]
        found[:, self.branch] += self.map.pull(x[:, self.branch], adjoints)
        if self.residual is not None:
            found[self.rows, self.residual] += adjoints
        return found

    def output_adjoint(self, x: Tensor, adjoint: Tensor) -> Tensor:
        """Return the columns of an adjoint (n', width', ...) that are that of the layer's own output, before
        the residual is added.
        """
        return adjoint[:, x.shape[1] :] if self.keep else adjoint

    def curvature(self, x: Tensor, adjoint: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Hessian of ⟨adjoint, output⟩ at x by tangents (n, width, k)."""
        found = x.new_zeros(*x.shape, tangents.shape[-1])
        own = self.output_adjoint(x, adjoint)
        found[:, self.branch] = self.map.curvature(x[:, self.branch], own, tangents[:, self.branch])
        return found

    def second(self, x: Tensor, tangents: Tensor, pairs: Pairs) -> Tensor:
        """Return the second derivative of the stage's layer along k tangents, as quadratic forms."""
        return self.map.second(x[:, self.branch], tangents[:, self.branch], pairs)

    def push_forms(self, x: Tensor, forms: Tensor | None, second: Tensor) -> Tensor:
        """Return the second derivatives of the output by the network's input, quadratic forms (n', width',
        p). ``forms`` are those of the stage's input, or None if they are zero; ``second`` is what the layer's
        curvature adds.
        """
        if forms is None:
            width = second.shape[1] + (x.shape[1] if self.keep else 0)
            pushed = second.new_zeros(len(second), width, second.shape[2])
        else:
            pushed = self.push(x, forms)
        pushed[:, -second.shape[1] :] += second
        return pushed


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return
    if isinstance(value, Activation):
        value = next((kind for kind, known in ACTIVATIONS.items() if known is value), value)
    digest.update(repr((name, value)).encode())


def with_rounding(weight: Tensor, constant: bool) -> Rounded:
    """Return weights with a bound on their rounding errors. That of constants allows for logarithms, and for
    sums that cancel.
    """
    size = float(weight.norm()) + (math.sqrt(weight.numel()) if constant else 0.0)
    return exact(weight, 2 * FUZZ * size)


def _rounded(layer: Any) -> Any:
    parts = {field.name: getattr(layer, field.name) for field in fields(layer)}
    weights = {n: w for n, w in parts.items() if isinstance(w, Tensor) and w.is_floating_point()}
    return replace(layer, **{n: with_rounding(w, n.endswith("bias")) for n, w in weights.items()})


@dataclass(frozen=True, eq=False)
class Network:
    """A Transformer classifier: a sequence of stages, and a linear readout of the logits.

    The logits are ⟨readout, last state⟩ + offset. ``readout`` has the shape (classes, n', width') of the last
    state, ``offset`` (classes,).
    """

    stages: tuple[Stage, ...]
    readout: Tensor
    offset: Tensor

    def rounded(self) -> Network:
        """Return the same network with weights that carry bounds on the roundings of factors in them."""
        return replace(self, stages=tuple(replace(s, map=_rounded(s.map)) for s in self.stages))

    def states(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input x of the network, and then the output of each stage."""
        yield x
        for stage in self.stages:
            x = stage.value(x)
            yield x

    def digest(self) -> str:
        """Return a SHA-256 hash of the layers' kinds, connections, weights and settings."""
        digest = hashlib.sha256()
        for stage in self.stages:
            wiring = (stage.name, stage.branch, stage.residual, stage.keep, type(stage.map).__name__)
            digest.update(repr(wiring).encode())
            for part in fields(stage.map):
                _add(digest, part.name, getattr(stage.map, part.name))
        _add(digest, "readout", self.readout)
        _add(digest, "offset", self.offset)
        return digest.hexdigest()

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (classes,) of the network for tokens x (n, d)."""
        *_, last = self.states(x)
        return torch.einsum("cnd,nd->c", self.readout, last) + self.offset
