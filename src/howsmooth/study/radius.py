"""Radius and length: how they go together in a set of sequences, and thirds of nearly equal radius.

Where longer sequences have larger tokens, an exponent in the length holds a part that belongs to
the radius (Appendix E.2 of the paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["STRATA", "Correlation", "radius_correlation", "terciles"]

STRATA = ("small", "middle", "large")
"""Names of the thirds of :func:`terciles`."""

_FEWEST_LENGTHS = 3
_FEWEST_POINTS = 4
# The tokens of one norm layer can have one radius: what is left of its spread is rounding.
_STEADY = 1e-6
# Of a correlation from one: then all points are on a line, to rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient with its interval; all NaN where it has no meaning."""

    value: float
    low: float
    high: float


def radius_correlation(n: np.ndarray, radius: np.ndarray, level: float) -> Correlation:
    """Correlate log radius with log length.

    Parameters
    ----------
    n, radius
        Lengths and radii, each of shape (points,). Radii of zero are left out, having no logarithm.
    level
        Confidence of the interval, in (0, 1).

    Returns
    -------
    Correlation
        Pearson's, with an interval by the jackknife of Fisher's arctanh: the textbook interval of Fisher's
        supposes normal radii of one spread at all lengths, and misses by far where they are not (see
        docs/theory/statistics.md). NaN if there are fewer than three lengths or four points, or if all
        radii are the same to rounding.

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
    # The sums without a point are those with it, less its share.
    share = count / (count - 1)
    squares = (x @ x - share * x**2) * (y @ y - share * y**2)
    products = x @ y - share * x * y
    within = squares > products**2
    if not within.all():  # one point alone decides: without it, there is a line, or no spread at all
        return Correlation(value, -1.0, 1.0)
    without = np.arctanh(products / np.sqrt(squares))
    stderr = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
    half = float(stats.t.ppf((1 + level) / 2, count - 2)) * stderr
    centre = math.atanh(value)
    return Correlation(value, math.tanh(centre - half), math.tanh(centre + half))


def terciles(radius: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split points into thirds by radius: small, middle and large.

    Parameters
    ----------
    radius
        Of shape (points,).

    Returns
    -------
    tuple of numpy.ndarray
        Three masks, boolean (points,). Equal radii fall into one third, so that thirds need not be equally
        large. All empty if all radii are the same to rounding.

    """
    if len(radius) == 0 or _is_steady(radius):
        nothing = np.zeros(len(radius), dtype=bool)
        return nothing, nothing, nothing
    place = np.searchsorted(np.quantile(radius, [1 / 3, 2 / 3]), radius, side="left")
    return place == 0, place == 1, place == 2


def _is_steady(radius: np.ndarray) -> bool:
    return float(radius.max() - radius.min()) <= _STEADY * float(radius.max())
