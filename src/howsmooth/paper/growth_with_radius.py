"""Fit and describe how the constant of a head grows with the radius R of its tokens."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from howsmooth.paper.exponent_text import between, exp
from howsmooth.study.exponents import fit_exponent
from howsmooth.words import decimal, readable

__all__ = ["FAR", "IDENTITY", "exponent_range", "exponents_in_radius", "heads_words", "identity_words"]

IDENTITY = "A = V = I"
"""The name of the first panel's model, which is one head in four dimensions."""

FAR = 300.0
"""The smallest ‖A‖R² in the fits of the growth."""


def exponents_in_radius(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit a power of R to the constants of each head and length, where ‖A‖R² is at least :data:`FAR`, without
    the norm of real tokens (column ``real``).
    """
    names = ["model", "layer", "head", "n"]
    found = []
    for key, part in rows[~rows["real"].astype(bool)].groupby(names, sort=False):
        far = part[part["strength"] >= FAR]
        radius, value = (far[name].to_numpy(np.float64) for name in ("radius", "value"))
        fit = fit_exponent(radius, value, far["converged"].to_numpy(bool))
        ends = {"exponent": fit.slope, "low": fit.low, "high": fit.high, "points": fit.n_points}
        found.append(dict(zip(names, key, strict=True)) | ends)
    return pd.DataFrame(found)


def exponent_range(fits: pd.DataFrame, form: str = "{}") -> str:
    """Return the range of the fitted exponents as text, empty without any."""
    ends = [] if fits.empty else [decimal(fits["exponent"].min(), 2), decimal(fits["exponent"].max(), 2)]
    return " to ".join(form.format(end) for end in dict.fromkeys(ends))


def identity_words(rows: pd.DataFrame, fits: pd.DataFrame) -> str:
    """Return sentences on the head with A = V = I, given its rows and fits."""
    ends = [
        (*(decimal(fit[name], 3) for name in ("exponent", "low", "high")), fit["n"])
        for _, fit in fits.iterrows()
    ]
    exponents = ", ".join(f"{slope} at n = {n} ({low} to {high})" for slope, low, high, n in ends)
    good = rows[rows["converged"].astype(bool) & (rows["strength"] >= FAR)]
    if good.empty:
        return f"{IDENTITY}, four dimensions: no measurement converged where ‖A‖R² is at least {FAR:g}."
    off = float((good["value"] / good["formula"] - 1).abs().max())
    last = good[good["n"] == good["n"].max()].sort_values("radius").iloc[-1]
    sharp, theirs = (math.exp(last[name] - math.log(last["value"])) for name in ("log_sharp", "log_paper"))
    return (
        f"{IDENTITY}, four dimensions: where ‖A‖R² is at least {FAR:g} the measured constant grows like R to "
        f"the power {exponents}, with 95 % intervals, and differs from 1/n + γR²m/n, m the number of tokens "
        f"±Ru, by a share of at most {off:.1g}. At R = {last['radius']:.3g} and n = {last['n']} it is "
        f"{last['value']:.4g}; howsmooth's bound on the ball is {sharp:.3g} times as large, Theorem 3.3 "
        f"{theirs:.3g} times, and the bound for every n is exp({last['log_free']:.4g})."
    )


def heads_words(rows: pd.DataFrame, fits: pd.DataFrame) -> str:
    """Return sentences on the heads of a layer of a model, given their rows and fits."""
    name, layer, n = readable(str(rows["model"].iloc[0])), rows["layer"].iloc[0], rows["n"].iloc[0]
    words = (
        f"{name}, layer {layer}: at n = {n} the exponent in R is "
        f"{exponent_range(fits) or 'without a fit'} over its {rows['head'].nunique()} heads, "
        f"where ‖A‖R² is at least {FAR:g}."
    )
    if len(fits):
        words += f" The widest of the 95 % intervals is ± {(fits['high'] - fits['low']).max() / 2:.2g}."
    converged = rows["converged"].astype(bool)
    real = rows[rows["real"].astype(bool) & converged]
    if len(real):
        words += (
            f" At the norm of real tokens, R = {real['radius'].iloc[0]:.4g}, ‖A‖R² is "
            f"{between(real['strength'])}, and the balanced tokens give constants from "
            f"{between(real['value'])}; howsmooth's bound on the ball is "
            f"{between(exp(real['log_sharp']) / real['value'])} times as large."
        )
    hollow = int((~converged).sum())
    return words + (f" {hollow} measurements did not converge and are not fitted." if hollow else "")
