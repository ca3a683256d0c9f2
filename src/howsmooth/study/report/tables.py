"""Build the headlines and the rows of the tables in the report, and format their numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

from howsmooth.study.exponents import LEVEL
from howsmooth.study.plans import PUBLISHED_ITEMS
from howsmooth.study.records import plain_rows
from howsmooth.words import decimal, place_in_words

__all__ = [
    "CONFIDENCE", "chance", "convergence", "headline", "items_of", "maskings", "number", "runs",
    "sharpest", "slope",
]  # fmt: skip

CONFIDENCE = f"{LEVEL * 100:.0f} %"
"""The confidence of the intervals of exponents and correlations, as text."""


def number(value: float | None) -> str:
    """Format a number with three significant digits; return an empty string for a missing number."""
    return "" if value is None or math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def slope(value: float | None) -> str:
    """Format an exponent or a correlation with three decimals; return an empty string if it is missing."""
    return "" if value is None or math.isnan(value) else decimal(value, 3)


def chance(value: float | None) -> str:
    """Format a p value; values below 0.001 are shown as "below 0.001"."""
    return "below 0.001" if value is not None and value < 0.001 else slope(value)


def headline(rows: pd.DataFrame, exponents: pd.DataFrame) -> str:
    """Return one sentence on how large the constants are, and how fast they grow with the length.

    The rows belong to one model, text and scope.
    """
    span = f"lengths {rows['n'].min()} to {rows['n'].max()}"
    low, high = number(rows["lipschitz"].min()), number(rows["lipschitz"].max())
    values = f"The constants measured are between {low} and {high}"
    good = sorted((row for row in plain_rows(exponents) if not row["note"]), key=lambda row: row["slope"])
    if not good:
        return f"{values} over {span}. There are too few lengths to fit an exponent."
    first, last = good[0], good[-1]
    least, most = decimal(first["slope"], 3), decimal(last["slope"], 3)
    if len(good) == 1:
        interval = f"{CONFIDENCE} interval {decimal(first['low'], 3)} to {decimal(first['high'], 3)}"
        return f"The constant grows like n to the power {least} ({interval}) over {span}. {values}."
    powers = f"of about {least} in all layers and heads"
    if least != most:
        low_end, high_end = (place_in_words(row["layer"], row["head"]) for row in (first, last))
        powers = f"between {least} ({low_end}) and {most} ({high_end})"
    quarter = sum(row["quarter"] >= 1 - LEVEL for row in good)
    return (
        f"The constant grows like n to a power {powers} over {span}. {values}. "
        f"The interval of {quarter or 'none'} of the {len(good)} exponents contains 1/4."
    )


def sharpest(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the smallest upper and the largest lower bound on each attention layer or head.

    Each bound comes with its ratio to the measured constant.

    Whole layers come before heads, of which there can be very many. ``found`` is the result of
    :func:`~howsmooth.study.report.chart_data.bounds_data`.
    """
    table = []
    for place_ in sorted(found["places"], key=lambda one: one["head"] is not None):
        value = place_["measured"] and place_["measured"][0]
        holding = [row for row in place_["rows"] if row[4] and row[2]]
        # A lower bound on the supremum over a ball is no lower bound on the constant at this sequence.
        upper = min((row for row in holding if row[1]), key=lambda row: row[2], default=None)
        lower = max((row for row in holding if row[6] and not row[1]), key=lambda row: row[2], default=None)
        row = {name: found["names"][name][place_[name]] for name in ("model", "text", "scope")}
        row |= {"layer": place_["layer"], "n": place_["n"], "head": place_["head"], "measured": value}
        for side, best in (("upper", upper), ("lower", lower)):
            row[side] = best and {
                "value": best[2],
                "name": found["labels"][best[0]],
                "ratio": best[2] / value if value else None,
            }
        table.append(row)
    return table


def convergence(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Tabulate how many measurements converged, and how wide their intervals are.

    There is one row for each model, text and scope.
    """
    width = (rows["upper"] - rows["lower"]) / rows["lipschitz"].where(rows["lipschitz"] > 0)
    found = (
        rows.assign(width=width)
        .groupby(["model", "text", "scope"], sort=True)
        .agg(
            total=("converged", "size"),
            converged=("converged", "sum"),
            width=("width", "median"),
            widest=("width", "max"),
            iterations=("iterations", "median"),
        )
    )
    return plain_rows(found.reset_index())


def maskings(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return pairs of the name of a model and the names of the masks of its layers."""
    names = rows.groupby("model")["masking"].agg(lambda group: ", ".join(sorted(set(group))))
    return [(str(model), words) for model, words in names.items()]


def runs(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each run of a study as a dictionary, with its software and hardware as a list of pairs."""
    return [
        {**run, "environment": list(json.loads(str(run["environment"])).items())} for run in plain_rows(table)
    ]


def items_of(compared: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the deviations of the published code (items) that occur in a table, with their meanings."""
    there = {item for items in compared["items"] for item in str(items).split(",")}
    return [(item, meaning) for item, meaning in PUBLISHED_ITEMS.items() if item in there]
