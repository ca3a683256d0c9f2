"""The published quantity beside the corrected one, for the page."""

from __future__ import annotations

from typing import Any

import pandas as pd

from howsmooth.study.report.wording import records

__all__ = ["ITEM_MEANINGS", "beside", "items_of"]

ITEM_MEANINGS = {
    "output": "the output in place of the tangent: the square root of ‖Jᵀ f(X)‖ is returned",
    "block": "the residual connection and the norm count as attention",
    "unmasked": "an encoder run as a decoder is measured without its mask",
    "dropout": "dropout stays on in an untrained model",
    "stopping": "an absolute stopping rule, and at most 100 steps",
}
"""What each item of the published code changes, in a few words."""


def beside(exponents: pd.DataFrame) -> list[dict[str, Any]]:
    """List the exponents of every quantity, and mark where a new layer begins."""
    rows = records(exponents)
    last = None
    for row in rows:
        here = (row["model"], row["text"], row["layer"])
        row["first"] = here != last
        last = here
    return rows


def items_of(exponents: pd.DataFrame) -> list[tuple[str, str]]:
    """List the items that occur, each with its meaning."""
    there = {item for items in exponents["items"] for item in str(items).split(",")}
    return [(item, meaning) for item, meaning in ITEM_MEANINGS.items() if item in there]
