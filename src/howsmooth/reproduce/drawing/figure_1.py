"""Figure 1, drawn from the stores of its columns; nothing here measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from howsmooth.reproduce.drawing.panels import Panel, panel_table, panel_words, quarter_line, read_panels
from howsmooth.reproduce.drawing.paper import PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture
from howsmooth.reproduce.words import interval, power
from howsmooth.study.exponents import QUARTER, Exponent
from howsmooth.study.figures.style import (
    COLOURS,
    FIT_COLOUR,
    GREY,
    literal,
    new_figure,
    set_axis,
    set_bar_ticks,
)
from howsmooth.study.names import decimal, readable

__all__ = ["draw"]

_PUBLISHED_COLOUR = "#e07b00"
_MOST_ACROSS = 3


def draw(folder: Path) -> Finding:
    """Draw the figure from what ``folder`` holds, and say what is seen in it.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    columns, made = read_panels(folder)
    with rc_context(PAPER):
        pictures = [
            _draw(columns[first : first + _MOST_ACROSS], folder, first // _MOST_ACROSS)
            for first in range(0, len(columns), _MOST_ACROSS)
        ]
    panels = [panel for column in columns for panel in column]
    return Finding(pictures, panel_words(panels), [("Exponents of the panels", panel_table(panels))], made)


# ---- the picture


def _draw(columns: list[list[Panel]], folder: Path, number: int) -> Picture:
    across, down = len(columns), len(columns[0])
    figure = new_figure(WIDTH if across > 1 else 0.55 * WIDTH, 1.15 + 1.75 * down)
    axes = figure.subplots(down, across, squeeze=False, sharex="col")
    for place, column in enumerate(columns):
        norm = _radius_norm(pd.concat([panel.drawn["radius_mean"] for panel in column]))
        for axis, panel in zip(axes[:, place], column, strict=True):
            _draw_panel(axis, panel, norm)
        axes[0, place].set_title(literal(_broken(column[0])) + "\n" + axes[0, place].get_title())
        axes[-1, place].set_xlabel("sequence length $n$")
        bar = figure.colorbar(
            ScalarMappable(norm, COLOURS), ax=list(axes[:, place]), location="bottom", aspect=32, pad=0.02
        )
        set_bar_ticks(bar, norm)
        bar.set_label("mean radius")
        bar.ax.tick_params(width=0.5, length=2)
    for axis, panel in zip(axes[:, 0], columns[0], strict=True):
        axis.set_ylabel(f"{literal(readable(panel.text, 30))}\nlocal Lipschitz constant")
    figure.legend(handles=_handles(columns), loc="outside upper center", ncols=4, handlelength=2.4)
    stem = "figure-1" if number == 0 else f"figure-1-{number + 1}"
    names = "; ".join(column[0].name for column in columns)
    pdf, png = save_picture(figure, folder, stem, f"Figure 1: {names}")
    alt = (
        f"Scatter plots of the local Lipschitz constant against the sequence length on log axes, coloured by "
        f"the mean radius, a column for each of {names}, a row for each text. "
        + " ".join(
            f"{panel.name} on {readable(panel.text)}: {power(panel.fit)}." for c in columns for panel in c
        )
    )
    caption = (
        "The local Lipschitz constant of attention against the length, coloured by the mean radius of the "
        "tokens. Above each panel: the fitted exponent with its 95 % interval."
    )
    return Picture(pdf, png, alt, caption)


def _draw_panel(axis: Axes, panel: Panel, norm: Normalize) -> None:
    rows, fit = panel.drawn, panel.fit
    values = [rows["lipschitz"]]
    words = (
        "no exponent"
        if fit.note
        else f"$n^{{{decimal(fit.slope, 2)}}}$ [{interval(fit).replace(' to ', ', ')}]"
    )
    if panel.published is not None and panel.published_fit is not None:
        theirs, line = panel.published[panel.published["lipschitz"] > 0], panel.published_fit
        axis.scatter(
            theirs["n"], theirs["lipschitz"], s=7, marker="^", facecolors="none",
            edgecolors=_PUBLISHED_COLOUR, linewidths=0.4, alpha=0.7, zorder=1,
        )  # fmt: skip
        values.append(theirs["lipschitz"])
        if not line.note:
            _line(axis, line, color=_PUBLISHED_COLOUR, zorder=3)
            words += (
                f"; as published $n^{{{decimal(line.slope, 2)}}}$ [{interval(line).replace(' to ', ', ')}]"
            )
    axis.scatter(
        rows["n"], rows["lipschitz"], c=rows["radius_mean"], cmap=COLOURS, norm=norm, s=6, linewidths=0,
        alpha=0.85, zorder=2, rasterized=len(rows) > 5000,
    )  # fmt: skip
    if not fit.note:
        _line(axis, fit, color=FIT_COLOUR, zorder=5)
        factor, _ = quarter_line(rows["n"].to_numpy(), rows["lipschitz"].to_numpy())
        ends = np.array([fit.n_min, fit.n_max], dtype=float)
        values.append(pd.Series(factor * ends**QUARTER))
        axis.plot(ends, factor * ends**QUARTER, color="black", linestyle=(0, (4, 2)), linewidth=0.9, zorder=4)
    axis.set_title(words, fontsize=7 if len(words) < 50 else 5.6)
    set_axis(axis, "x", rows["n"], whole=True)
    set_axis(axis, "y", pd.concat(values))


def _line(axis: Axes, fit: Exponent, **how: Any) -> None:
    ends = [float(fit.n_min), float(fit.n_max)]
    axis.plot(ends, [fit.at(n) for n in ends], linewidth=1.3, **how)


def _broken(panel: Panel) -> str:
    return f"{readable(panel.model, 34)}\nlayer {panel.layer}"


def _handles(columns: list[list[Panel]]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=GREY, marker="o", markersize=2.5, linestyle="none", label="a sequence"),
        Line2D([], [], color=FIT_COLOUR, linewidth=1.3, label="fitted power"),
        Line2D(
            [], [], color="black", linestyle=(0, (4, 2)), linewidth=0.9, label=r"$c\,n^{1/4}$, $c$ fitted"
        ),
    ]
    if any(panel.published is not None for column in columns for panel in column):
        handles.append(
            Line2D([], [], color=_PUBLISHED_COLOUR, marker="^", markersize=3, markerfacecolor="none",
                   linewidth=1.0, label="as published")
        )  # fmt: skip
    return handles


def _radius_norm(radii: pd.Series) -> Normalize:
    """Span the radii, at least 2 %: those of a norm layer differ by rounding, which is no colour."""
    if radii.empty:
        return Normalize(0.0, 1.0)
    low, high = float(radii.min()), float(radii.max())
    middle, half = (low + high) / 2, max((high - low) / 2, 0.01 * abs(high + low) / 2, 1e-12)
    return Normalize(middle - half, middle + half)
