"""What several experiments read off their rows alike: exponents, published values, steady radii."""

from __future__ import annotations

import numpy as np
import pandas as pd

from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.published_rows import CORRECTED, PUBLISHED

__all__ = ["beside_corrected", "fit_measured", "fit_published", "is_steady"]

_STEADY = 1.001


def fit_measured(rows: pd.DataFrame) -> Exponent:
    """Fit the power of n to the measurements that converged."""
    return fit_exponent(
        rows["n"].to_numpy(), rows["lipschitz"].to_numpy(), rows["converged"].to_numpy(dtype=bool)
    )


def beside_corrected(rows: pd.DataFrame) -> pd.DataFrame:
    """Put the published values beside the corrected ones of the same sequences.

    Parameters
    ----------
    rows
        Of one model, layer and text, as :func:`howsmooth.study.published_rows.read_rows` reads them.

    Returns
    -------
    DataFrame
        With columns ``n``, ``sample``, ``lipschitz`` (as published) and ``ratio`` (to the corrected).

    """
    right = rows[rows["quantity"] == CORRECTED].set_index(["n", "sample"])["lipschitz"]
    theirs = rows[rows["quantity"] == PUBLISHED].set_index(["n", "sample"])[["lipschitz"]]
    return theirs.assign(ratio=theirs["lipschitz"] / right).reset_index()


def fit_published(beside: pd.DataFrame) -> Exponent:
    """Fit the power of n to the published values of :func:`beside_corrected`, where they are numbers."""
    values = beside["lipschitz"].to_numpy(np.float64)
    return fit_exponent(beside["n"].to_numpy(), values, np.isfinite(values))


def is_steady(radius: np.ndarray) -> bool:
    """Whether radii are the same to within 0.1 %."""
    return bool(radius.max() <= _STEADY * radius.min())
