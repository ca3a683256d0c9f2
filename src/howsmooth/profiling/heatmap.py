"""Draw a profile as a heatmap of layers and heads."""

from __future__ import annotations

from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from howsmooth.profiling.result import Profile
from howsmooth.study.figures.style import (
    COLOURS,
    STYLE,
    draw_cells,
    literal,
    logarithmic,
    new_figure,
    set_bar_ticks,
)
from howsmooth.study.records import plain_rows

__all__ = ["draw"]

_CELL = 0.32  # inches
_MOST_TICKS = 24
_LETTERS = 10  # letters of a title in an inch


def draw(profile: Profile) -> Figure:
    """Draw a figure with one cell for each head, and beside it a panel with one cell for each whole layer.

    Colours are logarithmic, and each panel has a scale of its own, because heads and layers are maps between
    different spaces. A cell whose measurement did not converge is crossed out; an empty cell was not
    measured.
    """
    with rc_context(STYLE):
        return _drawn(profile)


def _drawn(profile: Profile) -> Figure:
    table = profile.table
    layers = sorted(table["layer"].unique())
    of_head = table["head"].notna()
    panels = [rows for rows in (table[of_head], table[~of_head]) if len(rows)]
    columns = [max(1, rows["head"].nunique()) for rows in panels]
    width = max(4.6, _CELL * sum(columns) + 1.3 * len(panels))
    figure = new_figure(width, max(2.6, 1.6 + _CELL * len(layers)))
    # Each panel has its colour bar as a further axis, so that all cells have one size.
    ratios = [ratio for count in columns for ratio in (count, min(0.5, 0.08 * sum(columns)))]
    axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    for axis, bar, rows in zip(axes[::2], axes[1::2], panels, strict=True):
        _draw_panel(axis, bar, rows, layers)
    axes[0].set_ylabel("layer")
    title = f"{profile.model}, one input of {profile.n} tokens: local Lipschitz constants"
    figure.suptitle(literal(fill(title, int(_LETTERS * width))))
    return figure


def _draw_panel(axis: Axes, bar: Axes, rows: pd.DataFrame, layers: list[int]) -> None:
    """Draw the heads of all layers, or the layers as a whole, and their colour bar."""
    heads = sorted(int(head) for head in rows["head"].dropna().unique())
    values = np.full((len(layers), max(1, len(heads))), np.nan)
    missed = []
    for row in plain_rows(rows):
        place = layers.index(row["layer"]), heads.index(row["head"]) if heads else 0
        values[place] = row["value"]
        missed += [] if row["converged"] else [place]
    norm = logarithmic(values)
    draw_cells(axis, values, norm)
    for i, j in missed:
        axis.text(j, i, "×", ha="center", va="center", color="white")
    step = -(-len(heads) // _MOST_TICKS) or 1
    axis.set_xticks(range(0, len(heads), step), [str(head) for head in heads[::step]])
    axis.set_xlabel("head" if heads else "whole layer")
    down = -(-len(layers) // _MOST_TICKS)
    axis.yaxis.set_major_locator(FixedLocator(range(0, len(layers), down)))
    axis.set_yticklabels([str(layer) for layer in layers[::down]])
    set_bar_ticks(axis.figure.colorbar(ScalarMappable(norm, COLOURS), cax=bar), norm)
