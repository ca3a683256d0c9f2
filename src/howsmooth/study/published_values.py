"""Name the values of the paper's published code that are measured, and fit their exponents.

Each value stands beside the corrected constant of the same sequence: the local constant ‖D_X f‖, measured
without any of the published code's differences (items). Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from howsmooth.study.exponents import fit_exponent

__all__ = ["CORRECTED", "PUBLISHED", "compare", "quantities"]

CORRECTED, PUBLISHED = "corrected", "as published"

_FIT = ("slope", "low", "high", "quarter", "intercept", "n_points", "n_min", "n_max", "note")
_COLUMNS = ("model", "text", "layer", "quantity", "items", *_FIT, "ratio")


def quantities(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name the quantities to measure for some of the published code's differences (items).

    Returns
    -------
    dict
        Each quantity's name with its items: the corrected constant (no item), each item alone, and all items
        together.

    """
    single = {f"only {item}": (item,) for item in items} if len(items) > 1 else {}
    return {CORRECTED: (), **single, PUBLISHED: tuple(items)}


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit powers of n to the published code's values, and compare them with the corrected constants.

    The corrected constants are measured without the published code's differences.

    Returns
    -------
    pandas.DataFrame
        One row for each model, text, layer and quantity, the quantities in the order in which they were
        measured. ``ratio`` is the median over the sequences of the quantity divided by the corrected
        constant. Corrected constants that did not converge are left out of the fits. Values of the published
        iteration are never left out, since the published code does not check whether it converged.

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
