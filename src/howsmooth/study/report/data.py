"""The numbers that the script of the page reads: inert JSON, harmless wherever it stands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from howsmooth.study.exponents import GROUP, LEVEL, fit_exponent
from howsmooth.study.report.wording import plain

__all__ = ["MEASURED", "MOST_POINTS", "embedded", "rounded", "scatter"]

MEASURED = "measured"
"""The quantity of the store's own measurements."""

MOST_POINTS = 50_000
"""More would make the page slow on a phone."""

_DIGITS = 7
_AXES = ("quantity", *GROUP)
_FIT = ("slope", "low", "high", "quarter", "intercept", "n_min", "n_max", "note")
# What could end the element, or start another, or a line of the script.
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def embedded(value: object) -> Markup:
    """Write a value as JSON that can stand inside an element of HTML, whatever it holds.

    Raises
    ------
    ValueError
        If it holds a number that JSON has not (NaN, infinite).

    """
    written = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(written.translate(_ESCAPES))


def rounded(values: Iterable[Any], digits: int = _DIGITS) -> list[float | None]:
    """Shorten numbers; what is no finite number becomes None."""
    return [
        None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
        for value in values
    ]


def scatter(measurements: pd.DataFrame, exponents: pd.DataFrame, published: pd.DataFrame) -> dict[str, Any]:
    """Put together what the scatter plot shows.

    Parameters
    ----------
    measurements
        Of the store.
    exponents
        Fitted from them.
    published
        Rows with a quantity of their own, or none.

    Returns
    -------
    dict
        ``names`` of models, texts, scopes and quantities; ``groups``, one entry for each thing that is fitted
        apart, with the fit; ``points`` by column; ``total``, the number of points that there are;
        ``level``, that of the fits' intervals.

    """
    rows = _measured(measurements)
    if len(published):
        rows = pd.concat([rows, _published(published)], ignore_index=True)
    keys = rows[list(_AXES)].astype({"head": "Int64"})
    numbered = keys.groupby(list(_AXES), sort=False, dropna=False).ngroup()
    first = keys[~numbered.duplicated()]
    names = {axis: list(dict.fromkeys(first[axis])) for axis in ("model", "text", "scope", "quantity")}
    fits: dict[tuple[Any, ...], Mapping[Any, Any]] = {
        tuple(None if pd.isna(part) else part for part in key): row
        for key, row in zip(
            exponents[list(GROUP)].itertuples(index=False, name=None),
            exponents[list(_FIT)].to_dict("records"),
            strict=True,
        )
    }
    groups = []
    for number, key in enumerate(first.itertuples(index=False, name=None)):
        quantity, *place = (None if pd.isna(part) else part for part in key)
        fit = fits.get(tuple(place)) if quantity == MEASURED else None
        if fit is None:
            mine = rows[numbered == number]
            found = fit_exponent(
                mine["n"].to_numpy(), mine["lipschitz"].to_numpy(), mine["usable"].to_numpy(dtype=bool)
            )
            fit = {name: getattr(found, name) for name in _FIT}
        groups.append(_group(names, quantity, place, fit))
    step = max(1, math.ceil(len(rows) / MOST_POINTS))
    kept, numbered = rows.iloc[::step], numbered.iloc[::step]
    return {
        "names": {axis: [plain(name) for name in found] for axis, found in names.items()},
        "groups": groups,
        "points": {
            "group": numbered.tolist(),
            "n": kept["n"].tolist(),
            "sample": kept["sample"].tolist(),
            "radius": rounded(kept["radius_mean"]),
            "value": rounded(kept["lipschitz"]),
            "lower": rounded(kept["lower"]),
            "upper": rounded(kept["upper"]),
            "converged": [int(done) for done in kept["converged"]],
        },
        "total": len(rows),
        "level": f"{LEVEL * 100:.0f} %",
    }


def _group(
    names: dict[str, list[Any]], quantity: Any, place: list[Any], fit: Mapping[Any, Any]
) -> dict[str, Any]:
    model, text, scope, layer, head = place
    group = {
        "model": names["model"].index(model),
        "text": names["text"].index(text),
        "scope": names["scope"].index(scope),
        "quantity": names["quantity"].index(quantity),
        "layer": int(layer),
        "head": None if head is None else int(head),
    }
    if fit["note"]:
        return {**group, "fit": None, "note": fit["note"]}
    numbers = dict(zip(_FIT[:-1], rounded(fit[name] for name in _FIT[:-1]), strict=True))
    return {**group, "fit": numbers, "note": ""}


_COLUMNS = ("n", "sample", "radius_mean", "lipschitz", "lower", "upper", "converged")


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    table = rows[[*GROUP, *_COLUMNS]].assign(quantity=MEASURED)
    return table.assign(usable=table["converged"])


def _published(rows: pd.DataFrame) -> pd.DataFrame:
    """Make points of published rows; the constant of the published iteration has no interval."""
    table = rows.assign(scope="attention", head=None, converged=rows["settled"])
    table = table.assign(usable=(rows["settled"] | rows["lower"].isna()) & np.isfinite(rows["lipschitz"]))
    return table[[*GROUP, *_COLUMNS, "quantity", "usable"]]
