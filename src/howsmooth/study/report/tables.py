"""Rows of the page's tables."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

from howsmooth.study.report.wording import records

__all__ = ["convergence", "exponent_rows", "maskings", "runs"]


def exponent_rows(exponents: pd.DataFrame) -> list[dict[str, Any]]:
    """List the exponents, heads in words."""
    rows = []
    for row in records(exponents):
        head = row["head"]
        rows.append({**row, "head": "all" if head is None else head})
    return rows


def convergence(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Say for each (model, text, scope) how many measurements converged, and how narrowly."""
    found = []
    for (model, text, scope), group in rows.groupby(["model", "text", "scope"], sort=True):
        width = (group["upper"] - group["lower"]) / group["lipschitz"].where(group["lipschitz"] > 0)
        found.append(
            {
                "model": model,
                "text": text,
                "scope": scope,
                "total": len(group),
                "converged": int(group["converged"].sum()),
                "width": float(width.median()) if width.notna().any() else math.nan,
                "widest": float(width.max()) if width.notna().any() else math.nan,
                "iterations": float(group["iterations"].median()),
            }
        )
    return found


def maskings(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """List the masks of each model."""
    pairs = rows[["model", "masking"]].drop_duplicates().sort_values(["model", "masking"])
    return [
        (str(model), ", ".join(str(name) for name in group["masking"]))
        for model, group in pairs.groupby("model", sort=True)
    ]


def runs(table: pd.DataFrame) -> list[dict[str, Any]]:
    """List the processes that measured, with their environments."""
    return [
        {**run, "environment": list(json.loads(str(run["environment"])).items())} for run in records(table)
    ]
