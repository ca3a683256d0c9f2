"""Checks of the arguments of distance functions: the order p, the two measures, and the options of the
solver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from howsmooth.attention.map import AbstractMeasure
from howsmooth.errors import ArgumentError, check_number, check_whole
from howsmooth.measures.discrete import DiscreteMeasure

__all__ = ["Options", "check_discrete", "check_order", "check_same_space"]


@dataclass(frozen=True)
class Options:
    """The checked options of a distance function, which determine how the transport problem is solved."""

    method: str
    regularisation: float | None
    rtol: float
    max_iterations: int
    gradient: bool

    @classmethod
    def of(
        cls, method: object, regularisation: object, rtol: object, max_iterations: object, gradient: object
    ) -> Options:
        """Check the options of a distance function, and return them as Options."""
        if method not in ("auto", "exact", "entropic", "1d", "bures"):
            raise ArgumentError(
                "method", expected="'auto', 'exact', 'entropic', '1d' or 'bures'", got=repr(method)
            )
        if regularisation is not None:
            regularisation = check_number("regularisation", regularisation)
            if method != "entropic":
                raise ArgumentError(
                    "regularisation",
                    expected="None unless method='entropic'",
                    got=repr(regularisation),
                    remedy="Take method='entropic'.",
                )
        if rtol is None:
            rtol = 1e-2 if method == "entropic" else 1e-6
        steps = check_whole("max_iterations", max_iterations)
        if not isinstance(gradient, bool):
            raise ArgumentError("gradient", expected="True or False", got=repr(gradient))
        rtol = check_number("rtol", rtol)
        return cls(str(method), regularisation, rtol, steps, gradient)

    def narrow(self, lower: float, upper: float, noise: float) -> bool:
        """Return True if the interval of a distance is as narrow as requested, or if the distance is not
        above the rounding error ``noise``.
        """
        return upper - lower <= self.rtol * upper or upper <= noise


def check_order(p: object) -> float:
    """Return the order p of a Wasserstein distance as a float after checking that it is finite and >= 1."""
    return check_number("p", p, "a finite order >= 1", lambda order: 1 <= order < math.inf)


def check_discrete(name: str, measure: object) -> DiscreteMeasure:
    """Return ``measure`` after checking that it is a DiscreteMeasure; raise ArgumentError otherwise."""
    if not isinstance(measure, DiscreteMeasure):
        remedy = "Write DiscreteMeasure(points, weights)."
        if isinstance(measure, AbstractMeasure):
            remedy = "To compare a Gaussian with atoms take gaussian.sample(n, seed)."
        raise ArgumentError(name, expected="a DiscreteMeasure", got=type(measure).__name__, remedy=remedy)
    return measure


def check_same_space(mu: AbstractMeasure, nu: AbstractMeasure) -> None:
    """Raise ArgumentError unless two measures have the same dimension and are on the same device."""
    if mu.d != nu.d or mu.device != nu.device:
        raise ArgumentError(
            "nu",
            expected=f"a measure of dimension {mu.d} on {mu.device}, as mu",
            got=f"dimension {nu.d} on {nu.device}",
        )
