"""Write tables and figures of the attacks in a store, and fit exponents to them. Nothing is measured here."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.study.exponents import Exponent, fitted_groups
from howsmooth.study.figures import draw_attacks
from howsmooth.study.figures.drawing import Files
from howsmooth.study.file_writing import write_table, written_beside
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.records import ATTACK, ATTACK_KINDS, ATTACK_PLACE, Attack
from howsmooth.study.store import Store

__all__ = ["SERIES", "SUMMARY_COLUMNS", "AttackOutputs", "fits", "summary", "write_attack_outputs"]

SUMMARY_COLUMNS = (
    "layer", "head", "scope", "masking", "n", "radius", "tokens", "tokens_norm", "paper", "construction",
    "construction_by", "ascent", "found", "found_by", "converged", "upper", "upper_by", "found_to_paper",
    "found_to_upper", "log_upper", "file",
)  # fmt: skip
"""The columns of ``summary.csv``, which has one row for each attention and length."""

SERIES = ("found", "paper", "upper")
"""The columns of ``summary.csv`` whose growth in n is fitted by a power law."""

# The p value for the exponent 1/4 is left out: that hypothesis is about text, not about attacks.
_FIT_COLUMNS = ("layer", "head", "series", *(f.name for f in fields(Exponent) if f.name != "quarter"))


@dataclass(frozen=True)
class AttackOutputs:
    """The files written by :func:`write_attack_outputs`, and the tables in them.

    ``identity`` has the settings that all attacks in the store share, and the name and fingerprint of the
    model or parameter file. ``summary`` and ``exponents`` come from :func:`summary` and :func:`fits`.
    ``figures`` has each figure as PNG and PDF, ``files`` the path of each table by its name.
    """

    identity: dict[str, Any]
    summary: pd.DataFrame
    exponents: pd.DataFrame
    figures: list[Files]
    files: dict[str, Path]


def summary(attacks: pd.DataFrame) -> pd.DataFrame:
    """Summarise attacks in a table with one row for each attention (a layer or a head) and each length.

    Parameters
    ----------
    attacks
        The rows of :class:`~howsmooth.study.records.Attack`, in any order.

    Returns
    -------
    pandas.DataFrame
        A table with :data:`SUMMARY_COLUMNS`. ``tokens`` is the constant at the given tokens, and
        ``tokens_norm`` their largest norm: beyond ``radius`` they lie outside of the ball and count nowhere
        else. ``paper`` is the constant at the paper's two-cluster tokens, for several heads the largest of
        them. ``found`` is the largest constant found in the ball by any method. Values that were not computed
        are NaN. ``upper`` is infinite if the bound overflows.

    """
    rows = [
        {**dict(zip(ATTACK_PLACE, place, strict=True)), **_summary_row(group)}
        for place, group in attacks.groupby(list(ATTACK_PLACE), dropna=False, sort=True)
    ]
    return pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS)).astype({"head": "Int64"})


def _summary_row(group: pd.DataFrame) -> dict[str, Any]:
    """Return the row of ``summary.csv`` for one layer or head and one length, from the rows of its attack."""
    tokens, built, ascent, uppers = (group[group["kind"] == kind] for kind in ATTACK_KINDS)
    kept = group[group["file"].notna()].iloc[0]
    log_upper = float(uppers["log_value"].max())
    found = float(kept["value"])
    paper = float(built[built["name"].str.fullmatch(r"two_cluster(, head \d+)?")]["value"].max())
    return {
        "scope": kept["scope"],
        "masking": kept["masking"],
        "radius": kept["radius"],
        "tokens": float(tokens["value"].max()),
        "tokens_norm": float(tokens["radius_max"].max()),
        "paper": paper,
        "construction": float(built["value"].max()),
        "construction_by": str(built["name"].iloc[int(built["value"].argmax())]) if len(built) else "",
        "ascent": float(ascent["value"].max()),
        "found": found,
        "found_by": str(kept["name"]),
        "converged": bool(kept["converged"]),
        "upper": math.exp(log_upper) if log_upper < math.log(sys.float_info.max) else math.inf,
        "upper_by": str(uppers["name"].iloc[0]) if len(uppers) else "",
        "found_to_paper": found / paper if paper > 0 else math.nan,
        "found_to_upper": math.exp(math.log(found) - log_upper) if found > 0 else math.nan,
        "log_upper": log_upper,
        "file": kept["file"],
    }


def fits(table: pd.DataFrame) -> pd.DataFrame:
    """For each layer or head, fit a power law in the length n to each summary column named in :data:`SERIES`.

    The columns are the largest constants found, the constants at the paper's tokens, and the upper bounds.

    Returns
    -------
    pandas.DataFrame
        A table with the columns ``layer``, ``head`` and ``series``, and the fields of
        :class:`~howsmooth.study.exponents.Exponent` except ``quarter``.

    """
    rows = []
    for series in SERIES:
        finite = table[np.isfinite(table[series])]
        usable = finite.assign(usable=finite["converged"] if series == "found" else True)
        rows += [
            {**names, "series": series, **asdict(fit)}
            for names, _, fit in fitted_groups(usable, ("layer", "head"), series, "usable")
        ]
    found = pd.DataFrame(rows, columns=list(_FIT_COLUMNS)).astype({"head": "Int64"})
    return found.sort_values(["layer", "head"], kind="stable", ignore_index=True)


def write_attack_outputs(folder: str | os.PathLike[str], listener: Listener = SILENT) -> AttackOutputs:
    """Write the tables and figures of attacks into the folder of their store.

    Raises
    ------
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    folder = Path(folder)
    listener.phase("Drawing figures")
    with Store.open(folder, write=False) as store:
        identity = store.identity(ATTACK)
        rows = store.table(Attack, (*ATTACK_PLACE, "kind", "name")).drop(columns="run")
    table = summary(rows)
    exponents = fits(table)
    tables = {"attacks": rows, "summary": table, "exponents": exponents}
    files = {name: write_table(content, folder, f"{name}.csv") for name, content in tables.items()}
    with written_beside(folder, "attacks"):
        figures = draw_attacks(str(identity["source"]), table, folder / "figures", listener)
    return AttackOutputs(identity, table, exponents, figures, files)
