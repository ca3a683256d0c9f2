"""Split measurements by layer and head, fit an exponent to each part, and draw one panel for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth.study.exponents import Exponent, fitted_groups
from howsmooth.study.figures.drawing import FIT_COLOUR, GREY, new_figure
from howsmooth.study.text_formatting import decimal, place_in_words

__all__ = ["Part", "draw_overview", "parts_of", "range_of_exponents"]

_FEW_COLUMNS = 4


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of a table that belong to one layer or one head, and the exponent fitted to them."""

    layer: int
    head: int | None
    rows: pd.DataFrame
    fit: Exponent

    @property
    def name(self) -> str:
        """A phrase that names the layer and the head of these rows, such as "layer 3, head 1"."""
        return place_in_words(self.layer, self.head)

    @property
    def stem(self) -> list[str]:
        """The layer and head as parts of a file name."""
        return [f"layer-{self.layer:02d}", *([] if self.head is None else [f"head-{self.head:02d}"])]


def parts_of(table: pd.DataFrame, value: str) -> list[Part]:
    """Split a table by layer and head, and fit the exponents of the constants in the column ``value``."""
    return [
        Part(int(names["layer"]), None if pd.isna(names["head"]) else int(names["head"]), rows, fit)
        for names, rows, fit in fitted_groups(table, ("layer", "head"), value)
    ]


def draw_overview(
    parts: Sequence[Part], draw: Callable[[Axes, Part], None], unit: str, most_columns: int
) -> Figure:
    """Draw a small panel for each layer or head, with its exponent.

    ``draw`` draws one part on given axes, and sets the limits. ``unit`` is the unit of the length, such as
    "tokens". At most ``most_columns`` heads are side by side; layers are drawn in at most four columns.
    """
    heads = len({part.head for part in parts})
    columns = min(heads, most_columns) if heads > 1 else min(len(parts), _FEW_COLUMNS)
    rows = math.ceil(len(parts) / columns)
    width = 2.3 if columns <= _FEW_COLUMNS else 1.7
    figure = new_figure(1.6 + width * columns, 1.3 + 2.0 * rows)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in axes[len(parts) :]:
        axis.set_visible(False)
    axes = axes[: len(parts)]
    # If the last row is not full, the panels above its gaps are the lowest of their columns.
    for axis in axes[-columns:]:
        axis.tick_params(labelbottom=True)
        axis.set_xlabel(f"length n ({unit})")
    for axis, part in zip(axes, parts, strict=True):
        draw(axis, part)
        axis.set_title(part.name, pad=4)
        axis.text(
            0.04,
            0.96,
            "no exponent" if part.fit.note else f"{decimal(part.fit.slope, 3)} {part.fit.ends()}",
            transform=axis.transAxes,
            va="top",
            fontsize=8.5 if columns <= 8 else 7.5,
            color=GREY if part.fit.note else FIT_COLOUR,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
        )
    figure.supylabel("local Lipschitz constant", fontsize=10)
    return figure


def range_of_exponents(parts: Sequence[Part]) -> str:
    """Return a sentence with the smallest and the largest exponent."""
    found = [part.fit.slope for part in parts if not part.fit.note]
    if not found:
        return "No exponent could be fitted."
    return f"Fitted exponents from {decimal(min(found), 3)} to {decimal(max(found), 3)}."
