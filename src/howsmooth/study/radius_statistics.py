"""Correlate the token norms (radii) of sequences with their lengths, and group sequences by radius.

If longer sequences have larger tokens, an exponent in the length partly measures the effect of the radius
(Appendix E.2 of the paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

__all__ = ["STRATA", "Correlation", "radius_correlation", "terciles"]

STRATA = ("small", "middle", "large")
"""The names of the thirds that :func:`terciles` returns."""

_FEWEST_LENGTHS = 3
_FEWEST_POINTS = 4
# Behind a norm layer all radii can be equal. Relative differences below this are rounding errors.
_STEADY = 1e-6
# A correlation this near to one means that all points lie on a line up to rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient with its interval; all NaN if it is undefined."""

    value: float
    low: float
    high: float


def radius_correlation(n: np.ndarray, radius: np.ndarray, level: float) -> Correlation:
    """Return the correlation of the token norms (radii) and the lengths of sequences.

    The logarithms of both are correlated.

    Parameters
    ----------
    n, radius
        Lengths and radii, each of shape (points,). Radii of zero are left out, since they have no logarithm.
    level
        The confidence of the interval, in (0, 1).

    Returns
    -------
    Correlation
        Pearson's correlation. The interval uses the jackknife of Fisher's arctanh transform, because Fisher's
        own interval assumes normal radii with the same spread at all lengths, and is far off where they are
        not (documentation page "Sequences, exponents, radius and length"). NaN if there are fewer than three
        lengths or four points, or if all radii are equal up to rounding.

    """
    n, radius = n[radius > 0], radius[radius > 0]
    count = len(n)
    if count < _FEWEST_POINTS or len(np.unique(n)) < _FEWEST_LENGTHS or _is_steady(radius):
        return Correlation(math.nan, math.nan, math.nan)
    x = np.log(n.astype(np.float64))
    y = np.log(radius.astype(np.float64))
    x -= x.mean()
    y -= y.mean()
    value = float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
    if 1 - abs(value) < _ROUNDING:
        return Correlation(math.copysign(1.0, value), math.copysign(1.0, value), math.copysign(1.0, value))
    # Sums over all points but one, without recomputing the means: removing a point reduces a centred sum of
    # products by count / (count - 1) times the point's own product.
    share = count / (count - 1)
    squares = (x @ x - share * x**2) * (y @ y - share * y**2)
    products = x @ y - share * x * y
    within = squares > products**2
    # Without one of the points, the others lie on a line or have no spread: nothing is known.
    if not within.all():
        return Correlation(value, -1.0, 1.0)
    without = np.arctanh(products / np.sqrt(squares))
    stderr = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
    half = float(special.stdtrit(count - 2, (1 + level) / 2)) * stderr
    centre = math.atanh(value)
    return Correlation(value, math.tanh(centre - half), math.tanh(centre + half))


def terciles(radius: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide sequences into thirds by radius: small, middle and large.

    Parameters
    ----------
    radius
        Radii of shape (points,).

    Returns
    -------
    tuple of numpy.ndarray
        Three boolean masks of shape (points,). Equal radii are in the same third, so the thirds may differ in
        size. The masks select no point if all radii are equal up to rounding.

    """
    if len(radius) == 0 or _is_steady(radius):
        nothing = np.zeros(len(radius), dtype=bool)
        return nothing, nothing, nothing
    place = np.searchsorted(np.quantile(radius, [1 / 3, 2 / 3]), radius, side="left")
    return place == 0, place == 1, place == 2


def _is_steady(radius: np.ndarray) -> bool:
    return float(radius.max() - radius.min()) <= _STEADY * float(radius.max())
