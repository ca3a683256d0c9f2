"""Fit the power law L = c · n^slope, whose exponent says how fast the constant L grows with the length n.

The fit is by least squares of log L on log n. The interval of the slope uses the standard error HC3, which
allows the spread of log L to depend on n. If longer sequences have larger tokens, an exponent in the length
partly measures the effect of the token norm, the radius (Appendix E.2 of the paper). So radius and length are
correlated, and the fit is repeated for the thirds of the sequences with small, middle and large radius. The
documentation page "Sequences, exponents, radius and length" explains the choice of the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import special

from howsmooth.errors import ArgumentError
from howsmooth.study.records import CORRECTED
from howsmooth.words import decimal

__all__ = [
    "EXPONENT_COLUMNS", "GROUP", "LEVEL", "QUARTER", "STRATA", "Correlation", "Exponent", "compare",
    "exponents", "fit_exponent", "fitted_groups", "radius_correlation", "terciles",
]  # fmt: skip

GROUP = ("model", "text", "scope", "layer", "head")
"""The columns whose values define a group of measurements with an exponent of its own."""

LEVEL = 0.95
"""Confidence of the intervals of slopes and correlations."""

QUARTER = 0.25
"""The exponent that the paper reports on text, and against which each fit is tested."""

STRATA = ("small", "middle", "large")
"""The names of the thirds that :func:`terciles` returns."""

FEWEST_LENGTHS = 3
_FEWEST_POINTS = 4
# Behind a norm layer all radii can be equal. Relative differences below this are rounding errors.
_STEADY = 1e-6
# A correlation this near to one means that all points lie on a line up to rounding.
_ROUNDING_OF_CORRELATION = 1e-12
# Smaller residuals are rounding errors, from which no interval can be computed.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Exponent:
    """A power law L = exp(intercept) · n^slope fitted to constants L at lengths n; NaN if there is no fit."""

    slope: float = math.nan  #: The exponent.
    low: float = math.nan  #: The lower end of its 95 % interval.
    high: float = math.nan  #: The upper end.
    #: The p value of the exponent 1/4, which is below 0.05 exactly if the interval does not contain it.
    quarter: float = math.nan
    n_points: int = 0  #: The number of fitted points.
    n_min: int = 0  #: Their smallest length.
    n_max: int = 0  #: Their largest length.
    spread: float = math.nan  #: The standard deviation of the residuals of log L.
    intercept: float = math.nan  #: log L at n = 1.
    interval: str = ""  #: The method, ``HC3``, or ``exact`` if all points lie on the line up to rounding.
    left_out: int = 0  #: The number of points that are not fitted: they did not converge or are zero.
    note: str = ""  #: The reason why there is no fit; empty if there is one.

    def at(self, n: float) -> float:
        """Return the constant that the fitted power law predicts at the length ``n``."""
        return math.exp(self.intercept + self.slope * math.log(n))

    def ends(self) -> str:
        """Format the confidence interval of the exponent as "[low, high]"."""
        return f"[{decimal(self.low, 3)}, {decimal(self.high, 3)}]"


_OF_RADIUS = (
    "radius_correlation", "radius_correlation_low", "radius_correlation_high",
    *(f"{one}_radius_{name}" for one in STRATA for name in ("from", "to", "slope", "low", "high", "points")),
)  # fmt: skip

EXPONENT_COLUMNS = (
    "model", "layer", "head", "scope", "text", *(field.name for field in fields(Exponent)), *_OF_RADIUS,
)  # fmt: skip
"""The columns of ``exponents.csv``.

``radius_correlation`` is the correlation of log radius and log n. Columns such as ``small_radius_slope`` come
from the fit to one third of the points, by radius; ``from`` and ``to`` are the smallest and largest radius in
that third.
"""

_COMPARED = (
    "model", "text", "layer", "quantity", "items", "slope", "low", "high", "quarter", "intercept", "n_points",
    "n_min", "n_max", "note", "ratio",
)  # fmt: skip


def fit_exponent(n: ArrayLike, lipschitz: ArrayLike, usable: ArrayLike = True) -> Exponent:
    """Fit L = c · n^slope to the constants L at lengths n, with a 95 % interval for the slope.

    Parameters
    ----------
    n, lipschitz
        Lengths and constants, each of shape (points,): lists, arrays, or tensors on the CPU.
    usable
        Which points converged and may be fitted, boolean of shape (points,); by default all. Zeros are left
        out as well, because they have no logarithm. If fewer than three different lengths remain, the result
        has a note instead of a slope.

    Raises
    ------
    ArgumentError
        If the shapes differ, or among the points to fit a length is not a number > 0 or a constant is not a
        number >= 0.

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


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
    """Fit a line; return slope, intercept, standard deviation of the residuals, HC3 error of the slope."""
    centred = x - x.mean()
    square = float(centred @ centred)
    slope = float(centred @ y) / square
    intercept = float(y.mean() - slope * x.mean())
    residuals = y - intercept - slope * x
    # HC3 (MacKinnon and White, 1985) divides each residual by 1 - leverage, which gives the distance of the
    # point from the line that is fitted without this point.
    leverage = 1 / len(x) + centred**2 / square
    left_out = residuals / np.maximum(1 - leverage, np.finfo(np.float64).eps)
    spread = math.sqrt(float(residuals @ residuals) / (len(x) - 2))
    return slope, intercept, spread, float(np.linalg.norm(centred * left_out)) / square


def fitted_groups(
    table: pd.DataFrame, by: Sequence[str], usable: str = "converged"
) -> Iterator[tuple[dict[str, Any], pd.DataFrame, Exponent]]:
    """Yield the key and rows of each group of a table, and the exponent fitted to its ``usable`` rows."""
    for key, rows in table.groupby(list(by), dropna=False, sort=True):
        fit = fit_exponent(rows["n"].to_numpy(), rows["lipschitz"].to_numpy(), rows[usable].to_numpy(bool))
        yield dict(zip(by, key, strict=True)), rows, fit


def exponents(measurements: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the exponent of each model, text, scope, layer and head, with :data:`EXPONENT_COLUMNS`."""
    rows = [
        {**names, **asdict(fit), **_by_radius(group[group["converged"] & (group["lipschitz"] > 0)])}
        for names, group, fit in fitted_groups(measurements, GROUP)
    ]
    return pd.DataFrame(rows, columns=list(EXPONENT_COLUMNS)).astype({"head": "Int64"})


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit exponents to the constants of the paper's published code, and to the correct constants.

    There is one row for each model, text, layer and quantity, in the order of measurement. ``ratio`` is the
    median of the quantity divided by the corrected constant. Corrected constants that did not converge are
    left out of the fits, but no published ones, since the published code does not check whether it converged.
    """
    usable = (rows["settled"] | rows["lower"].isna()) & np.isfinite(rows["lipschitz"])
    place = ["model", "text", "layer", "n", "sample"]
    right = rows.loc[rows["quantity"] == CORRECTED, [*place, "lipschitz"]]
    table = rows.assign(usable=usable).merge(right, "left", on=place, suffixes=("", "_right"))
    table["order"] = table.groupby(["quantity", "items"], sort=False).ngroup()
    by = ("model", "text", "layer", "order", "quantity", "items")
    found = [
        {**names, **asdict(fit), "ratio": float((group["lipschitz"] / group["lipschitz_right"]).median())}
        for names, group, fit in fitted_groups(table, by, usable="usable")
    ]
    return pd.DataFrame(found, columns=list(_COMPARED))


# ---- The radius


class Correlation(NamedTuple):
    """A correlation coefficient with its confidence interval; all NaN if it is undefined."""

    value: float
    low: float
    high: float


def _by_radius(rows: pd.DataFrame) -> dict[str, float]:
    n, lipschitz, radius = (rows[name].to_numpy() for name in ("n", "lipschitz", "radius_mean"))
    values: list[float] = [*radius_correlation(n, radius)]
    for inside in terciles(radius):
        fit = fit_exponent(n[inside], lipschitz[inside])
        ends = (radius[inside].min(), radius[inside].max()) if inside.any() else (math.nan, math.nan)
        values += [*map(float, ends), fit.slope, fit.low, fit.high, fit.n_points]
    return dict(zip(_OF_RADIUS, values, strict=True))


def radius_correlation(n: np.ndarray, radius: np.ndarray) -> Correlation:
    """Return Pearson's correlation of log radius with log length over sequences. Lengths ``n`` and radii
    (token norms) have shape (points,); radii of zero are left out, since they have no logarithm.

    The interval, of level :data:`LEVEL`, uses the jackknife of Fisher's arctanh transform, because Fisher's
    own interval assumes normal radii with the same spread at all lengths. All is NaN if there are fewer than
    three lengths or four points, or if all radii are equal up to rounding.
    """
    n, radius = n[radius > 0], radius[radius > 0]
    count = len(n)
    if count < _FEWEST_POINTS or len(np.unique(n)) < FEWEST_LENGTHS or _is_steady(radius):
        return Correlation(math.nan, math.nan, math.nan)
    x = np.log(n.astype(np.float64))
    y = np.log(radius.astype(np.float64))
    x -= x.mean()
    y -= y.mean()
    value = float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
    if 1 - abs(value) < _ROUNDING_OF_CORRELATION:
        exact = math.copysign(1.0, value)
        return Correlation(exact, exact, exact)
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
    half = float(special.stdtrit(count - 2, (1 + LEVEL) / 2)) * stderr
    centre = math.atanh(value)
    return Correlation(value, math.tanh(centre - half), math.tanh(centre + half))


def terciles(radius: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide sequences into thirds by radius (token norm); return three boolean masks of shape (points,).
    Equal radii are in the same third. If all radii are equal up to rounding, the masks select nothing.
    """
    if len(radius) == 0 or _is_steady(radius):
        nothing = np.zeros(len(radius), dtype=bool)
        return nothing, nothing, nothing
    place = np.searchsorted(np.quantile(radius, [1 / 3, 2 / 3]), radius, side="left")
    return place == 0, place == 1, place == 2


def _is_steady(radius: np.ndarray) -> bool:
    return float(radius.max() - radius.min()) <= _STEADY * float(radius.max())
