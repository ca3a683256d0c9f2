"""The published quantity beside the corrected one: what is measured, and the rows of a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from howsmooth.study.records import PUBLISHED_COLUMNS
from howsmooth.study.store import Store

__all__ = ["CORRECTED", "FILE", "PUBLISHED", "PUBLISHED_COLUMNS", "quantities", "read_rows"]

FILE = "published.csv"
CORRECTED, PUBLISHED = "corrected", "as published"


def quantities(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return what is measured for these items: names, each with the items in effect."""
    single = {f"only {item}": (item,) for item in items} if len(items) > 1 else {}
    return {CORRECTED: (), **single, PUBLISHED: tuple(items)}


def read_rows(folder: Path) -> pd.DataFrame:
    """Read the published values of the store in a folder, in the columns of ``published.csv``.

    Raises
    ------
    StoreError
        If there is no store, or it cannot be read.

    """
    with Store.open(folder, write=False) as store:
        return store.contents().published[list(PUBLISHED_COLUMNS)]
