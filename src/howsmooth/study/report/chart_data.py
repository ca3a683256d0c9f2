"""Prepare the numbers that the script of the report reads, as JSON that is safe inside HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from howsmooth.results.page import plain
from howsmooth.rounding import limit_in_digits
from howsmooth.study.exponents import GROUP
from howsmooth.study.records import PLACE, plain_rows
from howsmooth.study.report.tables import CONFIDENCE, chance, slope
from howsmooth.words import place_in_words, visible_token

__all__ = [
    "MOST_ENERGIES",
    "MOST_POINTS",
    "bounds_data",
    "scatter_data",
    "script_json",
    "sensitivity_data",
]

MOST_POINTS = 50_000
"""The largest number of points in the scatter plot; more would make the page slow on a phone."""

MOST_ENERGIES = 200_000
"""The largest number of token energies in the page, which take about three megabytes."""

_MEASURED = "measured"  # the quantity of the store's own measurements
_HERE = "‖D_X f‖"  # the quantity of a bound on one sequence; others are over all inputs of a ball
_PLACE = list(PLACE)
_FIT = ["slope", "intercept", "n_min", "n_max"]
_USUAL_LENGTH = 64  # of a text that is read at a glance
# Characters that could end the script element, start another, or break a line of JavaScript.
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def script_json(value: object) -> Markup:
    """Return a value as JSON that is safe inside an HTML element.

    Raises
    ------
    ValueError
        If it contains NaN or an infinite number, which JSON does not have.

    """
    return Markup(json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES))


def scatter_data(
    measurements: pd.DataFrame, exponents: pd.DataFrame, published: pd.DataFrame, compared: pd.DataFrame
) -> dict[str, Any] | None:
    """Return the points and fits of the report's scatter plot of constants against length or radius.

    The exponents are fitted to the measurements, ``compared`` to the published values.

    Returns
    -------
    dict or None
        ``names`` of models, texts, scopes and quantities. ``groups``, one entry for each fitted group,
        with its layer and head (``where``), its ``fit``, and its ``exponent`` in words. ``points`` as
        columns. ``total``, the number of points before thinning. None if there are no points.

    """
    ours = {"quantity": _MEASURED, "items": ""}
    theirs = {"scope": "attention", "head": None}
    rows = _joined(measurements.assign(**ours), published.assign(**theirs, converged=published["settled"]))
    if rows.empty:
        return None
    groups = _joined(exponents.assign(**ours), compared.assign(**theirs))
    keys = [*GROUP, "quantity", "items"]
    group = rows[keys].merge(groups[keys].reset_index(), how="left", on=keys)["index"]
    step = math.ceil(len(rows) / MOST_POINTS)
    kept = rows.iloc[::step]
    columns = {"radius": "radius_mean", "value": "lipschitz"}
    names, groups = _numbered(groups, "model", "text", "scope", "quantity")
    return {
        "names": names,
        "groups": [_group(row) for row in plain_rows(groups)],
        "points": {
            "group": group.iloc[::step].tolist(),
            "n": kept["n"].tolist(),
            "sample": kept["sample"].tolist(),
            **{name: _rounded(kept[column]) for name, column in columns.items()},
            **{end: _rounded(kept[end], upper=end == "upper") for end in ("lower", "upper")},
            "converged": kept["converged"].astype(int).tolist(),
        },
        "total": len(rows),
    }


def _group(row: dict[str, Any]) -> dict[str, Any]:
    group = {name: row[name] for name in (*GROUP, "quantity")} | {
        "where": place_in_words(row["layer"], row["head"])
    }
    if row["note"]:
        return {**group, "fit": None, "exponent": f"no exponent: {row['note']}"}
    fit = dict(zip(_FIT, _rounded(row[name] for name in _FIT), strict=True))
    ends = f"{CONFIDENCE} interval {slope(row['low'])} to {slope(row['high'])}"
    words = f"exponent {slope(row['slope'])}, {ends}, p for 1/4 {chance(row['quarter'])}"
    return {**group, "fit": fit, "exponent": words}


def bounds_data(bounds: pd.DataFrame, measurements: pd.DataFrame) -> dict[str, Any] | None:
    """Return the bounds at each sequence, with the constants measured there, for the report's script.

    Returns
    -------
    dict or None
        ``names`` of models, texts and scopes, ``labels`` of the bounds, and their ``sources``.
        ``places``, each with ``measured`` (value, lower, upper; or None), ``radius``, and ``rows`` of
        (label, is upper bound, value, log10 of the value, holds, source, is a bound at this sequence) in
        the order of the table. A value is None if it overflows or does not exist. None if there are no
        bounds.

    """
    if bounds.empty:
        return None
    table = bounds.merge(measurements[[*_PLACE, "lipschitz", "lower", "upper"]], how="left", on=_PLACE)
    names, table = _numbered(table, "model", "text", "scope", "name", "source")
    places = []
    for _, rows in table.groupby(_PLACE, sort=False, dropna=False):
        first, *_ = listed = plain_rows(rows)
        (value,) = _rounded([first["lipschitz"]])
        (low,), (high,) = _rounded([first["lower"]], upper=False), _rounded([first["upper"]], upper=True)
        places.append(
            {
                **{name: first[name] for name in _PLACE},
                "radius": _rounded([first["radius"]])[0],
                "measured": None if value is None else [value, low, high],
                "rows": [_bound(row) for row in listed],
            }
        )
    labels, sources = names.pop("name"), names.pop("source")
    return {"names": names, "labels": labels, "sources": sources, "places": places}


def _bound(row: dict[str, Any]) -> tuple[Any, ...]:
    power = None if row["log_value"] is None else row["log_value"] / math.log(10)
    numbers = _rounded([row["value"], power], upper=row["side"] == "upper")
    return (
        row["name"],
        row["side"] == "upper",
        *numbers,
        bool(row["holds"]),
        row["source"],
        row["quantity"] == _HERE,
    )


def sensitivity_data(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Return the share of each token in the leading singular vectors of Jacobians, for the report's script.

    The energy of a token is its share of the squared norm of a leading singular vector of the Jacobian.

    Returns
    -------
    dict or None
        ``names`` of models, texts and scopes. ``sequences``, each with its tokens as ``words``; ``apart``
        says that they do not join to the text. ``rows``, one for each layer or head at a sequence, with
        the energies ``input`` and ``output``, and how many tokens have ``half`` of each. ``start``, the
        row to show first. ``total``, the number of rows before thinning. None if there are no rows.

    """
    if rows.empty:
        return None
    names, kept = _numbered(_thinned(rows), "model", "text", "scope")
    by_sequence = kept.groupby(["model", "text", "n", "sample"], sort=False)
    kept["sequence"] = by_sequence.ngroup()
    found = [
        {
            **{name: row[name] for name in (*_PLACE, "converged", "sequence")},
            "input": _rounded(row["input_energy"], 3),
            "output": _rounded(row["output_energy"], 3),
            "half": [_tokens_of_half(row[side]) for side in ("input_energy", "output_energy")],
        }
        for row in plain_rows(kept)
    ]
    sequences = [
        {"words": [visible_token(token) for token in row["tokens"]], "apart": row["place"] is None}
        for row in plain_rows(kept[~kept["sequence"].duplicated()])
    ]
    return {
        "names": names,
        "sequences": sequences,
        "rows": found,
        "start": _start(found, names["scope"]),
        "total": len(rows),
    }


def _tokens_of_half(energies: Sequence[float]) -> int:
    """Return the smallest number of tokens whose energies sum to at least half of the total energy."""
    reached = np.cumsum(sorted(energies, reverse=True))
    return int(np.searchsorted(reached, reached[-1] / 2)) + 1


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows of the longest length and of some shorter lengths, so that they fit into the page."""
    step = math.ceil(2 * int(rows["n"].sum()) / MOST_ENERGIES)
    return rows[rows["n"].isin(sorted(rows["n"].unique(), reverse=True)[::step])]


def _start(rows: Sequence[dict[str, Any]], scopes: Sequence[str]) -> int:
    """Choose the row that is shown first: of the middle layer, with at most 64 tokens if there is one."""
    scope = scopes.index("attention") if "attention" in scopes else rows[0]["scope"]
    begun = next(row for row in rows if row["scope"] == scope)
    alike = [row for row in rows if all(row[name] == begun[name] for name in ("model", "text", "scope"))]
    layers = sorted({row["layer"] for row in alike})
    layer = layers[len(layers) // 2]
    n = max((row["n"] for row in alike if row["n"] <= _USUAL_LENGTH), default=min(row["n"] for row in alike))
    return rows.index(
        min(alike, key=lambda row: (abs(row["n"] - n), abs(row["layer"] - layer), row["head"] or 0))
    )


def _joined(*tables: pd.DataFrame) -> pd.DataFrame:
    """Concatenate tables, leaving out those that have no rows."""
    there = [table.astype({"head": "Int64"}) for table in tables if len(table)] or [tables[0]]
    return pd.concat(there, ignore_index=True)


def _numbered(table: pd.DataFrame, *columns: str) -> tuple[dict[str, list[str]], pd.DataFrame]:
    """Replace the names in some columns of a table by indices into the lists of names, which come first."""
    names, numbers = {}, {}
    for column in columns:
        numbers[column], found = pd.factorize(table[column])
        names[column] = [plain(name) for name in found]
    return names, table.assign(**numbers)


def _rounded(values: Iterable[Any], digits: int = 7, *, upper: bool | None = None) -> list[float | None]:
    """Round numbers, upper limits up and lower ones down; NaN and infinite ones become None."""

    def rounded(value: float) -> float:
        return float(f"{value:.{digits}g}" if upper is None else limit_in_digits(value, digits, upper=upper))

    return [None if value is None or not np.isfinite(value) else rounded(value) for value in values]
