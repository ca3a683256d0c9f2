"""Tabulate the ratios of bounds to measured constants, and say which bounds are the tightest."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from howsmooth.paper.plotting import exponentials
from howsmooth.words import readable

__all__ = ["AS_CODED", "KINDS", "bound_table", "bound_words", "display_name", "logs_of"]

AS_CODED = "theorem_c_3_as_coded"
"""The name of the formula in the published code, which is not a bound."""

KINDS = {
    "local upper": "upper bounds at the tokens",
    "ball upper": "upper bounds over the ball",
    "ball lower": "lower bounds over the ball",
    "local lower": "lower bounds at the tokens",
}
"""The kinds of bounds with their titles, in the order of the picture."""

_ROUNDING = 1e-9  # the tolerance, in logarithms, before a bound counts as violated
_SPOKEN = {
    "ball_upper_bound": "Theorem A",
    "causal_ball_upper_bound": "masked Theorem A",
    "masked_ball_upper_bound": "Theorem A for any mask",
    AS_CODED: "Theorem C.3 as coded (no bound)",
    "yudin_theorem_3": "Yudin et al. 2025",
}
_LAYER = ["model", "layer", "scope"]
_RATIOS = {"least ratio": "min", "median ratio": "median", "largest ratio": "max"}


def logs_of(values: pd.Series) -> pd.Series:
    """Return the logarithms of a column of numbers, −inf for zero, without a warning."""
    with np.errstate(divide="ignore"):
        return pd.Series(np.log(values.to_numpy(dtype=float)), values.index)


def display_name(name: str) -> str:
    """Turn the function name of a bound into a readable name, such as "Theorem C.3, sharp"."""
    found = re.search(r"(theorem|lemma|proposition)_([^_]+)_([^_]+)_?(.*)", name)
    if name in _SPOKEN or not found:
        return _SPOKEN.get(name, name.replace("_", " "))
    kind, chapter, place, rest = found.groups()
    return f"{kind.capitalize()} {chapter.upper()}.{place}" + (f", {rest.replace('_', ' ')}" if rest else "")


def bound_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate in how many cases each bound holds, and its ratios to the constants measured in these cases.

    There is a row for each layer, scope and bound, ordered by layer, then by kind, then by median ratio.
    """
    ratios = rows.assign(ratio=rows["log_ratio"].where(rows["holds"]))
    groups = ratios.groupby([*_LAYER, "name", "side"], sort=False)
    table = groups.agg(of=("kind", "first"), cases=("name", "size"), **{"holds in": ("holds", "sum")})
    table = table.assign(
        **{name: exponentials(groups["ratio"].agg(way)) for name, way in _RATIOS.items()}
    ).reset_index()
    table = table.assign(
        place=table.groupby(_LAYER, sort=False).ngroup(),
        of=pd.Categorical(table["of"], list(KINDS), ordered=True).rename_categories(KINDS),
        bound=table["name"].map(display_name),
    )
    table = table.sort_values(["place", "of", "median ratio"], kind="stable", ignore_index=True)
    return table.astype({"of": str})[[*_LAYER, "bound", "of", "cases", "holds in", *_RATIOS]]


def bound_words(rows: pd.DataFrame) -> list[str]:
    """Return sentences that say whether a bound is violated, and which bounds of a layer are the tightest."""
    uppers = rows[rows["holds"] & (rows["side"] == "upper")]
    lowers = rows[rows["holds"] & (rows["kind"] == "local lower")]
    violated = int((uppers["log_value"] < logs_of(uppers["lower"]) - _ROUNDING).sum())
    violated += int((lowers["log_value"] > logs_of(lowers["upper"]) + _ROUNDING).sum())
    seen = [
        f"{len(uppers) + len(lowers)} bounds whose hypotheses hold were compared with measurements: "
        f"{violated or 'none'} of them {'were' if violated > 1 else 'was'} violated."
    ]
    for (model, layer, scope), part in bound_table(rows).groupby(_LAYER, sort=False):
        heads = "each head" if scope == "head" else "all heads together"
        known = part[np.isfinite(part["median ratio"])]
        words = []
        for kind in ("local upper", "ball upper", "ball lower"):
            own = known[known["of"] == KINDS[kind]]  # by ratio, so that the largest lower bound is the last
            for one in (own.tail(1) if kind == "ball lower" else own.head(1)).to_dict("records"):
                least, median, largest = (f"{one[ratio]:.3g}" for ratio in _RATIOS)
                words.append(f"of the {KINDS[kind]} {one['bound']}, {median} ({least} to {largest})")
        seen.append(
            f"{readable(str(model))}, layer {layer}, {heads}: the tightest, with the median of its ratio to "
            f"the measured constant, is {'; '.join(words) or 'none, as no bound holds'}."
        )
    coded = rows[rows["name"] == AS_CODED]
    if len(coded):
        below = int((coded["log_value"] < logs_of(coded["lower"])).sum())
        seen.append(
            "The published code's formula for Theorem C.3 is not a bound: it lies below the measured "
            f"constant in {below} of {len(coded)} cases."
        )
    return seen
