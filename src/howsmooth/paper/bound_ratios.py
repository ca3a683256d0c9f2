"""Tabulate the ratios of bounds to measured constants, and say which bounds are the tightest."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd

from howsmooth.paper.exponent_text import exp
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

# Tolerance, in logarithms, before a bound counts as violated: rounding errors of a bound and an interval.
_ROUNDING = 1e-9
_NEEDS = re.compile(r"\(needs: (.*)\)$")
_SPOKEN = {
    "ball_upper_bound": "Theorem A",
    "causal_ball_upper_bound": "masked Theorem A",
    "masked_ball_upper_bound": "Theorem A for any mask",
    AS_CODED: "Theorem C.3 as coded (no bound)",
    "yudin_theorem_3": "Yudin et al. 2025",
}
_RATIOS = {"least": "min", "median": "median", "largest": "max"}


def logs_of(values: pd.Series) -> pd.Series:
    """Return the logarithms of a column of numbers, −inf for zero, without a warning."""
    with np.errstate(divide="ignore"):
        return pd.Series(np.log(values.to_numpy(dtype=float)), values.index)


def display_name(name: str) -> str:
    """Return a readable name of a bound, such as "Theorem C.3, sharp", given the name of its function."""
    found = re.search(r"(theorem|lemma|proposition)_([^_]+)_([^_]+)_?(.*)", name)
    if name in _SPOKEN or not found:
        return _SPOKEN.get(name, name.replace("_", " "))
    kind, chapter, place, rest = found.groups()
    return f"{kind.capitalize()} {chapter.upper()}.{place}" + (f", {rest.replace('_', ' ')}" if rest else "")


def bound_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the ratios of the bounds to the measured constants, and in how many cases the hypotheses of
    each bound hold.

    There is one row for each layer, scope and bound, ordered by layer, then by kind, then by median ratio.
    """
    layer = ["model", "layer", "scope"]
    ratios = rows.assign(ratio=rows["log_ratio"].where(rows["holds"]))
    table = (
        ratios.groupby([*layer, "name", "side"], sort=False)
        .agg(
            of=("kind", "first"),
            cases=("name", "size"),
            **{"holds in": ("holds", "sum")},
            **{f"{end} ratio": ("ratio", way) for end, way in _RATIOS.items()},
        )
        .reset_index()
    )
    table = table.assign(
        place=table.groupby(layer, sort=False).ngroup(),
        of=pd.Categorical(table["of"], list(KINDS), ordered=True).rename_categories(KINDS),
        bound=table["name"].map(display_name),
        **{f"{end} ratio": exp(table[f"{end} ratio"]) for end in _RATIOS},
    )
    table = table.sort_values(["place", "of", "median ratio"], kind="stable", ignore_index=True)
    names = [*layer, "bound", "of", "cases", "holds in", *(f"{end} ratio" for end in _RATIOS)]
    return table.astype({"of": str})[names]


def bound_words(rows: pd.DataFrame) -> list[str]:
    """Return sentences that say whether a bound is violated, and which bounds are the tightest in
    each layer.
    """
    uppers = rows[rows["holds"] & (rows["side"] == "upper")]
    lowers = rows[rows["holds"] & (rows["kind"] == "local lower")]
    violated = int((uppers["log_value"] < logs_of(uppers["lower"]) - _ROUNDING).sum())
    violated += int((lowers["log_value"] > logs_of(lowers["upper"]) + _ROUNDING).sum())
    seen = [
        f"{len(uppers) + len(lowers)} bounds whose hypotheses hold were compared with measurements: "
        f"{violated or 'none'} of them {'were' if violated > 1 else 'was'} violated."
    ]
    seen += [
        _family_words(str(model), str(layer), str(scope), part)
        for (model, layer, scope), part in rows.groupby(["model", "layer", "scope"], sort=False)
    ]
    never = _inapplicable(rows[rows["name"] != AS_CODED])
    if never:
        seen.append(f"The hypotheses of these bounds are met in no case: {'; '.join(never)}.")
    coded = rows[rows["name"] == AS_CODED]
    if len(coded):
        below = int((coded["log_value"] < logs_of(coded["lower"])).sum())
        seen.append(
            f"The formula of the published code for Theorem C.3 is not a bound. Here it lies below the "
            f"measured constant in {below} of {len(coded)} cases, and its median ratio to the constant is "
            f"{_factor_text(float(coded['log_ratio'].median()))}."
        )
    return seen


def _inapplicable(rows: pd.DataFrame) -> list[str]:
    """Return the names of the bounds whose hypotheses hold in no case, each with the hypotheses that fail."""
    found = []
    for (name, side), part in rows.groupby(["name", "side"], sort=True):
        if not part["holds"].any():
            needs = {match[1] for words in part["source"] if (match := _NEEDS.search(str(words)))}
            upper = " as an upper bound" if side == "upper" else " as a lower bound"
            both = rows.loc[rows["name"] == name, "side"].nunique() > 1
            found.append(
                f"{display_name(str(name))}{upper if both else ''} (needs {' or '.join(sorted(needs))})"
            )
    return found


def _family_words(model: str, layer: str, scope: str, rows: pd.DataFrame) -> str:
    what = "each head" if scope == "head" else "all heads together"
    cases = len(rows[["text", "n", "head"]].drop_duplicates())
    words = [f"{readable(model)}, layer {layer}, {what} ({cases} cases)"]
    for kind, article in (
        ("local upper", "the tightest upper bound at the tokens"),
        ("ball upper", "the tightest over the ball"),
        ("ball lower", "the largest lower bound over the ball"),
    ):
        here = rows[rows["holds"] & (rows["kind"] == kind) & np.isfinite(rows["log_ratio"])]
        if here.empty:
            continue
        medians = here.groupby("name")["log_ratio"].median()
        name = str(medians.idxmax() if kind == "ball lower" else medians.idxmin())
        logs = here.loc[here["name"] == name, "log_ratio"]
        words.append(
            f"{article} is {display_name(name)}, in the median "
            f"{_factor_text(float(logs.median()))} times the measured constant "
            f"({_factor_text(float(logs.min()))} to {_factor_text(float(logs.max()))})"
        )
    return f"{words[0]}: {'; '.join(words[1:]) or 'no bound holds'}."


def _factor_text(log: float) -> str:
    return f"{math.exp(log):.3g}" if abs(log) < 600 else f"e to the power {log:.3g}"
