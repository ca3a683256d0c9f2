"""Fit how the constant of a layer grows with the length of its input, for Figure 1 and Appendix E.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.paper.model_with_texts import ModelWithTexts, measure_constants
from howsmooth.paper.plotting import between, power
from howsmooth.study.exponents import Correlation, Exponent, fit_exponent, radius_correlation
from howsmooth.study.records import CORRECTED, PUBLISHED, PublishedValue
from howsmooth.words import readable

__all__ = ["LengthGrowth", "growths"]


@dataclass(frozen=True, eq=False)
class LengthGrowth:
    """The measured constants of one layer on one text (``rows``), and the power laws fitted to them.

    ``published`` has the published code's values at the same sequences, with the columns ``n``, ``lipschitz``
    and ``ratio`` (to the correct constant); it is empty if they were not asked for. ``entering`` has the
    norms (``n``, ``radius``) of the tokens that enter the layer, before its norm layer; it is empty if they
    could not be captured, and None if they were not asked for.
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
        """The measurements that converged to a positive constant, which has a logarithm."""
        return self.rows[self.rows["converged"] & (self.rows["lipschitz"] > 0)]

    @cached_property
    def fit(self) -> Exponent:
        """The power law c · n^slope, fitted to the constants that converged."""
        return _fit(self.rows, self.rows["converged"])

    @cached_property
    def published_fit(self) -> Exponent:
        """The power law c · n^slope, fitted to the values of the published code."""
        return _fit(self.published, self.published["lipschitz"].notna())

    @property
    def constant_correlation(self) -> Correlation:
        """The correlation of the logarithm of the constant with the logarithm of the token norm R."""
        return _correlation(self.drawn, "lipschitz", "radius_mean")

    @property
    def entering_correlation(self) -> Correlation:
        """The correlation of log n with the log norm of the tokens that enter the layer; NaN if unknown."""
        rows = pd.DataFrame({"n": [], "radius": []}) if self.entering is None else self.entering
        return _correlation(rows, "n", "radius")

    def columns(self) -> dict[str, Any]:
        """Return the row of the figure's table for this layer and text."""
        row = {
            "model": self.model,
            "layer": self.layer,
            "text": self.text,
            **_exponent("", self.fit),
            "sequences": self.fit.n_points,
            "correlation of constant and radius": self.constant_correlation.value,
            "radius from": self.rows["radius_mean"].min(),
            "radius to": self.rows["radius_mean"].max(),
        }
        if len(self.published):
            row |= _exponent("published ", self.published_fit)
            row["published / corrected"] = float(self.published["ratio"].median())
        if self.entering is not None:
            names = ("correlation, given to attention", "its low", "its high")
            row |= zip(names, _correlation(self.rows, "n", "radius_mean"), strict=True)
            names = ("correlation, entering the layer", "from", "to")
            row |= zip(names, self.entering_correlation, strict=True)
        return row

    def result_sentences(self) -> str:
        """Return sentences on the exponent of n, the norms of the tokens, and the published values."""
        fit = self.fit
        words = (
            f"{self.name}, on {readable(self.text)}: the constant grows like {power(fit)}, from "
            f"{fit.n_points} sequences of {fit.n_min} to {fit.n_max} tokens; the norm of the tokens that "
            f"attention receives is {between(self.rows['radius_mean'])}"
        )
        if self.entering is not None and len(self.entering):
            words += f", of those that enter the layer {between(self.entering['radius'])}"
        if fit.left_out:
            words += f". {fit.left_out} measurements are left out, as they did not converge or are zero"
        if len(self.published):
            words += (
                f". As published, the quantity goes like {power(self.published_fit)}, and is in the median "
                f"{self.published['ratio'].median():.3g} times the corrected constant"
            )
        return f"{words}."


def _fit(rows: pd.DataFrame, usable: pd.Series) -> Exponent:
    values = rows["lipschitz"].to_numpy(np.float64)
    return fit_exponent(rows["n"].to_numpy(), values, usable.to_numpy(dtype=bool))


def _correlation(rows: pd.DataFrame, one: str, radius: str) -> Correlation:
    return radius_correlation(rows[one].to_numpy(), rows[radius].to_numpy())


def _exponent(of: str, fit: Exponent) -> dict[str, float]:
    ends = {"exponent": fit.slope, "low": fit.low, "high": fit.high, "p of 1/4": fit.quarter}
    return {of + name: value for name, value in ends.items()}


def growths(models: Sequence[ModelWithTexts]) -> list[list[LengthGrowth]]:
    """Measure the constants of all models on their texts and, if asked for, the published code's values.

    There is one list for each layer, with one :class:`LengthGrowth` for each text.
    """
    published = models[0].bench.options.as_published
    measure_constants(models, published=published)
    found = []
    for model in models:
        theirs = model.measured(PublishedValue)
        tables = model.measured(), _beside_corrected(theirs if published else theirs.iloc[:0])
        for layer in model.layers:
            own = [table[table["layer"] == layer] for table in tables]
            split = ([part[part["text"] == text] for part in own] for text in model.texts)
            both = zip(model.texts, split, strict=True)
            found.append([LengthGrowth(model.label, layer, text, *parts) for text, parts in both])
    return found


def _beside_corrected(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the published code's values, each with its ratio to the correct constant."""
    place = ["layer", "text", "n", "sample"]
    right = rows[rows["quantity"] == CORRECTED].set_index(place)["lipschitz"]
    theirs = rows[rows["quantity"] == PUBLISHED].set_index(place)[["lipschitz"]]
    return theirs.assign(ratio=theirs["lipschitz"] / right).reset_index()
