"""The rows of ``published.csv``: the published quantity beside the corrected one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError

__all__ = ["CORRECTED", "FILE", "PUBLISHED", "PUBLISHED_COLUMNS", "quantities", "read_rows"]

FILE = "published.csv"
CORRECTED, PUBLISHED = "corrected", "as published"

PUBLISHED_COLUMNS = (
    "model", "text", "layer", "n", "sample", "quantity", "items", "lipschitz", "lower", "upper", "settled",
    "steps", "radius_mean", "start", "seed", "map",
)  # fmt: skip
"""The columns of ``published.csv``.

``quantity`` is ``corrected``, ``only`` and an item, or ``as published``; ``items`` are the items in effect.
``lower`` and ``upper`` are empty where the published iteration measured.
"""


def quantities(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return what is measured for these items: names, each with the items in effect."""
    single = {f"only {item}": (item,) for item in items} if len(items) > 1 else {}
    return {CORRECTED: (), **single, PUBLISHED: tuple(items)}


def read_rows(folder: Path) -> pd.DataFrame:
    """Read ``published.csv``.

    Raises
    ------
    StoreError
        If it cannot be read, or is not such a file.

    """
    path = folder / FILE
    types: dict[Any, Any] = {
        "model": str, "text": str, "layer": int, "n": int, "sample": int, "quantity": str, "items": str,
        "settled": bool, "map": str,
    }  # fmt: skip
    # Python's reading of decimals is exact, so that rows written again stay what they were.
    numbers = dict.fromkeys(("lipschitz", "lower", "upper", "radius_mean"), _number)
    try:
        table = pd.read_csv(path, dtype=types, keep_default_na=False, converters=numbers)
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        why = (str(error).splitlines() or ["no reason"])[0]
        raise StoreError(
            f"{path} cannot be read as published rows: {why}. Move it away, or choose another --out."
        ) from error
    if list(table.columns) != list(PUBLISHED_COLUMNS):
        raise StoreError(
            f"{path} has other columns than published rows. Move it away, or choose another --out."
        )
    return table


def _number(text: str) -> float:
    return float(text) if text else math.nan
