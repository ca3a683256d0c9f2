"""Fit exponents: how fast the constant L grows with the length n, in the power law L = c · n^slope.

The fit is by least squares of log L on log n. The interval of the slope is HC3's, which allows the spread of
log L to depend on n: on text, short sequences spread more and have the most leverage. The module also tests
slope = 1/4, and repeats the fit for the thirds of the sequences with small, middle and large radius. The
documentation page "Sequences, exponents, radius and length" explains the choice of the interval.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import special

from howsmooth.errors import ArgumentError
from howsmooth.study.radius_statistics import STRATA, radius_correlation, terciles
from howsmooth.study.text_formatting import decimal

__all__ = ["EXPONENT_COLUMNS", "GROUP", "LEVEL", "QUARTER", "Exponent", "exponents", "fit_exponent"]

GROUP = ("model", "text", "scope", "layer", "head")
"""The columns whose values define a group of measurements with an exponent of its own."""

LEVEL = 0.95
"""Confidence of the intervals of slopes and correlations."""

QUARTER = 0.25
"""The exponent that the paper reports on text, and against which each fit is tested."""

FEWEST_LENGTHS = 3
# Smaller residuals are rounding errors, from which no interval can be computed.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Exponent:
    """The power law L = exp(intercept) · n^slope fitted to constants L at lengths n.

    Attributes
    ----------
    slope, low, high
        The exponent with its 95 % interval; NaN if it could not be fitted.
    quarter
        The p value of the hypothesis that the exponent is 1/4. It is below 0.05 exactly if the interval does
        not contain 1/4. NaN without a fit.
    n_points, n_min, n_max
        The number of fitted points, and their smallest and largest length.
    spread
        The standard deviation of the residuals of log L.
    intercept
        log L at n = 1.
    interval
        The method of the interval: ``"HC3"``, ``"exact"`` if all points lie on the line up to rounding, or
        ``""`` without a fit.
    left_out
        The number of points that are not fitted, because they did not converge or are zero.
    note
        The reason why there is no fit; empty if there is one.

    """

    slope: float = math.nan
    low: float = math.nan
    high: float = math.nan
    quarter: float = math.nan
    n_points: int = 0
    n_min: int = 0
    n_max: int = 0
    spread: float = math.nan
    intercept: float = math.nan
    interval: str = ""
    left_out: int = 0
    note: str = ""

    def at(self, n: float) -> float:
        """Return the fitted constant at a length."""
        return math.exp(self.intercept + self.slope * math.log(n))

    def ends(self) -> str:
        """Format the interval of the exponent as "[low, high]"."""
        return f"[{decimal(self.low, 3)}, {decimal(self.high, 3)}]"


EXPONENT_COLUMNS = (
    "model", "layer", "head", "scope", "text", *(field.name for field in fields(Exponent)),
    "radius_correlation", "radius_correlation_low", "radius_correlation_high",
    *(
        f"{stratum}_radius_{name}"
        for stratum in STRATA
        for name in ("from", "to", "slope", "low", "high", "points")
    ),
)  # fmt: skip
"""The columns of ``exponents.csv``.

``radius_correlation`` is the correlation of log radius and log n. Columns such as ``small_radius_slope`` come
from the fit to one third of the points, by radius; ``from`` and ``to`` are the smallest and largest radius in
that third.
"""


def fit_exponent(n: ArrayLike, lipschitz: ArrayLike, usable: ArrayLike = True) -> Exponent:
    """Fit L = c · n^slope to the constants L at lengths n, with a 95 % interval for the slope.

    Parameters
    ----------
    n, lipschitz
        Lengths and constants, each of shape (points,): lists, arrays, or tensors on the CPU.
    usable
        Which points converged and may be fitted, boolean of shape (points,); by default all. Zeros are left
        out as well, because they have no logarithm.

    Returns
    -------
    Exponent
        The fit. If fewer than three different lengths remain, it has a note instead of a slope.

    Raises
    ------
    ArgumentError
        If the shapes differ, or what may be fitted is no number > 0 (a constant may be 0).

    """
    n, lipschitz, usable = _checked(n, lipschitz, usable)
    usable = usable & (lipschitz > 0)
    lengths = n[usable]
    fitted: dict[str, Any] = {
        "n_points": len(lengths),
        "n_min": int(min(lengths, default=0)),
        "n_max": int(max(lengths, default=0)),
        "left_out": int(np.count_nonzero(~usable)),
    }
    if len(np.unique(lengths)) < FEWEST_LENGTHS:
        return Exponent(**fitted, note=f"fewer than {FEWEST_LENGTHS} lengths to fit")
    x = np.log(lengths)
    slope, intercept, spread, stderr = _line(x, np.log(lipschitz[usable]))
    freedom = len(x) - 2
    # Points on a line up to rounding have no spread from which an error could be estimated.
    exact = spread < _ROUNDING
    half = _ROUNDING if exact else float(special.stdtrit(freedom, (1 + LEVEL) / 2)) * stderr
    distance = abs(slope - QUARTER)
    return Exponent(
        slope=slope,
        low=slope - half,
        high=slope + half,
        quarter=float(distance <= half) if exact else float(2 * special.stdtr(freedom, -distance / stderr)),
        spread=spread,
        intercept=intercept,
        interval="exact" if exact else "HC3",
        **fitted,
    )


def _checked(
    n: ArrayLike, lipschitz: ArrayLike, usable: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of :func:`fit_exponent` as arrays of one shape (points,)."""
    try:
        lengths, values = np.asarray(n, dtype=np.float64), np.asarray(lipschitz, dtype=np.float64)
        chosen = np.broadcast_to(np.asarray(usable, dtype=bool), lengths.shape)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "n, lipschitz, usable", expected="lists of numbers of one length", got=str(error)[:100]
        ) from error
    if lengths.ndim != 1 or lengths.shape != values.shape:
        got = f"shapes {lengths.shape} and {values.shape}"
        raise ArgumentError("n, lipschitz", expected="lists of numbers of one length", got=got)
    for name, given, least in (("n", lengths, lengths > 0), ("lipschitz", values, values >= 0)):
        wrong = given[chosen & ~(least & np.isfinite(given))]
        if wrong.size:
            raise ArgumentError(name, expected="finite positive numbers", got=f"{wrong[0]:g}")
    return lengths, values, chosen


def exponents(measurements: pd.DataFrame) -> pd.DataFrame:
    """Fit how fast the constant grows with the length, separately for each layer or head measured.

    There is one fit for each combination of model, text, scope, layer and head.

    Returns
    -------
    pandas.DataFrame
        A table with :data:`EXPONENT_COLUMNS`, sorted by model, text, scope, layer and head.

    """
    rows = []
    for key, group in measurements.groupby(list(GROUP), dropna=False, sort=True):
        n, lipschitz, converged, radius = (
            group[name].to_numpy() for name in ("n", "lipschitz", "converged", "radius_mean")
        )
        fit = fit_exponent(n, lipschitz, converged)
        rows.append(
            {
                **dict(zip(GROUP, key, strict=True)),
                **asdict(fit),
                **_by_radius(n, lipschitz, radius, converged & (lipschitz > 0)),
            }
        )
    table = pd.DataFrame(rows, columns=list(EXPONENT_COLUMNS))
    return table.astype({"head": "Int64"})


def _by_radius(
    n: np.ndarray, lipschitz: np.ndarray, radius: np.ndarray, fitted: np.ndarray
) -> dict[str, float]:
    """Check whether longer sequences have larger token norms, and fit the exponent at similar norms.

    The radius of a sequence is the norm of its tokens. Return its correlation with the length, and the
    exponents fitted to each third of the sequences, divided by radius.
    """
    n, lipschitz, radius = n[fitted], lipschitz[fitted], radius[fitted]
    found = radius_correlation(n, radius, LEVEL)
    columns: dict[str, float] = {
        "radius_correlation": found.value,
        "radius_correlation_low": found.low,
        "radius_correlation_high": found.high,
    }
    for stratum, inside in zip(STRATA, terciles(radius), strict=True):
        fit = fit_exponent(n[inside], lipschitz[inside], np.ones(int(inside.sum()), dtype=bool))
        ends = (radius[inside].min(), radius[inside].max()) if inside.any() else (math.nan, math.nan)
        columns |= {
            f"{stratum}_radius_from": float(ends[0]),
            f"{stratum}_radius_to": float(ends[1]),
            f"{stratum}_radius_slope": fit.slope,
            f"{stratum}_radius_low": fit.low,
            f"{stratum}_radius_high": fit.high,
            f"{stratum}_radius_points": fit.n_points,
        }
    return columns


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
    """Fit a line by least squares; return slope, intercept, spread and the slope's standard error.

    The standard error is HC3 (MacKinnon and White, 1985).
    """
    centred = x - x.mean()
    square = float(centred @ centred)
    slope = float(centred @ y) / square
    intercept = float(y.mean() - slope * x.mean())
    residuals = y - intercept - slope * x
    # HC3 divides each residual by 1 - leverage. The result is the distance of the point from the line that
    # is fitted without this point.
    leverage = 1 / len(x) + centred**2 / square
    left_out = residuals / np.maximum(1 - leverage, np.finfo(np.float64).eps)
    spread = math.sqrt(float(residuals @ residuals) / (len(x) - 2))
    return slope, intercept, spread, float(np.linalg.norm(centred * left_out)) / square
