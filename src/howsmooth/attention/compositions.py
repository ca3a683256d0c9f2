"""Residual connections and compositions of maps.

A post-norm block is ``Compose(norm, Residual(attention))``, a pre-norm block
``Residual(Compose(attention, norm))``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import TokenMap
from howsmooth.errors import ArgumentError

__all__ = ["Compose", "OuterMap", "Residual", "layers"]


def layers(f: object) -> Iterator[object]:
    """Yield the layers that ``f`` combines by residual connections and compositions, the last layer first."""
    match f:
        case Residual():
            yield from layers(f.inner)
        case Compose():
            yield from layers(f.outer)
            yield from layers(f.inner)
        case _:
            yield f


class OuterMap(TokenMap):
    """Base class of maps of tokens that contain another map of tokens, such as a residual connection."""

    inner: TokenMap

    @property
    def d(self) -> int:
        """Dimension of the map's input tokens."""
        return self.inner.d


class Residual(OuterMap):
    """The residual connection X ↦ X + inner(X)."""

    def __init__(self, inner: TokenMap) -> None:
        if inner.d != inner.d_out:
            raise ArgumentError(
                "inner",
                expected="a map with d_out = d",
                got=f"d = {inner.d}, d_out = {inner.d_out}",
                remedy="A residual needs the output projection.",
            )
        self.inner = inner

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return f"residual plus ({self.inner.describe()})"

    def __repr__(self) -> str:
        return f"Residual({self.inner!r})"

    def check_length(self, n: int) -> None:
        """Raise ArgumentError if the inner map cannot take ``n`` tokens."""
        self.inner.check_length(n)

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return x + self.inner._forward(x, weighting)


class Compose(OuterMap):
    """The composition X ↦ outer(inner(X))."""

    def __init__(self, outer: TokenMap, inner: TokenMap) -> None:
        if outer.d != inner.d_out:
            raise ArgumentError(
                "outer", expected=f"a map on tokens of dimension {inner.d_out}", got=f"dimension {outer.d}"
            )
        if outer.dtype != inner.dtype or outer.device != inner.device:
            raise ArgumentError(
                "outer",
                expected=f"{inner.dtype} on {inner.device}, as inner",
                got=f"{outer.dtype} on {outer.device}",
            )
        self.outer = outer
        self.inner = inner

    @property
    def d_out(self) -> int:
        """Dimension of the map's output tokens."""
        return self.outer.d_out

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return f"{self.outer.describe()} of ({self.inner.describe()})"

    def __repr__(self) -> str:
        return f"Compose({self.outer!r}, {self.inner!r})"

    def check_length(self, n: int) -> None:
        """Raise ArgumentError if the inner or the outer map cannot take ``n`` tokens."""
        self.inner.check_length(n)
        self.outer.check_length(n)

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return self.outer._forward(self.inner._forward(x, weighting), weighting)
