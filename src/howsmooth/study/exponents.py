"""Exponents: how fast the constant grows with the length, fitted as L = c · n^slope.

Least squares of log L on log n, with a 95 % confidence interval of the slope. In the paper's
protocol the spread of log L depends on n, and short lengths have most leverage, so that the
textbook interval, which supposes one spread, can cover the truth in two cases of three only: with
enough points the interval is a bootstrap over the points, which supposes no such thing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

__all__ = ["EXPONENT_COLUMNS", "GROUP", "LEVEL", "Exponent", "exponents", "fit_exponent"]

GROUP = ("model", "text", "scope", "layer", "head")
"""What is fitted apart."""

LEVEL = 0.95
"""Confidence of the slopes' intervals."""

EXPONENT_COLUMNS = (
    "model", "layer", "head", "scope", "text", "slope", "low", "high", "n_points", "n_min", "n_max",
    "spread", "intercept", "interval", "left_out", "note",
)  # fmt: skip
"""The columns of ``exponents.csv``."""

FEWEST_LENGTHS = 3
# Below these, a bootstrap over the points is too optimistic (coverage was simulated; see the tests).
_BOOTSTRAP_POINTS = 50
_BOOTSTRAP_LENGTHS = 10
_RESAMPLES = 2999
# Residuals below this are rounding: neither interval has a width then.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Exponent:
    """A fitted power law L = exp(intercept) · n^slope.

    Attributes
    ----------
    slope, low, high
        The exponent with its 95 % interval; NaN if it could not be fitted.
    intercept
        log L at n = 1.
    spread
        Standard deviation of the residuals of log L.
    n_points, n_min, n_max
        What was fitted.
    interval
        How it was found: ``"bootstrap"``, ``"t"``, ``"exact"`` (points on a line to rounding), or ``""``
        without a fit.
    left_out
        Unconverged measurements and zeros, which are not fitted.
    note
        Why there is no fit; empty if there is one.

    """

    slope: float
    low: float
    high: float
    intercept: float
    spread: float
    n_points: int
    n_min: int
    n_max: int
    interval: str
    left_out: int
    note: str

    def at(self, n: float) -> float:
        """The fitted constant at a length."""  # noqa: D401
        return math.exp(self.intercept + self.slope * math.log(n))


def fit_exponent(n: np.ndarray, lipschitz: np.ndarray, usable: np.ndarray) -> Exponent:
    """Fit one power law.

    Parameters
    ----------
    n, lipschitz
        Lengths and constants, each of shape (points,).
    usable
        Which points may be fitted (boolean, (points,)): the converged ones. Zeros are left out as well,
        having no logarithm.

    Returns
    -------
    Exponent
        With a note instead of a slope if fewer than three different lengths are left.

    """
    usable = usable & (lipschitz > 0)
    left_out = int(np.count_nonzero(~usable))
    lengths = n[usable]
    if len(np.unique(lengths)) < FEWEST_LENGTHS:
        nothing = len(lengths) == 0
        return Exponent(
            slope=math.nan,
            low=math.nan,
            high=math.nan,
            intercept=math.nan,
            spread=math.nan,
            n_points=len(lengths),
            n_min=0 if nothing else int(lengths.min()),
            n_max=0 if nothing else int(lengths.max()),
            interval="",
            left_out=left_out,
            note=f"fewer than {FEWEST_LENGTHS} lengths to fit",
        )
    x = np.log(lengths.astype(np.float64))
    y = np.log(lipschitz[usable].astype(np.float64))
    fit = stats.linregress(x, y)
    freedom = len(x) - 2
    residuals = y - (fit.intercept + fit.slope * x)
    spread = float(np.sqrt(residuals @ residuals / freedom))
    low, high, interval = _interval(x, y, float(fit.slope), float(fit.stderr), spread)
    return Exponent(
        slope=float(fit.slope),
        low=low,
        high=high,
        intercept=float(fit.intercept),
        spread=spread,
        n_points=len(x),
        n_min=int(lengths.min()),
        n_max=int(lengths.max()),
        interval=interval,
        left_out=left_out,
        note="",
    )


def exponents(measurements: pd.DataFrame) -> pd.DataFrame:
    """Fit every (model, text, scope, layer, head) of a table of measurements.

    Returns
    -------
    pandas.DataFrame
        With :data:`EXPONENT_COLUMNS`, sorted by model, text, scope, layer and head.

    """
    rows = []
    for key, group in measurements.groupby(list(GROUP), dropna=False, sort=True):
        fit = fit_exponent(
            group["n"].to_numpy(), group["lipschitz"].to_numpy(), group["converged"].to_numpy()
        )
        rows.append({**dict(zip(GROUP, key, strict=True)), **fit.__dict__})
    table = pd.DataFrame(rows, columns=list(EXPONENT_COLUMNS))
    return table.astype({"head": "Int64"})


def _interval(
    x: np.ndarray, y: np.ndarray, slope: float, stderr: float, spread: float
) -> tuple[float, float, str]:
    if spread < _ROUNDING:
        return slope, slope, "exact"
    enough = len(x) >= _BOOTSTRAP_POINTS and len(np.unique(x)) >= _BOOTSTRAP_LENGTHS
    if not enough:
        half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 2)) * stderr
        return slope - half, slope + half, "t"
    found = stats.bootstrap(
        (x, y),
        _slopes,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=500,
        confidence_level=LEVEL,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high), "bootstrap"


def _slopes(x: np.ndarray, y: np.ndarray, axis: int = -1) -> Any:
    """Compute least-squares slopes along an axis, all resamples at once."""
    centred = x - x.mean(axis, keepdims=True)
    return (centred * y).sum(axis) / (centred * centred).sum(axis)
