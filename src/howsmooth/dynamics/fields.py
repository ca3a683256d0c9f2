"""Velocities of tokens in time: what a flow integrates.

A map of this library is a velocity that does not depend on time; ``Layers`` is one map after another;
``Sphere`` keeps the tokens on a sphere; any callable (t, x) is taken as it is.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from howsmooth.attention import TokenMap, Weighting
from howsmooth.attention.map import check_tokens
from howsmooth.errors import ArgumentError

__all__ = ["Field", "Layers", "Sphere", "Velocity", "as_field"]

Velocity = Callable[[Tensor, Tensor], Tensor]

# Tokens given as lying on a sphere may miss it by this much, relative to its radius: float32 norms do.
_ON_SPHERE = 1e-5


class Field(abc.ABC):
    """A velocity of tokens, which may depend on time and then jumps at ``switches`` only."""

    @property
    def switches(self) -> tuple[float, ...]:
        """Times, increasing, at which the velocity jumps; integrators stop there."""
        return ()

    @property
    def until(self) -> float:
        """Time up to which the field is defined, counted from 0; infinite without an end."""
        return math.inf

    @abc.abstractmethod
    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless tokens ``x`` (..., n, d) can flow."""

    @abc.abstractmethod
    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return (t, x) -> velocity for the times from ``begin`` to ``end``, between which no switch lies.

        ``weighting`` makes the tokens atoms of a measure, whose weights and positions stay as they are.
        """

    def layer(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity that a residual layer adds, before :meth:`settle`: that of the flow itself."""
        return self.velocity(begin, end, weighting)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the map whose value is the velocity in this time.

        Raises
        ------
        ArgumentError
            If there is none: then Gaussians, which maps act on by formulas of their own, cannot flow.

        """
        raise ArgumentError(
            "field",
            expected="a map or Layers, for the flow of a Gaussian",
            got=self.describe(),
            remedy="Draw a sample of it, gaussian.sample(n, seed), and let that flow.",
        )

    def settle(self, x: Tensor) -> Tensor:
        """Return the tokens put back on what the flow preserves, if it preserves anything."""
        return x

    def drift(self, x: Tensor) -> float | None:
        """Return how far the tokens are from what the flow preserves, relative; None if there is nothing."""
        return None

    @abc.abstractmethod
    def describe(self) -> str:
        """Return one phrase that says what the velocity is."""


class MapField(Field):
    """The velocity x' = f(x) of one map."""

    def __init__(self, f: TokenMap) -> None:
        self.map = _square(f, "field")

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the map takes ``x``."""
        check_tokens(x, self.map)

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the map, at all times."""
        return lambda t, x: self.map._forward(x, weighting)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the map."""
        return self.map

    def describe(self) -> str:
        """Return the words of the map."""
        return self.map.describe()


class Layers(Field):
    """Maps in sequence, each the velocity for an equal part of the time: a model's layers as one flow.

    Parameters
    ----------
    maps
        Maps with d_out = d, the first layer first. They are velocities: the residual connection is the
        flow itself, so what is wanted is attention (behind its norm layer, if there is one) without it.
    total_time
        The time that all layers take together, from 0; by default their number. Then ``method="residual"``
        is the residual network X + f_l(X) itself, and other methods are the flow that it discretises.

    Raises
    ------
    ArgumentError
        If there is no map, the maps do not fit each other, or the time is not positive.

    """

    def __init__(self, maps: Sequence[object], total_time: object = None) -> None:
        self.maps = tuple(_square(f, "maps") for f in maps)
        if not self.maps:
            raise ArgumentError("maps", expected="at least one map", got="none")
        first = self.maps[0]
        for f in self.maps[1:]:
            if (f.d, f.dtype, f.device) != (first.d, first.dtype, first.device):
                raise ArgumentError(
                    "maps",
                    expected=f"maps of one kind: d = {first.d}, {first.dtype} on {first.device}",
                    got=f"d = {f.d}, {f.dtype} on {f.device}",
                )
        self.total_time = positive("total_time", len(self.maps) if total_time is None else total_time)

    @property
    def duration(self) -> float:
        """Time that one layer takes."""
        return self.total_time / len(self.maps)

    @property
    def switches(self) -> tuple[float, ...]:
        """Times at which one layer follows another."""
        return tuple(self.total_time * i / len(self.maps) for i in range(1, len(self.maps)))

    @property
    def until(self) -> float:
        """The end of the last layer."""
        return self.total_time

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless every layer takes ``x``."""
        for f in self.maps:
            check_tokens(x, f)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the layer whose time holds the interval from ``begin`` to ``end``."""
        index = int((begin + end) / 2 / self.duration)
        return self.maps[min(index, len(self.maps) - 1)]

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the layer of this time."""
        f = self.map_at(begin, end)
        return lambda t, x: f._forward(x, weighting)

    def describe(self) -> str:
        """Return how many layers, in what time."""
        return f"{len(self.maps)} layers in time {self.total_time:g}, the first {self.maps[0].describe()}"


class Sphere(Field):
    """A velocity projected on the tangent spaces of a sphere: x' = v − ⟨v, x⟩ x / |x|².

    Parameters
    ----------
    field
        A map, ``Layers`` or a callable, as :func:`~howsmooth.dynamics.flow` takes.
    radius
        Radius of the sphere, on which the tokens must start.

    Notes
    -----
    The norms are constant along the flow. An integrator keeps them up to its error: they are set back at
    every output time and every switch of layers, and the trajectory's ``drift`` is the largest relative
    difference met there. ``method="residual"`` is x ← radius · (x + h v) / |x + h v|, the residual layer
    followed by a norm layer.

    """

    def __init__(self, field: object, radius: object = 1.0) -> None:
        self.field = as_field(field)
        if isinstance(self.field, Sphere):
            raise ArgumentError("field", expected="a field that is not on a sphere yet", got="a Sphere")
        self.radius = positive("radius", radius)

    @property
    def switches(self) -> tuple[float, ...]:
        """Times at which the inner field jumps."""
        return self.field.switches

    @property
    def until(self) -> float:
        """Time up to which the inner field is defined."""
        return self.field.until

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the inner field takes ``x`` and every token is on the sphere."""
        self.field.check(x)
        off = self.drift(x)
        if not off <= _ON_SPHERE:
            norms = torch.linalg.vector_norm(x.detach(), dim=-1)
            raise ArgumentError(
                "start",
                expected=f"tokens on the sphere of radius {self.radius:g}",
                got=f"norms from {float(norms.min()):.6g} to {float(norms.max()):.6g}",
                remedy=f"Divide each token by its norm{_times(self.radius)}.",
            )

    def layer(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the inner velocity, not projected: the norm layer behind it does that."""
        return self.field.velocity(begin, end, weighting)

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the projected velocity."""
        inner = self.field.velocity(begin, end, weighting)

        def tangent(t: Tensor, x: Tensor) -> Tensor:
            v = inner(t, x)
            along = (v * x).sum(dim=-1, keepdim=True) / (x * x).sum(dim=-1, keepdim=True)
            return v - along * x

        return tangent

    def settle(self, x: Tensor) -> Tensor:
        """Return the tokens at their radius again."""
        scale: Tensor = self.radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * scale

    def drift(self, x: Tensor) -> float:
        """Return the largest ||x_i| − radius| / radius."""
        norms = torch.linalg.vector_norm(x.detach(), dim=-1)
        return float((norms / self.radius - 1).abs().max())

    def describe(self) -> str:
        """Return the words of the inner field, and the sphere."""
        return f"{self.field.describe()}, on the sphere of radius {self.radius:g}"


class CallableField(Field):
    """A velocity that someone wrote: (t, x) -> velocity of the shape of x."""

    def __init__(self, function: Callable[[Tensor, Tensor], object]) -> None:
        self.function = function

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless ``x`` is tokens; the velocity is checked whenever it is evaluated."""
        if x.ndim < 2 or min(x.shape) < 1:
            raise ArgumentError("start", expected="tokens (..., n, d)", got=f"shape {tuple(x.shape)}")

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the function, with its answers checked."""
        if weighting is not None:
            raise ArgumentError(
                "start",
                expected="tokens, for a velocity (t, x), which does not see the weights of atoms",
                got="a measure",
                remedy="Give its points, or a map as the field.",
            )

        def checked(t: Tensor, x: Tensor) -> Tensor:
            v = self.function(t, x)
            if not isinstance(v, Tensor) or v.shape != x.shape or v.dtype != x.dtype:
                got = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
                raise ArgumentError("field", expected=f"a velocity {x.dtype} {tuple(x.shape)}", got=got)
            return v

        return checked

    def describe(self) -> str:
        """Return the function's name."""
        return f"the velocity {getattr(self.function, '__name__', type(self.function).__name__)}"


def as_field(field: object) -> Field:
    """Return a Field for a map, a Field or a callable (t, x)."""
    if isinstance(field, Field):
        return field
    if isinstance(field, TokenMap):
        return MapField(field)
    if callable(field):
        return CallableField(field)
    raise ArgumentError(
        "field",
        expected="a map of this library, Layers, Sphere or a callable (t, x)",
        got=type(field).__name__,
    )


def positive(name: str, value: object) -> float:
    """Return ``value`` as a float, after checking that it is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ArgumentError(name, expected="a finite number > 0", got=repr(value))
    return float(value)


def _square(f: object, name: str) -> TokenMap:
    """Return the map, after checking that its values are velocities of its tokens."""
    if not isinstance(f, TokenMap):
        raise ArgumentError(name, expected="a map of this library", got=type(f).__name__)
    if f.d_out != f.d:
        raise ArgumentError(
            name,
            expected="a map with d_out = d, whose values are velocities of the tokens",
            got=f"d = {f.d}, d_out = {f.d_out}",
            remedy="Give it an output matrix.",
        )
    return f


def _times(radius: float) -> str:
    return "" if radius == 1 else f" and multiply by {radius:g}"
