"""Draw curves and points into panels. Most results are drawn in this way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from howsmooth.results.drawing import GREY, Figure, literal, new_figure, set_axis

__all__ = ["DASHED", "SOLID", "Curve", "Dashes", "Panel", "add_legend", "draw"]

Dashes = tuple[float, tuple[float, ...]]
SOLID: Dashes = (0.0, ())
DASHED: Dashes = (0.0, (4.0, 2.0))

_MOST_NAMES = 64


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve in a panel, drawn as dots if ``mark`` is given, and as a line if ``dashes`` is given.

    A curve without both is invisible, but the limits of the axes include it. A curve without a finite y is
    not drawn. ``x`` and ``y`` have shape (points,), and so has ``filled`` unless it is one value for all
    dots; ``colour`` is one colour, or one for each dot. ``spread`` is a pair of the smallest and the largest
    values at each point; the pair is drawn as bars at dots, and as a shaded band around a line. ``spans``
    says whether the limits of a logarithmic axis include the whole curve; otherwise the curve may be cut off.
    ``fit`` marks a fitted line, which is drawn above the dots; a line with a ``halo`` has a white border and
    is drawn below them.
    """

    x: Sequence[float] | pd.Series | np.ndarray
    y: Sequence[float] | pd.Series | np.ndarray
    label: str = ""
    colour: Any = GREY
    mark: str = ""
    dashes: Dashes | None = None
    size: float = 10
    alpha: float | None = None
    filled: pd.Series | bool = True
    spread: tuple[pd.Series, pd.Series] | None = None
    spans: bool = True
    fit: bool = False
    halo: bool = False

    def draw(self, axis: Axes) -> None:
        """Draw the curve on the given axes. Dots are drawn below fitted lines and above all other lines."""
        x, y = np.asarray(self.x, dtype=float), np.asarray(self.y, dtype=float)
        if not np.isfinite(y).any():
            return
        label = self.label or None
        if self.spread:
            low, high = (np.where(np.isfinite(y), end, math.nan) for end in self.spread)
            if self.mark:
                bars = GREY if isinstance(self.colour, str) else self.colour
                axis.vlines(x, low, high, colors=bars, linewidth=0.6, zorder=3)
            else:
                axis.fill_between(x, low, high, color=self.colour, alpha=0.18, linewidth=0, zorder=1)
        if self.dashes is not None:
            width, above = (1.3, 5) if self.fit else (0.5 if self.mark else 0.9, 2)
            own = None if self.mark else label
            line: dict[str, Any] = {"color": self.colour, "linestyle": self.dashes, "linewidth": width}
            if self.halo:
                above, line["path_effects"] = 3, [Stroke(linewidth=width + 1.6, foreground="white"), Normal()]
            axis.plot(x, y, label=own, alpha=self.alpha, zorder=above, **line)
        if self.mark:
            edges = np.broadcast_to(to_rgba_array(self.colour, self.alpha), (len(y), 4))
            faces = np.where(np.broadcast_to(self.filled, y.shape)[:, None], edges, 0.0)
            look: Any = {"color": edges} if self.mark in "x+" else {"facecolors": faces, "edgecolors": edges}
            dots: dict[str, Any] = {"s": self.size, "marker": self.mark, "linewidths": 0.6}
            axis.scatter(x, y, label=label, zorder=4, **dots, **look)


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes with its curves and title.

    ``x`` and ``y`` are the labels of the axes, which have scales and limits.

    A scale is one of four: ``log``; ``lengths``, which is logarithmic with integer ticks; ``decades``, whose
    values are logarithms to base ten; and ``linear``. ``limits`` are the left, right, bottom and top limits
    of axes that are not logarithmic; matplotlib chooses them by default. ``verticals`` are the positions of
    vertical lines. ``names`` are the labels of the places 0, 1, 2 and so on of a linear x axis.
    """

    curves: Sequence[Curve]
    title: str = ""
    x: str = "sequence length $n$"
    y: str = "local Lipschitz constant"
    scales: tuple[str, str] = ("lengths", "log")
    limits: tuple[float, float, float, float] | None = None
    verticals: Sequence[float] = ()
    names: Sequence[str] = ()

    def draw(self, axis: Axes, below: Sequence[Panel] = (), beside: Sequence[Panel] = ()) -> None:
        """Draw the panel. Panels in ``below`` share its x axis, and panels in ``beside`` its y axis."""
        for curve in self.curves:
            curve.draw(axis)
        for place in self.verticals:
            axis.axvline(place, color="0.6", linewidth=0.7, zorder=1)
        _scale(axis, "x", self, below or [self])
        _scale(axis, "y", self, beside or [self])
        axis.set(title=self.title, xlabel=self.x, ylabel=self.y)
        if self.limits:
            axis.axis(self.limits)


def draw(
    panels: Sequence[Sequence[Panel]],
    size: tuple[float, float],
    *,
    sharex: bool | Literal["all"] = False,
    sharey: bool | Literal["all"] = False,
) -> tuple[Figure, np.ndarray]:
    """Draw rows of panels into a new figure of the given ``size`` in inches. The last row may be shorter.
    Return the figure and its axes, an array (rows, columns).

    With ``sharex`` the panels of a column share the x axis, with ``sharey`` those of a row the y axis, and
    with ``"all"`` all panels.
    """
    down, across = len(panels), len(panels[0])
    canvas = new_figure(*size)
    shared: dict[str, Any] = {
        "sharex": "col" if sharex is True else sharex,
        "sharey": "row" if sharey is True else sharey,
    }
    axes: Any = canvas.subplots(down, across, squeeze=False, **shared)
    every = [panel for row in panels for panel in row]
    for (i, j), axis in np.ndenumerate(axes):
        if j >= len(panels[i]):
            axis.set_visible(False)
            continue
        panel = panels[i][j]
        below = [row[j] for row in panels if j < len(row)]
        beside = every if sharey == "all" else panels[i] if sharey else [panel]
        panel.draw(axis, every if sharex == "all" else below if sharex else [panel], beside)
        if sharex and panel is not below[-1]:
            axis.xaxis.label.set_visible(False)
        elif sharex:
            axis.tick_params(labelbottom=True)  # the last of its column, also above a gap
        if j and panel.y == panels[i][j - 1].y:
            axis.yaxis.label.set_visible(False)
    return canvas, axes


def add_legend(figure: Figure, columns: int, *, above: bool = False) -> list[str]:
    """Add a legend with each label once, above or below the panels; return the labels."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    look: dict[str, Any] = {"loc": "outside upper center" if above else "outside lower center"}
    figure.legend(list(found.values()), list(found), **look, ncols=columns, handlelength=2.2)
    return list(found)


def _scale(axis: Axes, which: Literal["x", "y"], panel: Panel, panels: Sequence[Panel]) -> None:
    scale = panel.scales[0 if which == "x" else 1]
    if which == "x" and panel.names:
        step = 1 if len(panel.names) <= _MOST_NAMES else -(-len(panel.names) // _MOST_NAMES)
        names = [literal(name) for name in panel.names[::step]]
        # Names are wider than a step, so that they are turned around their ends.
        axis.set_xticks(
            range(0, len(panel.names), step), names, rotation=60, ha="right", rotation_mode="anchor"
        )
        return
    if scale in ("log", "lengths"):
        curves = [curve for panel in panels for curve in panel.curves if curve.spans]
        parts: list[Any] = [curve.x if which == "x" else curve.y for curve in curves]
        if which == "y":
            parts += [end for curve in curves for end in curve.spread or ()]
        values = np.concatenate([np.asarray(part, dtype=float) for part in parts] or [np.array([])])
        set_axis(axis, which, pd.Series(values[np.isfinite(values)]), whole=scale == "lengths")
        return
    if scale == "decades":
        target = axis.xaxis if which == "x" else axis.yaxis
        target.set_major_locator(MaxNLocator(nbins=8, integer=True))
        target.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{value:.0f}}}$"))
    if scale == "decades" or which == "y":
        axis.grid(visible=True, which="major", axis=which, linewidth=0.4, color="0.88", zorder=0)
