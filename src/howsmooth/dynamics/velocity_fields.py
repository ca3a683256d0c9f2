"""Velocity fields that move tokens: attention, several layers one after another, or any function, also on a
sphere.

A map of this library is a velocity that does not depend on time. ``Layers`` applies several maps one after
another, ``Sphere`` keeps the tokens on a sphere, and any callable (t, x) can be a velocity too.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import check_tokens
from howsmooth.errors import ArgumentError, check_number

__all__ = ["Field", "Layers", "Sphere", "Velocity", "as_field"]

Velocity = Callable[[Tensor, Tensor], Tensor]

# Largest relative distance from a sphere at which tokens still count as lying on it; norms computed in
# float32 have such errors.
_ON_SPHERE = 1e-5


class Field(abc.ABC):
    """A velocity field of tokens, which may depend on time and may jump at certain times."""

    @property
    def switches(self) -> tuple[float, ...]:
        """The times, in increasing order, at which the velocity field jumps."""
        return ()

    @property
    def until(self) -> float:
        """The time up to which the velocity field is defined; infinite if there is no such limit."""
        return math.inf

    @abc.abstractmethod
    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the velocity field is defined for tokens ``x`` (..., n, d)."""

    @abc.abstractmethod
    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity between the times ``begin`` and ``end``, as a function of the time t and the
        tokens x.

        The velocity does not jump between the two times. If ``weighting`` is given, the tokens are atoms of a
        measure, whose weights and positions do not change.
        """

    def layer(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity v of the residual layers x ↦ x + h v(t, x) with step size h."""
        return self.velocity(begin, end, weighting)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the map by whose closed formulas a Gaussian flows, or raise ArgumentError."""
        raise ArgumentError(
            "field",
            expected="a map or Layers, for the flow of a Gaussian",
            got=self.describe(),
            remedy="Draw a sample of it, gaussian.sample(n, seed), and let that flow.",
        )

    def project(self, x: Tensor) -> Tensor:
        """Project tokens onto the set in which the flow must stay, such as a sphere, if there is one."""
        return x

    def drift(self, x: Tensor) -> float | None:
        """Return the relative distance of tokens from the set in which the flow must stay, or None."""
        return None

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a phrase that describes the velocity field."""


class MapField(Field):
    """The velocity field x' = f(x) of one attention map f, which does not change with time."""

    def __init__(self, f: TokenMap) -> None:
        self.map = _square(f, "field")

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the attention map accepts tokens ``x``."""
        check_tokens(x, self.map)

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the attention map, which does not depend on the time."""
        return lambda t, x: self.map._forward(x, weighting)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the attention map of this velocity field, which is the same at all times."""
        return self.map

    def describe(self) -> str:
        """Return a phrase that describes the attention map."""
        return self.map.describe()


class Layers(Field):
    """The velocity field of several maps, such as the layers of a model. Each map is the velocity for an
    equal part of the time.

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
        self.total_time = check_number("total_time", len(self.maps) if total_time is None else total_time)

    @property
    def duration(self) -> float:
        """The time for which each layer is the velocity field."""
        return self.total_time / len(self.maps)

    @property
    def switches(self) -> tuple[float, ...]:
        """The times at which one layer ends and the next begins."""
        return tuple(self.total_time * i / len(self.maps) for i in range(1, len(self.maps)))

    @property
    def until(self) -> float:
        """The time at which the last layer ends and the velocity field is no longer defined."""
        return self.total_time

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless every layer accepts tokens ``x``."""
        for f in self.maps:
            check_tokens(x, f)

    def map_at(self, begin: float, end: float) -> TokenMap:
        """Return the layer whose output is the velocity between the times ``begin`` and ``end``."""
        # The middle of the interval lies inside of one layer, while its ends may be where two layers meet.
        index = int((begin + end) / 2 / self.duration)
        return self.maps[min(index, len(self.maps) - 1)]

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return one layer as a function of time and tokens."""
        f = self.map_at(begin, end)
        return lambda t, x: f._forward(x, weighting)

    def describe(self) -> str:
        """Return a phrase with the number of layers, their total time and a description of the first."""
        return f"{len(self.maps)} layers in time {self.total_time:g}, the first {self.maps[0].describe()}"


class Sphere(Field):
    """A velocity field v projected onto the tangent spaces of a sphere, so that tokens stay on the sphere: x'
    = v − ⟨v, x⟩ x / |x|².

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
        self.radius = check_number("radius", radius)

    @property
    def switches(self) -> tuple[float, ...]:
        """The times at which the projected velocity field jumps."""
        return self.field.switches

    @property
    def until(self) -> float:
        """The time up to which the projected velocity field is defined."""
        return self.field.until

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the velocity field accepts tokens ``x`` and all lie on the sphere."""
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
        """Return the unprojected velocity, because residual layers project the tokens after each step."""
        return self.field.velocity(begin, end, weighting)

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity, projected onto the tangent spaces of the sphere."""
        inner = self.field.velocity(begin, end, weighting)

        def tangent(t: Tensor, x: Tensor) -> Tensor:
            v = inner(t, x)
            along = (v * x).sum(dim=-1, keepdim=True) / (x * x).sum(dim=-1, keepdim=True)
            return v - along * x

        return tangent

    def project(self, x: Tensor) -> Tensor:
        """Scale each token to the radius of the sphere."""
        scale: Tensor = self.radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * scale

    def drift(self, x: Tensor) -> float:
        """Return the largest relative distance of a token to the sphere, max_i ||x_i| − radius| / radius."""
        norms = torch.linalg.vector_norm(x.detach(), dim=-1)
        return float((norms / self.radius - 1).abs().max())

    def describe(self) -> str:
        """Return a phrase that describes the sphere and the velocity field that is projected onto it."""
        return f"{self.field.describe()}, on the sphere of radius {self.radius:g}"


class CallableField(Field):
    """A velocity field given by the user as a function of (t, x), whose result has the shape of x."""

    def __init__(self, function: Callable[[Tensor, Tensor], object]) -> None:
        self.function = function

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless ``x`` has the shape of tokens; results are checked at every call."""
        if x.ndim < 2 or min(x.shape) < 1:
            raise ArgumentError("start", expected="tokens (..., n, d)", got=f"shape {tuple(x.shape)}")

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the function of the user as a velocity, with a check of its results at each call."""
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
        """Return a phrase that names the function of the user."""
        return f"the velocity {getattr(self.function, '__name__', type(self.function).__name__)}"


def as_field(field: object) -> Field:
    """Convert a map, a function of (t, x) or a Field to a Field."""
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


def _square(f: object, name: str) -> TokenMap:
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
