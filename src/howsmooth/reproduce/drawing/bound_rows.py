"""What the picture of all bounds is drawn from: the rows, and what is seen in them, in words and a table."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.reproduce.kept import Kept
from howsmooth.reproduce.words import ratio
from howsmooth.study.names import readable

__all__ = ["AS_CODED", "KINDS", "bound_table", "bound_words", "read_bounds", "spoken"]

AS_CODED = "theorem_c_3_as_coded"
"""The formula of the published code, which is no bound."""

LOCAL = "‖D_X f‖"

KINDS = {
    "local upper": "upper bounds at the tokens",
    "ball upper": "upper bounds over the ball",
    "ball lower": "lower bounds over the ball",
    "local lower": "lower bounds at the tokens",
}
"""What bounds can be of, in the order of the picture."""

# A bound and the end of an interval are both rounded outwards; beyond that, one of them would be wrong.
_ROUNDING = 1e-9
_NEEDS = re.compile(r"\(needs: (.*)\)$")
_SPOKEN = {
    "n_free": "n-free",
    "masked_n_free": "masked n-free",
    "certificate_n": "certificate N",
    "certificate_r": "certificate R",
    "certificate_joint": "joint certificate",
    "certificate_cheap": "cheap certificate",
    "theorem_a": "Theorem A",
    "masked_theorem_a": "masked Theorem A",
    "any_mask_theorem_a": "Theorem A for any mask",
    AS_CODED: "Theorem C.3 as coded (no bound)",
    "yudin": "Yudin et al. 2025",
}


def spoken(name: str) -> str:
    """Say the name of a bound as people do: "Theorem C.3, as coded"."""
    if name in _SPOKEN:
        return _SPOKEN[name]
    parts = name.split("_")
    for place, word in enumerate(parts[:-2]):
        if word in ("theorem", "lemma", "proposition"):
            rest = " ".join(parts[place + 3 :])
            number = f"{word.capitalize()} {parts[place + 1].upper()}.{parts[place + 2]}"
            return f"{number}, {rest}" if rest else number
    return " ".join(parts)


def read_bounds(folder: Path, note: dict[str, Any]) -> pd.DataFrame:
    """Read what was asked for last: one row a bound, sequence and head.

    Returns
    -------
    pandas.DataFrame
        With ``kind`` (of :data:`KINDS`) and ``log_ratio``, the logarithm of bound / measured constant. The
        formula of the published code is among them only if that was asked for.

    Raises
    ------
    StoreError
        If something cannot be read.

    """
    rows = Kept(folder / "units").table(note["units"])
    if not note["as_published"]:
        rows = rows[rows["name"] != AS_CODED]
    where = np.where(rows["quantity"] == LOCAL, "local ", "ball ")
    measured = (_logs(rows["lower"]) + _logs(rows["upper"])) / 2
    return rows.assign(
        kind=[place + side for place, side in zip(where, rows["side"], strict=True)],
        log_ratio=rows["log_value"].astype(float) - measured.where(measured > -math.inf),
    )


def bound_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate for each model, scope and bound how often it holds, and its ratio to the measured constant."""
    found = []
    for (model, layer, scope, name, _), part in rows.groupby(
        ["model", "layer", "scope", "name", "side"], sort=False
    ):
        valid = part[part["holds"]]
        logs = valid["log_ratio"].dropna()
        found.append(
            {
                "model": model,
                "layer": layer,
                "scope": scope,
                "bound": spoken(str(name)),
                "of": KINDS[str(part["kind"].iloc[0])],
                "cases": len(part),
                "holds in": len(valid),
                **{
                    f"{which} ratio": math.nan if logs.empty else _exp(log)
                    for which, log in (
                        ("least", float(logs.min())),
                        ("median", float(logs.median())),
                        ("largest", float(logs.max())),
                    )
                },
            }
        )
    order = {words: place for place, words in enumerate(KINDS.values())}
    table = pd.DataFrame(found)
    table["place"] = table["of"].map(order)
    return (
        table.sort_values(["place", "median ratio"], kind="stable")
        .sort_values(["model", "layer", "scope"], kind="stable", key=lambda one: pd.factorize(one)[0])
        .drop(columns="place")
        .reset_index(drop=True)
    )


def bound_words(rows: pd.DataFrame) -> list[str]:
    """Say what is seen: whether any bound is violated, and which are the tightest, by layer and scope."""
    uppers = rows[rows["holds"] & (rows["side"] == "upper")]
    lowers = rows[rows["holds"] & (rows["kind"] == "local lower")]
    violated = int((uppers["log_value"] < _logs(uppers["lower"]) - _ROUNDING).sum())
    violated += int((lowers["log_value"] > _logs(lowers["upper"]) + _ROUNDING).sum())
    seen = [
        f"{len(uppers) + len(lowers)} times a bound that holds was put beside a measurement: "
        f"{violated or 'none'} of them {'were' if violated > 1 else 'was'} violated."
    ]
    seen += [
        _family_words(str(model), str(layer), str(scope), part)
        for (model, layer, scope), part in rows.groupby(["model", "layer", "scope"], sort=False)
    ]
    silent = _silent(rows[rows["name"] != AS_CODED])
    if silent:
        seen.append(f"In no case are the hypotheses met of {'; '.join(silent)}.")
    coded = rows[rows["name"] == AS_CODED]
    if len(coded):
        below = int((coded["log_value"] < _logs(coded["lower"])).sum())
        seen.append(
            f"The formula of the published code for Theorem C.3 is no bound; here it lies below the measured "
            f"constant in {below} of {len(coded)} cases, and is in the median "
            f"{_said(float(coded['log_ratio'].median()))} times the constant."
        )
    return seen


def _silent(rows: pd.DataFrame) -> list[str]:
    """Name the bounds that hold nowhere here, with what they need."""
    found = []
    for (name, side), part in rows.groupby(["name", "side"], sort=True):
        if not part["holds"].any():
            needs = {match[1] for words in part["source"] if (match := _NEEDS.search(str(words)))}
            upper = " as an upper bound" if side == "upper" else " as a lower bound"
            both = rows.loc[rows["name"] == name, "side"].nunique() > 1
            found.append(f"{spoken(str(name))}{upper if both else ''} (needs {' or '.join(sorted(needs))})")
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
            f"{article} is {spoken(name)}, in the median {_said(float(logs.median()))} times the measured "
            f"constant ({_said(float(logs.min()))} to {_said(float(logs.max()))})"
        )
    return f"{words[0]}: {'; '.join(words[1:]) or 'no bound holds'}."


def _said(log: float) -> str:
    return ratio(math.exp(log)) if abs(log) < 600 else f"e to the power {log:.3g}"


def _logs(values: pd.Series) -> pd.Series:
    """Take logarithms; that of zero is −inf, without a warning."""
    numbers = values.to_numpy(dtype=float)
    return pd.Series(np.log(numbers, where=numbers > 0, out=np.full(len(numbers), -math.inf)), values.index)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf
