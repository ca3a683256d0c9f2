"""Tables, fits and figures of a store of attacks. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.study.attack_store import AttackStore
from howsmooth.study.exponents import fit_exponent
from howsmooth.study.figures import AttackPicture, draw_attacks
from howsmooth.study.files import write_table

__all__ = ["SERIES", "SUMMARY_COLUMNS", "PublishedAttacks", "fits", "publish_attacks", "summary"]

SUMMARY_COLUMNS = (
    "layer", "head", "scope", "masking", "n", "radius", "tokens", "paper", "construction", "construction_by",
    "ascent", "found", "found_by", "converged", "upper", "upper_by", "found_to_paper", "found_to_upper",
    "log_upper", "file",
)  # fmt: skip
"""The columns of ``summary.csv``: constants at one attention and length, and their ratios."""

SERIES = ("found", "paper", "upper")
"""What an exponent in n is fitted to."""

_FIT_COLUMNS = (
    "layer", "head", "series", "slope", "low", "high", "n_points", "n_min", "n_max", "spread", "intercept",
    "interval", "left_out", "note",
)  # fmt: skip


@dataclass(frozen=True)
class PublishedAttacks:
    """What was written, and what it was written from.

    Attributes
    ----------
    identity
        What the attacks have in common.
    summary, exponents, heads
        As :func:`summary`, :func:`fits` and :meth:`~howsmooth.study.attack_store.AttackStore.heads`.
    pictures
        The figures.
    files
        The tables written, by name.

    """

    identity: dict[str, Any]
    summary: pd.DataFrame
    exponents: pd.DataFrame
    heads: pd.DataFrame
    pictures: list[AttackPicture]
    files: dict[str, Path]


def summary(attacks: pd.DataFrame) -> pd.DataFrame:
    """Put the rows of each attention and length side by side.

    Parameters
    ----------
    attacks
        As :meth:`howsmooth.study.attack_store.AttackStore.attacks` gives them.

    Returns
    -------
    pandas.DataFrame
        With :data:`SUMMARY_COLUMNS`. ``paper`` is the paper's construction, the best over heads if there are
        several; ``found`` the largest constant in the ball that was found by any means; NaN where there is
        none. ``upper`` is inf where it overflows.

    """
    rows = []
    for (layer, head, n), group in attacks.groupby(["layer", "head", "n"], dropna=False, sort=True):
        kinds = {str(kind): part for kind, part in group.groupby("kind")}
        built = kinds.get("construction", group.iloc[:0])
        papers = built[built["name"].str.fullmatch(r"two_cluster(, head \d+)?")]
        kept = group[group["file"].notna()]
        upper = kinds.get("upper", group.iloc[:0])
        log_upper = float(upper["log_value"].iloc[0]) if len(upper) else math.nan
        found = float(kept["value"].iloc[0]) if len(kept) else math.nan
        paper = _largest(papers)
        rows.append(
            {
                "layer": layer,
                "head": head,
                "scope": group["scope"].iloc[0],
                "masking": group["masking"].iloc[0],
                "n": n,
                "radius": group["radius"].iloc[0],
                "tokens": _largest(kinds.get("tokens", group.iloc[:0])),
                "paper": paper,
                "construction": _largest(built),
                "construction_by": _by(built),
                "ascent": _largest(kinds.get("ascent", group.iloc[:0])),
                "found": found,
                "found_by": str(kept["name"].iloc[0]) if len(kept) else "",
                "converged": bool(kept["converged"].iloc[0]) if len(kept) else False,
                "upper": _exp(log_upper),
                "upper_by": str(upper["name"].iloc[0]) if len(upper) else "",
                "found_to_paper": found / paper if paper > 0 else math.nan,
                "found_to_upper": math.exp(math.log(found) - log_upper) if found > 0 else math.nan,
                "log_upper": log_upper,
                "file": kept["file"].iloc[0] if len(kept) else "",
            }
        )
    return pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS)).astype({"head": "Int64"})


def fits(table: pd.DataFrame) -> pd.DataFrame:
    """Fit the growth with n of every series of a summary.

    Returns
    -------
    pandas.DataFrame
        Columns ``layer, head, series`` and those of :class:`~howsmooth.study.exponents.Exponent`.

    """
    rows = []
    for (layer, head), group in table.groupby(["layer", "head"], dropna=False, sort=True):
        for series in SERIES:
            values = group[series].to_numpy(np.float64)
            there = np.isfinite(values)
            if not there.any():
                continue
            usable = group["converged"].to_numpy(bool) if series == "found" else np.ones(len(group), bool)
            fit = fit_exponent(group["n"].to_numpy()[there], values[there], usable[there])
            rows.append({"layer": layer, "head": head, "series": series, **fit.__dict__})
    return pd.DataFrame(rows, columns=list(_FIT_COLUMNS)).astype({"head": "Int64"})


def publish_attacks(
    folder: Path, on_figure: Callable[[int, int], None] = lambda done, total: None
) -> PublishedAttacks:
    """Write the tables and figures beside a store of attacks.

    Parameters
    ----------
    folder
        That holds the store.
    on_figure
        Told how many figures are drawn, of how many.

    Raises
    ------
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    with AttackStore.open(folder, write=False) as store:
        identity, rows, heads = store.identity(), store.attacks(), store.heads()
    table = summary(rows)
    exponents = fits(table)
    files = {
        name: write_table(content, folder, f"{name}.csv")
        for name, content in (
            ("attacks", rows.drop(columns="run")),
            ("summary", table),
            ("exponents", exponents),
            ("heads", heads),
        )
    }
    try:
        pictures = draw_attacks(str(identity.get("source", "")), table, heads, folder / "figures", on_figure)
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The attacks are kept in "
            f"{folder}; make it writable or make room, and run the same command again."
        ) from error
    return PublishedAttacks(identity, table, exponents, heads, pictures, files)


def _largest(rows: pd.DataFrame) -> float:
    return float(rows["value"].max()) if len(rows) else math.nan


def _by(rows: pd.DataFrame) -> str:
    return str(rows["name"].iloc[int(rows["value"].to_numpy().argmax())]) if len(rows) else ""


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf
