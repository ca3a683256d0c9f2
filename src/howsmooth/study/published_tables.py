"""Exponents of the published and the corrected quantities, side by side, and their figures.

Nothing here measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.exponents import fit_exponent
from howsmooth.study.figures import PublishedPicture, draw_published
from howsmooth.study.files import write_table
from howsmooth.study.published_rows import CORRECTED, FILE, PUBLISHED_COLUMNS

__all__ = ["EXPONENTS_FILE", "PublishedComparison", "compare", "write_comparison"]

EXPONENTS_FILE = "published-exponents.csv"
_FIT = ("slope", "low", "high", "quarter", "intercept", "n_points", "n_min", "n_max", "note")
_COLUMNS = ("model", "text", "layer", "quantity", "items", *_FIT, "ratio")


@dataclass(frozen=True)
class PublishedComparison:
    """What was written, and what it was written from.

    Attributes
    ----------
    rows
        The published values, in the columns of ``published.csv``.
    exponents
        As :func:`compare`.
    pictures
        The figures.
    rows_file, exponents_file
        The tables.

    """

    rows: pd.DataFrame
    exponents: pd.DataFrame
    pictures: list[PublishedPicture]
    rows_file: Path
    exponents_file: Path


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit the exponent of every quantity of every layer.

    Returns
    -------
    pandas.DataFrame
        By model, text and layer, the quantities in the order in which they were measured; ``ratio`` is the
        median over the sequences of the quantity divided by the corrected one. Corrected constants that did
        not converge are not fitted; values of the published iteration are, settled or not, as published.

    """
    table = []
    for (model, text, layer), family in rows.groupby(["model", "text", "layer"], sort=True):
        right = family[family["quantity"] == CORRECTED].set_index(["n", "sample"])["lipschitz"]
        for (quantity, items), group in family.groupby(["quantity", "items"], sort=False):
            usable = (group["settled"] | group["lower"].isna()) & np.isfinite(group["lipschitz"])
            fit = fit_exponent(group["n"].to_numpy(), group["lipschitz"].to_numpy(), usable.to_numpy())
            ratio = group.set_index(["n", "sample"])["lipschitz"] / right
            table.append(
                {
                    "model": model,
                    "text": text,
                    "layer": layer,
                    "quantity": quantity,
                    "items": items,
                    **{name: getattr(fit, name) for name in _FIT},
                    "ratio": float(ratio.median()),
                }
            )
    return pd.DataFrame(table, columns=list(_COLUMNS))


def write_comparison(rows: pd.DataFrame, folder: Path) -> PublishedComparison:
    """Write ``published.csv``, ``published-exponents.csv`` and their figures beside a store.

    Parameters
    ----------
    rows
        The published values of the store.
    folder
        That holds it.

    Raises
    ------
    StoreError
        If a file cannot be written.

    """
    rows = rows[list(PUBLISHED_COLUMNS)]
    exponents = compare(rows)
    file = write_table(rows, folder, FILE)
    fits = write_table(exponents, folder, EXPONENTS_FILE)
    try:
        pictures = draw_published(rows, exponents, folder / "figures")
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The rows are kept in {folder}."
        ) from error
    return PublishedComparison(rows, exponents, pictures, file, fits)
