"""Draw a profile as a heatmap of layers and heads."""

from __future__ import annotations

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from howsmooth.profiling.result import Profile
from howsmooth.study.figures.style import STYLE, add_colourbar, draw_cells, literal, logarithmic, new_figure
from howsmooth.study.records import plain_rows

__all__ = ["draw"]

_CELL = 0.32  # inches
_MOST_TICKS = 24


def draw(profile: Profile) -> Figure:
    """Draw a figure with one cell for each head, and a separate column for whole layers.

    Colours are logarithmic. A cell whose measurement did not converge is crossed out; an empty cell was not
    measured.
    """
    with rc_context(STYLE):
        return _drawn(profile)


def _drawn(profile: Profile) -> Figure:
    table = profile.table
    layers = sorted(table["layer"].unique())
    heads = sorted(int(head) for head in table["head"].dropna().unique())
    whole = bool(table["head"].isna().any())
    columns: list[int | None] = [*heads, *([None] if whole else [])]
    gap = 1 if heads and whole else 0  # an empty column before the whole layers
    at = {head: i + (gap if head is None else 0) for i, head in enumerate(columns)}
    values = np.full((len(layers), len(columns) + gap), np.nan)
    missed = []
    for row in plain_rows(table):
        place = layers.index(row["layer"]), at[row["head"]]
        values[place] = row["value"]
        missed += [] if row["converged"] else [place]
    width = max(4.2, 1.7 + _CELL * values.shape[1])
    figure = new_figure(width, max(2.4, 1.5 + _CELL * values.shape[0]))
    axis = figure.subplots()
    norm = logarithmic(values)
    draw_cells(axis, values, norm)
    for i, j in missed:
        axis.text(j, i, "×", ha="center", va="center", color="white")
    step = -(-len(heads) // _MOST_TICKS)
    ticks = [at[head] for head in heads[:: step or 1]] + ([at[None]] if whole else [])
    names = [str(head) for head in heads[:: step or 1]] + (["all"] if whole else [])
    axis.set_xticks(ticks, names)
    rows = -(-len(layers) // _MOST_TICKS)
    axis.yaxis.set_major_locator(FixedLocator(range(0, len(layers), rows)))
    axis.set_yticklabels([str(layer) for layer in layers[::rows]])
    axis.set(xlabel="head", ylabel="layer")
    add_colourbar(figure, axis, norm, "local Lipschitz constant")
    axis.set_title(literal(f"{profile.model}, one input of {profile.n} tokens"), pad=8)
    return figure
