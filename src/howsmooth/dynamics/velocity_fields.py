"""Velocity fields that a flow integrates.

A map of this library is a velocity that does not depend on time. ``Layers`` applies several maps one after
another, ``Sphere`` keeps the tokens on a sphere, and any callable (t, x) can be a velocity too.
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

# Largest relative distance from a sphere at which tokens still count as lying on it; norms computed in
# float32 have such errors.
_ON_SPHERE = 1e-5


class Field(abc.ABC):
    """A velocity field of tokens, which may depend on time and jump at the times ``switches``."""

    @property
    def switches(self) -> tuple[float, ...]:
        """The increasing times at which the velocity jumps; integrators begin a new step there."""
        return ()

    @property
    def until(self) -> float:
        """The time, counted from 0, up to which the field is defined; infinite if there is no end."""
        return math.inf

    @abc.abstractmethod
    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the field accepts tokens ``x`` (..., n, d)."""

    @abc.abstractmethod
    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity as a function of (t, x), for times from ``begin`` to ``end``.

        The velocity does not jump between the two times. If ``weighting`` is given, the tokens are atoms of a
        measure, whose weights and positions do not change.
        """

    def layer(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity v from ``begin`` to ``end``, for residual layers x ↦ x + h v(t, x)."""
        return self.velocity(begin, end, weighting)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the map of this library that is the velocity between two times.

        A Gaussian flows by closed formulas of the map.

        Raises
        ------
        ArgumentError
            If the velocity is not a map of this library. Then a Gaussian cannot flow, because its flow uses
            closed formulas of the map.

        """
        raise ArgumentError(
            "field",
            expected="a map or Layers, for the flow of a Gaussian",
            got=self.describe(),
            remedy="Draw a sample of it, gaussian.sample(n, seed), and let that flow.",
        )

    def project(self, x: Tensor) -> Tensor:
        """Return tokens projected onto the set that the flow preserves, such as a sphere.

        Without such a set, the tokens are returned unchanged.
        """
        return x

    def drift(self, x: Tensor) -> float | None:
        """Return the relative distance of the tokens from the set that the flow preserves.

        Without such a set, the result is None.
        """
        return None

    @abc.abstractmethod
    def describe(self) -> str:
        """Return one phrase that describes the velocity."""


class MapField(Field):
    """The velocity x' = f(x) of one map, at all times."""

    def __init__(self, f: TokenMap) -> None:
        self.map = _square(f, "field")

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the map accepts tokens ``x``."""
        check_tokens(x, self.map)

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the map as a velocity, a function of (t, x) that does not depend on t."""
        return lambda t, x: self.map._forward(x, weighting)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the map whose values are the velocity."""
        return self.map

    def describe(self) -> str:
        """Return the description of the map."""
        return self.map.describe()


class Layers(Field):
    """Maps in sequence, such as a model's layers; each is the velocity for an equal share of the time.

    Parameters
    ----------
    maps
        Maps with d_out = d, in the order of the layers. They are velocities, so give each attention (with its
        norm layer, if any) without its residual connection, which the flow supplies.
    total_time
        The end of the last layer; the first layer begins at time 0. The default is the number of layers. Then
        ``method="residual"`` computes the residual network X + f_l(X), and other methods integrate the flow
        that this network discretises.

    Raises
    ------
    ArgumentError
        If there is no map, the maps differ in dimension, dtype or device, or the time is not positive.

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
                    expected=f"maps that all have d = {first.d} and {first.dtype} on {first.device}",
                    got=f"d = {f.d}, {f.dtype} on {f.device}",
                )
        self.total_time = positive("total_time", len(self.maps) if total_time is None else total_time)

    @property
    def duration(self) -> float:
        """The time that each layer takes."""
        return self.total_time / len(self.maps)

    @property
    def switches(self) -> tuple[float, ...]:
        """The times at which one layer ends and the next begins."""
        return tuple(self.total_time * i / len(self.maps) for i in range(1, len(self.maps)))

    @property
    def until(self) -> float:
        """The time at which the last layer ends."""
        return self.total_time

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless every layer accepts tokens ``x``."""
        for f in self.maps:
            check_tokens(x, f)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the layer that is active between ``begin`` and ``end``."""
        index = int((begin + end) / 2 / self.duration)
        return self.maps[min(index, len(self.maps) - 1)]

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the layer that is active between ``begin`` and ``end``, as a function of (t, x)."""
        f = self.map_at(begin, end)
        return lambda t, x: f._forward(x, weighting)

    def describe(self) -> str:
        """Return a phrase with the number of layers, their total time and the first layer."""
        return f"{len(self.maps)} layers in time {self.total_time:g}, the first {self.maps[0].describe()}"


class Sphere(Field):
    """A velocity projected onto the tangent spaces of a sphere: x' = v − ⟨v, x⟩ x / |x|².

    Parameters
    ----------
    field
        A map, ``Layers`` or a callable, as for :func:`~howsmooth.dynamics.flow`.
    radius
        Radius of the sphere. The flow must start with tokens on this sphere.

    Notes
    -----
    The exact flow keeps the norms of tokens constant, but an integrator changes them by its error. At every
    output time and every switch of layers the tokens are projected back onto the sphere. The trajectory's
    ``drift`` is the largest relative distance from the sphere before such a projection. ``method="residual"``
    computes x ← radius · (x + h v) / |x + h v|, a residual layer followed by a norm layer.

    """

    def __init__(self, field: object, radius: object = 1.0) -> None:
        self.field = as_field(field)
        if isinstance(self.field, Sphere):
            raise ArgumentError("field", expected="a field that is not on a sphere yet", got="a Sphere")
        self.radius = positive("radius", radius)

    @property
    def switches(self) -> tuple[float, ...]:
        """The times at which the unprojected velocity jumps."""
        return self.field.switches

    @property
    def until(self) -> float:
        """The time up to which the unprojected velocity is defined."""
        return self.field.until

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the unprojected field accepts ``x`` and all tokens are on the sphere."""
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
        """Return the velocity without projection, because :meth:`project` acts after each residual layer."""
        return self.field.velocity(begin, end, weighting)

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity projected onto the tangent spaces of the sphere."""
        inner = self.field.velocity(begin, end, weighting)

        def tangent(t: Tensor, x: Tensor) -> Tensor:
            v = inner(t, x)
            along = (v * x).sum(dim=-1, keepdim=True) / (x * x).sum(dim=-1, keepdim=True)
            return v - along * x

        return tangent

    def project(self, x: Tensor) -> Tensor:
        """Return the tokens scaled to the norm ``radius``."""
        scale: Tensor = self.radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * scale

    def drift(self, x: Tensor) -> float:
        """Return the largest relative distance of a token from the sphere, ||x_i| − radius| / radius."""
        norms = torch.linalg.vector_norm(x.detach(), dim=-1)
        return float((norms / self.radius - 1).abs().max())

    def describe(self) -> str:
        """Return the description of the unprojected field and of the sphere."""
        return f"{self.field.describe()}, on the sphere of radius {self.radius:g}"


class CallableField(Field):
    """A velocity given as a callable (t, x) that returns a tensor with the shape of x."""

    def __init__(self, function: Callable[[Tensor, Tensor], object]) -> None:
        self.function = function

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the shape of ``x`` is that of tokens, (..., n, d).

        The callable's results are checked at every evaluation.
        """
        if x.ndim < 2 or min(x.shape) < 1:
            raise ArgumentError("start", expected="tokens (..., n, d)", got=f"shape {tuple(x.shape)}")

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the callable as a velocity, with a check of its results."""
        if weighting is not None:
            raise ArgumentError(
                "start",
                expected="tokens, because a callable velocity (t, x) does not get the weights of atoms",
                got="a measure",
                remedy="Give the points of the measure, or a map as the field.",
            )

        def checked(t: Tensor, x: Tensor) -> Tensor:
            v = self.function(t, x)
            if not isinstance(v, Tensor) or v.shape != x.shape or v.dtype != x.dtype:
                got = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
                raise ArgumentError("field", expected=f"a velocity {x.dtype} {tuple(x.shape)}", got=got)
            return v

        return checked

    def describe(self) -> str:
        """Return a phrase with the callable's name."""
        return f"the velocity {getattr(self.function, '__name__', type(self.function).__name__)}"


def as_field(field: object) -> Field:
    """Return a Field, given a map, a Field or a callable (t, x)."""
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
    """Return the map after checking that its outputs can be velocities, which needs d_out = d."""
    if not isinstance(f, TokenMap):
        raise ArgumentError(name, expected="a map of this library", got=type(f).__name__)
    if f.d_out != f.d:
        raise ArgumentError(
            name,
            expected="a map with d_out = d, whose values are velocities of the tokens",
            got=f"d = {f.d}, d_out = {f.d_out}",
            remedy="Give the map an output matrix with d rows.",
        )
    return f


def _times(radius: float) -> str:
    return "" if radius == 1 else f" and multiply by {radius:g}"
