"""Fit and describe how the local Lipschitz constant of a layer grows with the length of its input.

The values that the published code of the paper computes at the same inputs are kept beside the constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.paper.exponent_text import power
from howsmooth.paper.model_with_texts import ModelWithTexts, measure_constants
from howsmooth.paper.plotting import fit_factor
from howsmooth.study.exponents import LEVEL, QUARTER, Correlation, Exponent, fit_exponent, radius_correlation
from howsmooth.study.records import CORRECTED, PUBLISHED, PublishedValue
from howsmooth.words import decimal, readable

__all__ = ["Growth", "correlation_label", "growths"]

_STEADY = 1.001


@dataclass(frozen=True, eq=False)
class Growth:
    """The measured constants of one layer on one text at several lengths n, and the powers of n that are
    fitted to them.

    ``rows`` is the table of the measurements. ``published`` is a table of the published code's values at the
    same sequences, with the columns ``n``, ``lipschitz`` and ``ratio`` (to the correct constant); the table
    is empty if the values were not asked for. ``entering`` is a table of the norms of the tokens that enter
    the layer, before its norm layer, with the columns ``n`` and ``radius``. It is empty if these tokens could
    not be captured, and None if they were not asked for.
    """

    model: str
    layer: int
    text: str
    rows: pd.DataFrame
    published: pd.DataFrame
    entering: pd.DataFrame | None = None

    @property
    def name(self) -> str:
        """The name of the model and the index of the layer, as text."""
        return f"{readable(self.model)}, layer {self.layer}"

    @property
    def drawn(self) -> pd.DataFrame:
        """The measurements that converged to a positive constant, which can be drawn on logarithmic axes."""
        return self.rows[self.rows["converged"] & (self.rows["lipschitz"] > 0)]

    @cached_property
    def fit(self) -> Exponent:
        """The power law c · n^slope, fitted to the constants that converged."""
        return _fit(self.rows, self.rows["converged"])

    @cached_property
    def published_fit(self) -> Exponent:
        """The power law c · n^slope, fitted to those values of the published code that are not NaN."""
        return _fit(self.published, self.published["lipschitz"].notna())

    @cached_property
    def attended_correlation(self) -> Correlation:
        """The correlation of log n and log R, R the norm of the tokens that attention receives."""
        return radius_correlation(self.rows["n"].to_numpy(), self.rows["radius_mean"].to_numpy())

    @cached_property
    def constant_correlation(self) -> Correlation:
        """The correlation of log R and log L, where L is the constant."""
        rows = self.drawn
        return radius_correlation(rows["lipschitz"].to_numpy(), rows["radius_mean"].to_numpy())

    @cached_property
    def entering_correlation(self) -> Correlation:
        """The correlation of log n and log R, R the norm of entering tokens; NaN without them."""
        rows = pd.DataFrame({"n": [], "radius": []}) if self.entering is None else self.entering
        return radius_correlation(rows["n"].to_numpy(), rows["radius"].to_numpy())

    def columns(self) -> dict[str, Any]:
        """Return a row of the figure's table: values by the names of the columns."""
        fit, radius = self.fit, self.rows["radius_mean"]
        row = {
            "model": self.model,
            "layer": self.layer,
            "text": self.text,
            "exponent": fit.slope,
            "low": fit.low,
            "high": fit.high,
            "p of 1/4": fit.quarter,
            "sequences": fit.n_points,
            "correlation of constant and radius": self.constant_correlation.value,
            "radius from": radius.min(),
            "radius to": radius.max(),
        }
        if len(self.published):
            theirs = self.published_fit
            row |= {
                "published exponent": theirs.slope,
                "published low": theirs.low,
                "published high": theirs.high,
                "published p of 1/4": theirs.quarter,
                "published / corrected": float(self.published["ratio"].median()),
            }
        if self.entering is not None:
            attended, entering = self.attended_correlation, self.entering_correlation
            names = ("correlation, given to attention", "its low", "its high")
            row |= zip(names, (attended.value, attended.low, attended.high), strict=True)
            names = ("correlation, entering the layer", "from", "to")
            row |= zip(names, (entering.value, entering.low, entering.high), strict=True)
        return row

    def result_sentences(self) -> str:
        """Return sentences on the fitted exponent of n, on the norms of the tokens, and on the published
        code's values.
        """
        fit, rows = self.fit, self.drawn
        words = f"{self.name}, on {readable(self.text)}: "
        if fit.note:
            words += f"there is no exponent, {fit.note}."
        else:
            _, around = fit_factor(rows["n"].to_numpy(), rows["lipschitz"].to_numpy(), QUARTER)
            words += (
                f"the constant grows like {power(fit)}, from {fit.n_points} sequences of {fit.n_min} to "
                f"{fit.n_max} tokens; the points scatter by a factor of about {math.exp(fit.spread):.2f} "
                f"around this line, and of {math.exp(around):.2f} around n to the power 1/4."
            )
        attended = _norm_words(self.rows["radius_mean"], self.attended_correlation)
        words += f" The norm of the tokens that attention receives {attended}."
        if self.entering is not None and len(self.entering):
            entering = _norm_words(self.entering["radius"], self.entering_correlation)
            words += f" The norm of the tokens that enter the layer {entering}."
        if fit.left_out:
            words += f" {fit.left_out} measurements are left out, as they did not converge or are zero."
        if len(self.published):
            words += (
                f" As published, the quantity goes like {power(self.published_fit)}, and is in the median "
                f"{self.published['ratio'].median():.3g} times the corrected constant."
            )
        return words


def _fit(rows: pd.DataFrame, usable: pd.Series) -> Exponent:
    values = rows["lipschitz"].to_numpy(np.float64)
    return fit_exponent(rows["n"].to_numpy(), values, usable.to_numpy(dtype=bool))


def _norm_words(radius: pd.Series, found: Correlation) -> str:
    """Say the range of some token norms and their correlation with the length."""
    low, high = float(radius.min()), float(radius.max())
    if high <= _STEADY * low:
        return f"is {radius.mean():.4g} for all, to within 0.1 %, so that it cannot make the constant grow"
    words = f"goes from {low:.3g} to {high:.3g}"
    if math.isnan(found.value):
        return words
    return (
        f"{words}, and the correlation of its logarithm with that of n is {decimal(found.value, 2)} "
        f"({LEVEL * 100:.0f} % interval {decimal(found.low, 2)} to {decimal(found.high, 2)})"
    )


def correlation_label(found: Correlation) -> str:
    """Return a correlation and its interval as a matplotlib label, such as "$r = 0.31$ [0.29, 0.33]"."""
    value, low, high = (decimal(one, 2) for one in (found.value, found.low, found.high))
    return "no correlation" if math.isnan(found.value) else f"$r = {value}$ [{low}, {high}]"


def growths(models: Sequence[ModelWithTexts]) -> list[list[Growth]]:
    """Measure the constants of all models on their texts; with ``as_published``, also compute the published
    code's values. Return one list for each layer, with one :class:`Growth` for each text.
    """
    published = models[0].bench.options.as_published
    measure_constants(models, published=published)
    found = []
    for model in models:
        theirs = model.measured(PublishedValue)
        tables = model.measured(), _beside_corrected(theirs if published else theirs.iloc[:0])
        for layer in model.layers:
            own = [table[table["layer"] == layer] for table in tables]
            found.append(
                [
                    Growth(model.label, layer, text, *(part[part["text"] == text] for part in own))
                    for text in model.texts
                ]
            )
    return found


def _beside_corrected(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the published values, each with its ratio to the correct constant."""
    place = ["layer", "text", "n", "sample"]
    right = rows[rows["quantity"] == CORRECTED].set_index(place)["lipschitz"]
    theirs = rows[rows["quantity"] == PUBLISHED].set_index(place)[["lipschitz"]]
    return theirs.assign(ratio=theirs["lipschitz"] / right).reset_index()
