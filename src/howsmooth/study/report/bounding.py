"""Bounds beside measurements, for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from howsmooth.study.report.data import rounded
from howsmooth.study.report.wording import plain, records

__all__ = ["bounds_beside", "sharpest"]

_HERE = "‖D_X f‖"  # the quantity that is measured; others are over all inputs of a ball
_PLACE = ("model", "text", "scope", "layer", "head", "n", "sample")
_NAMED = ("model", "text", "scope")


def bounds_beside(bounds: pd.DataFrame, measurements: pd.DataFrame) -> dict[str, Any] | None:
    """Put together the bounds at each sequence with what was measured there.

    Parameters
    ----------
    bounds, measurements
        Of a store.

    Returns
    -------
    dict or None
        ``names`` of models, texts and scopes, ``labels`` of the bounds, their ``sources``, and ``places``,
        each with ``measured`` (value, lower, upper; or None), ``radius`` and ``rows`` of (label, above,
        value, power of ten, holds, source, here) in the order of the table; a value of None overflows, or is
        none. None if there are no bounds.

    """
    if bounds.empty:
        return None
    names = {axis: list(dict.fromkeys(bounds[axis])) for axis in _NAMED}
    labels = list(dict.fromkeys(bounds["name"]))
    sources = list(dict.fromkeys(bounds["source"]))
    known = {
        _key(row): rounded([row["lipschitz"], row["lower"], row["upper"]])
        for row in records(measurements[[*_PLACE, "lipschitz", "lower", "upper"]])
    }
    places: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in records(bounds):
        key = _key(row)
        if key not in places:
            places[key] = {
                **{axis: names[axis].index(row[axis]) for axis in _NAMED},
                **{axis: row[axis] for axis in _PLACE if axis not in _NAMED},
                "radius": rounded([row["radius"]])[0],
                "measured": known.get(key),
                "rows": [],
            }
        power = None if row["log_value"] is None else row["log_value"] / math.log(10)
        places[key]["rows"].append(
            (
                labels.index(row["name"]),
                row["side"] == "upper",
                *rounded([row["value"], power]),
                bool(row["holds"]),
                sources.index(row["source"]),
                row["quantity"] == _HERE,
            )
        )
    return {
        "names": {axis: [plain(name) for name in found] for axis, found in names.items()},
        "labels": [plain(label) for label in labels],
        "sources": [plain(source) for source in sources],
        "places": list(places.values()),
    }


def sharpest(found: dict[str, Any]) -> list[dict[str, Any]]:
    """List for each place the lowest bound above and the highest below, with their ratios to the constant.

    Whole layers come before their heads, which can be very many.
    """
    table = []
    for place in sorted(found["places"], key=lambda place: place["head"] is not None):
        value = place["measured"][0] if place["measured"] else None
        row = {
            **{axis: found["names"][axis][place[axis]] for axis in _NAMED},
            **{axis: place[axis] for axis in ("layer", "n")},
            "head": "all" if place["head"] is None else place["head"],
            "measured": value,
        }
        for side, above in (("upper", True), ("lower", False)):
            # Below, only what is said of this sequence: the largest constant of a ball may be elsewhere.
            holding = [
                (bound, label)
                for label, up, bound, _, holds, _, here in place["rows"]
                if up == above and holds and bound and (here or above)
            ]
            best = (min if above else max)(holding, default=None)
            row[side] = best and {
                "value": best[0],
                "name": found["labels"][best[1]],
                "ratio": best[0] / value if value else None,
            }
        table.append(row)
    return table


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _PLACE)
