"""The constant of one layer on one text against the length, and what the published code gives beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.paper.setting import Setting, Studied
from howsmooth.paper.words import number, power
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.names import readable
from howsmooth.study.published_rows import CORRECTED, PUBLISHED

__all__ = ["Growth", "growths", "is_steady"]

_STEADY = 1.001


@dataclass(frozen=True, eq=False)
class Growth:
    """A layer of a model on a text.

    Attributes
    ----------
    model, layer, text
        What it is.
    rows
        Its measurements.
    published
        What the published code computes at the same sequences, with columns ``n``, ``lipschitz`` and
        ``ratio`` (to the corrected constant); empty if it was not asked for.

    """

    model: str
    layer: int
    text: str
    rows: pd.DataFrame
    published: pd.DataFrame

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{readable(self.model)}, layer {self.layer}"

    @property
    def drawn(self) -> pd.DataFrame:
        """The rows that have a place on log axes and an interval as narrow as asked."""
        return self.rows[self.rows["converged"] & (self.rows["lipschitz"] > 0)]

    @cached_property
    def fit(self) -> Exponent:
        """The power of n fitted to the measurements that converged."""
        rows = self.rows
        converged = rows["converged"].to_numpy(dtype=bool)
        return fit_exponent(rows["n"].to_numpy(), rows["lipschitz"].to_numpy(), converged)

    @cached_property
    def published_fit(self) -> Exponent:
        """The power of n fitted to the published values, where they are numbers."""
        values = self.published["lipschitz"].to_numpy(np.float64)
        return fit_exponent(self.published["n"].to_numpy(), values, np.isfinite(values))

    def published_words(self) -> str:
        """Say what the published quantity does; nothing if it was not asked for."""
        if self.published.empty:
            return ""
        return (
            f" As published, the quantity goes like {power(self.published_fit)}, and is in the median "
            f"{number(float(self.published['ratio'].median()))} times the corrected constant."
        )

    def columns(self) -> dict[str, Any]:
        """Give what a table says of it."""
        fit = self.fit
        row = {
            "model": self.model, "layer": self.layer, "text": self.text, "exponent": fit.slope,
            "low": fit.low, "high": fit.high, "p of 1/4": fit.quarter, "sequences": fit.n_points,
        }  # fmt: skip
        if len(self.published):
            theirs = self.published_fit
            row |= {
                "published exponent": theirs.slope, "published low": theirs.low,
                "published high": theirs.high, "published p of 1/4": theirs.quarter,
                "published / corrected": float(self.published["ratio"].median()),
            }  # fmt: skip
        return row


def growths(here: Setting, studied: Studied) -> list[Growth]:
    """Divide what was measured by layer, and by text within it."""
    found = []
    for layer in here.subjects[0].layers:
        for subject in here.subjects:
            rows, published = (
                table[(table["layer"] == layer) & (table["text"] == subject.text.name)]
                for table in (studied.rows, studied.published)
            )
            found.append(
                Growth(subject.model.label, layer, subject.text.name, rows, _beside_corrected(published))
            )
    return found


def _beside_corrected(rows: pd.DataFrame) -> pd.DataFrame:
    """Put the published values of one layer and text beside the corrected ones of the same sequences."""
    right = rows[rows["quantity"] == CORRECTED].set_index(["n", "sample"])["lipschitz"]
    theirs = rows[rows["quantity"] == PUBLISHED].set_index(["n", "sample"])[["lipschitz"]]
    return theirs.assign(ratio=theirs["lipschitz"] / right).reset_index()


def is_steady(radius: np.ndarray) -> bool:
    """Whether radii are the same to within 0.1 %."""
    return bool(radius.max() <= _STEADY * radius.min())
