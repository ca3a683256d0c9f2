"""What was found of each (model, text, scope): one sentence, and its figures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pandas as pd

from howsmooth.study.exponents import LEVEL
from howsmooth.study.figures import Picture
from howsmooth.study.names import decimal
from howsmooth.study.report.wording import number, place

__all__ = ["families"]

# A page with every head of a large model would be too heavy for a phone.
_MOST_INLINED = 40
_DOTS_AN_INCH = 96  # of a CSS pixel


def families(
    rows: pd.DataFrame, exponents: pd.DataFrame, pictures: Sequence[Picture]
) -> list[dict[str, Any]]:
    """List one entry a (model, text, scope): its headline, and its figures.

    Parameters
    ----------
    rows
        The measurements.
    exponents
        Fitted from them.
    pictures
        Drawn from them; their PNG files are put into the page.

    """
    found: list[dict[str, Any]] = []
    inlined = 0
    for (model, text, scope), group in rows.groupby(["model", "text", "scope"], sort=True):
        mine = [p for p in pictures if (p.model, p.text, p.scope) == (model, text, scope)]
        overviews = [picture for picture in mine if picture.overview]
        singles = [picture for picture in mine if not picture.overview]
        shown = singles[: max(0, _MOST_INLINED - inlined)]
        inlined += len(shown)
        fits = exponents[
            (exponents["model"] == model) & (exponents["text"] == text) & (exponents["scope"] == scope)
        ]
        found.append(
            {
                "model": model,
                "text": text,
                "scope": scope,
                "headline": _headline(group, fits),
                "overviews": [_image(picture) for picture in overviews],
                "singles": [_image(picture) for picture in shown],
                "open": not overviews,
                "not_shown": len(singles) - len(shown),
            }
        )
    return found


def _headline(group: pd.DataFrame, fits: pd.DataFrame) -> str:
    span = f"lengths {group['n'].min()} to {group['n'].max()}"
    values = (
        f"The constant goes from {number(group['lipschitz'].min())} to {number(group['lipschitz'].max())}"
    )
    good = fits[fits["note"] == ""].sort_values("slope")
    if good.empty:
        return f"{values} over {span}; there are too few lengths for an exponent."
    low, high = good.iloc[0], good.iloc[-1]
    if len(good) == 1:
        return (
            f"It goes like n to the power {decimal(low['slope'], 2)} ({LEVEL * 100:.0f} % interval "
            f"{decimal(low['low'], 2)} to {decimal(low['high'], 2)}) over {span}. {values}."
        )
    quarter = int((good["quarter"] >= 1 - LEVEL).sum())
    ends = decimal(low["slope"], 2), decimal(high["slope"], 2)
    powers = f"between {ends[0]} ({_place(low)}) and {ends[1]} ({_place(high)})"
    if ends[0] == ends[1]:
        powers = f"of about {ends[0]} everywhere"
    return (
        f"It goes like n to a power {powers} over {span}. {values}. "
        f"The interval of {quarter or 'none'} of the {len(good)} exponents contains 1/4."
    )


def _place(row: pd.Series) -> str:
    return place(int(row["layer"]), None if pd.isna(row["head"]) else int(row["head"]))


def _image(picture: Picture) -> dict[str, Any]:
    data = base64.b64encode(picture.png.read_bytes()).decode()
    where = "every layer" if picture.layer is None else place(picture.layer, picture.head)
    return {
        "source": f"data:image/png;base64,{data}",
        "alt": picture.alt,
        "place": where,
        "file": f"figures/{picture.pdf.name}",
        # As large as on paper, where there is room; still readable, by scrolling, where there is not.
        "width": round(picture.inches * _DOTS_AN_INCH),
        "least": round(max(min(picture.inches, 6.5), 0.55 * picture.inches) * _DOTS_AN_INCH),
    }
