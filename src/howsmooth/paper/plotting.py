"""Draw the curves, panels and legends of the paper's figures, and write the figures as PDF and PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

from howsmooth.study.exponents import Exponent
from howsmooth.study.figures.drawing import GREY, STYLE, new_figure, save, set_axis
from howsmooth.study.file_writing import written_beside

__all__ = [
    "BLACK",
    "BLUE",
    "DASHDOT",
    "DASHED",
    "DOTTED",
    "GREY",
    "LOOKS",
    "ORANGE",
    "PAPER",
    "RED",
    "SOLID",
    "TEAL",
    "VIOLET",
    "Curve",
    "Panel",
    "Picture",
    "draw",
    "fit_factor",
    "fitted",
    "lines",
    "picture",
    "sheets",
    "with_slope",
]

_WIDTH, _NARROW = 6.75, 3.7
"""Widths in inches: of a page with two columns, and of a picture with a single panel in a row."""

_PIXELS_AN_INCH = 110
"""Pixels per inch on the HTML page, on which a picture is slightly larger than in print."""

VIOLET, ORANGE, TEAL, BLUE, RED, BLACK = "#440154", "#e07b00", "#21918c", "#3b528b", "#c1121f", "0.15"
LOOKS = ((VIOLET, "o"), (ORANGE, "^"), (TEAL, "s"), (BLUE, "D"), ("#7f7f7f", "v"))
"""Colours and marks of a family of curves; the marks differ too, for readers who cannot see colours."""

Dashes = tuple[float, tuple[float, ...]]
SOLID: Dashes = (0.0, ())
DASHED: Dashes = (0.0, (4.0, 2.0))
DOTTED: Dashes = (0.0, (1.0, 1.2))
DASHDOT: Dashes = (0.0, (6.0, 1.5, 1.0, 1.5))

PAPER: dict[Any, Any] = {
    **STYLE,
    "font.family": "serif",
    "font.serif": ["STIX Two Text", "STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 7,
    "figure.titlesize": 9,
    "lines.linewidth": 0.9,
    "savefig.dpi": 220,
}
"""The style of the paper's figures for ``matplotlib.rc_context``: small serif type, black on white."""


@dataclass(frozen=True)
class Picture:
    """A drawn picture: the paths of its PDF and PNG file, its title, its alternative text, and its width in
    pixels.
    """

    pdf: Path
    png: Path
    title: str
    alt: str
    width: int


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve in a panel, drawn as dots if ``mark`` is given, and as a line if ``dashes`` is given.

    A curve without both is invisible, but the limits of the axes include it. A curve without a finite y is
    not drawn. ``x`` and ``y`` have shape (points,), and so has ``filled`` unless it is one value for all
    dots. ``spread`` is a pair of the smallest and the largest values at each point; the pair is drawn as bars
    at dots, and as a shaded band around a line. ``spans`` says whether the limits of a logarithmic axis
    include the whole curve; otherwise the curve may be cut off. ``fit`` marks a fitted line, which is drawn
    above the dots.
    """

    x: Sequence[float] | pd.Series
    y: Sequence[float] | pd.Series
    label: str = ""
    colour: str = GREY
    mark: str = ""
    dashes: Dashes | None = None
    size: float = 10
    alpha: float | None = None
    filled: pd.Series | bool = True
    spread: tuple[pd.Series, pd.Series] | None = None
    spans: bool = True
    fit: bool = False

    def draw(self, axis: Axes) -> None:
        """Draw the curve on the given axes. Dots are drawn below fitted lines and above all other lines."""
        x, y = np.asarray(self.x, dtype=float), np.asarray(self.y, dtype=float)
        if not np.isfinite(y).any():
            return
        label = self.label or None
        if self.spread:
            low, high = (np.where(np.isfinite(y), end, math.nan) for end in self.spread)
            if self.mark:
                axis.vlines(x, low, high, color=GREY, linewidth=0.6, zorder=3)
            else:
                axis.fill_between(x, low, high, color=self.colour, alpha=0.18, linewidth=0, zorder=1)
        if self.dashes is not None:
            width, above = (1.3, 5) if self.fit else (0.5 if self.mark else 0.9, 2)
            own = None if self.mark else label
            line: dict[str, Any] = {"color": self.colour, "linestyle": self.dashes, "linewidth": width}
            axis.plot(x, y, label=own, alpha=self.alpha, zorder=above, **line)
        if self.mark:
            faces = np.where(np.broadcast_to(self.filled, y.shape), self.colour, "none")
            dots: dict[str, Any] = {"facecolors": faces, "edgecolors": self.colour}
            if self.mark in "x+":
                dots = {"color": self.colour}
            dots |= {"s": self.size, "marker": self.mark, "linewidths": 0.6}
            axis.scatter(x, y, label=label, alpha=self.alpha, zorder=4, **dots)


def fit_factor(x: np.ndarray, y: np.ndarray, slope: float) -> tuple[float, float]:
    """Fit the factor c of c · x^slope to y by least squares of the logarithms, and return c and the standard
    deviation of the residuals.
    """
    residual = np.log(y) - slope * np.log(x)
    return math.exp(float(residual.mean())), float(residual.std(ddof=1)) if len(x) > 1 else math.nan


def lines(x: pd.Series, rows: pd.DataFrame, *columns: tuple[str, str, Dashes, str]) -> list[Curve]:
    """Return one line for each of the given columns of a table, drawn against ``x``. Each column is given as
    a tuple (name, colour, dashes, label).
    """
    return [
        Curve(x, rows[name], label, colour, dashes=dashes, spans=False)
        for name, colour, dashes, label in columns
    ]


def fitted(fit: Exponent, colour: str, label: str = "", dashes: Dashes = SOLID) -> Iterator[Curve]:
    """Yield the line of a fitted power law, from the smallest to the largest length in the fit. Yield nothing
    if the fit failed.
    """
    if not fit.note:
        ends = [fit.n_min, fit.n_max]
        yield Curve(ends, [fit.at(n) for n in ends], label, colour, dashes=dashes, fit=True)


def with_slope(
    rows: pd.DataFrame, x: str, y: str, slope: float, label: str, colour: str, dashes: Dashes = DASHED
) -> Iterator[Curve]:
    """Yield a line of a given slope for logarithmic axes: c · x^slope, with c fitted to the columns ``x`` and
    ``y`` of a table.

    Yield nothing if the table has fewer than two different positive x.
    """
    there = rows[(rows[x] > 0) & (rows[y] > 0)]
    if there[x].nunique() > 1:
        factor, _ = fit_factor(there[x].to_numpy(np.float64), there[y].to_numpy(np.float64), slope)
        ends = [float(there[x].min()), float(there[x].max())]
        yield Curve(ends, [factor * end**slope for end in ends], label, colour, dashes=dashes, fit=True)


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes: the curves, the title, the labels ``x`` and ``y`` of the axes, their scales and
    limits.

    A scale is one of four: ``log``; ``lengths``, which is logarithmic with integer ticks; ``decades``, whose
    values are logarithms to base ten; and ``linear``. ``limits`` are the left, right, bottom and top limits
    of axes that are not logarithmic; matplotlib chooses them by default. ``verticals`` are the positions of
    vertical lines.
    """

    curves: Sequence[Curve]
    title: str = ""
    x: str = "sequence length $n$"
    y: str = "local Lipschitz constant"
    scales: tuple[str, str] = ("lengths", "log")
    limits: tuple[float, float, float, float] | None = None
    verticals: Sequence[float] = ()


def sheets(items: Sequence[Any], most: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Split items into groups of at most ``most`` items, and yield each group with a suffix for the name of
    its file.
    """
    for first in range(0, len(items), most):
        yield f"-{first // most + 1}" if first else "", items[first : first + most]


def draw(
    panels: Sequence[Sequence[Panel]],
    height: float,
    *,
    wide: bool = False,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Canvas, np.ndarray]:
    """Draw the given rows of panels into a new matplotlib figure; return the figure, and its axes as an array
    of shape (rows, columns).

    The last row may have fewer panels than the others. ``height`` is in inches. ``wide`` makes the figure as
    wide as the page if a row has a single panel. With ``sharex`` the panels of a column share the x axis, and
    with ``sharey`` the panels of a row share the y axis.
    """
    down, across = len(panels), len(panels[0])
    canvas = new_figure(_WIDTH if wide or across > 1 else _NARROW, height)
    shared: dict[str, Any] = {"sharex": "col" if sharex else False, "sharey": "row" if sharey else False}
    axes: Any = canvas.subplots(down, across, squeeze=False, **shared)
    for (i, j), axis in np.ndenumerate(axes):
        if j >= len(panels[i]):
            axis.set_visible(False)
            continue
        panel = panels[i][j]
        for curve in panel.curves:
            curve.draw(axis)
        for place in panel.verticals:
            axis.axvline(place, color="0.6", linewidth=0.7, zorder=1)
        below = [row[j] for row in panels if j < len(row)]
        _scale(axis, "x", panel.scales[0], below if sharex else [panel])
        _scale(axis, "y", panel.scales[1], panels[i] if sharey else [panel])
        axis.set_title(panel.title)
        if panel is below[-1] or not sharex:
            axis.set_xlabel(panel.x)
        if j == 0 or panel.y != panels[i][j - 1].y:
            axis.set_ylabel(panel.y)
        if panel.limits:
            axis.axis(panel.limits)
    return canvas, axes


def _scale(axis: Axes, which: Literal["x", "y"], scale: str, panels: Sequence[Panel]) -> None:
    """Set the scale of one axis. The limits of a logarithmic scale include the curves of all given panels."""
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


def picture(
    canvas: Canvas, folder: Path, stem: str, title: str, *, legend: int = 4, above: bool = False
) -> Picture:
    """Add a legend to a figure from :func:`draw`, and write the figure as PDF and PNG files into a folder.

    The legend contains each label once, has ``legend`` columns, and stands above or below the panels.
    ``stem`` is the name of the files without suffix. The title is shown on the HTML page, and is stored in
    the metadata of the files.

    Raises
    ------
    StoreError
        If a file cannot be written.

    """
    found: dict[str, Any] = {}
    for axis in canvas.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    canvas.legend(
        list(found.values()),
        list(found),
        loc="outside upper center" if above else "outside lower center",
        ncols=legend,
        handlelength=2.2,
    )
    # Axes without a title are colour bars, which the alternative text does not mention.
    titled = [axis for axis in canvas.axes if axis.get_title()]
    x, y, titles = (
        _plain(list(filter(None, (getattr(axis, get)() for axis in titled))))
        for get in ("get_xlabel", "get_ylabel", "get_title")
    )
    alt = f"{title}. Axes: {y or 'names'}, against {x}. Panels: {titles}. Drawn are: {_plain(list(found))}."
    with written_beside(folder, "finished measurements"):
        png, pdf = save(canvas, folder, stem, title)
    return Picture(pdf, png, title, alt, round(canvas.get_figwidth() * _PIXELS_AN_INCH))


def _plain(words: list[str]) -> str:
    """Join labels to one text without repetitions, and remove the markup of matplotlib formulas."""
    joined = "; ".join(dict.fromkeys(words)).replace("\\,", " ").replace("\n", ", ")
    return re.sub(" +", " ", re.sub(r"[${}\\]", "", re.sub(r"\\([a-z]+)", r" \1 ", joined)))
