"""What the figures' pictures share: curves in panels, their axes and legend, files for print and screen."""

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

from howsmooth.paper.units import writing
from howsmooth.study.exponents import Exponent
from howsmooth.study.figures.style import GREY, new_figure, save, set_axis

__all__ = [
    "BLACK", "BLUE", "DASHDOT", "DASHED", "DOTTED", "GREY", "LOOKS", "ORANGE", "PAPER", "RED", "SOLID",
    "TEAL", "VIOLET", "Curve", "Panel", "Picture", "draw", "fit_factor", "fitted", "lines", "picture",
    "sheets", "with_slope",
]  # fmt: skip

_WIDTH, _NARROW = 6.75, 3.7
"""Inches of a picture: of a page with two columns, and of a picture with one panel across."""

_PIXELS_AN_INCH = 110
"""On the page, where a picture is a little larger than on paper."""

VIOLET, ORANGE, TEAL, BLUE, RED, BLACK = "#440154", "#e07b00", "#21918c", "#3b528b", "#c1121f", "0.15"
LOOKS = ((VIOLET, "o"), (ORANGE, "^"), (TEAL, "s"), (BLUE, "D"), ("#7f7f7f", "v"))
"""Colours and marks of a family of curves, told apart without colour too."""

Dashes = tuple[float, tuple[float, ...]]
SOLID: Dashes = (0.0, ())
DASHED: Dashes = (0.0, (4.0, 2.0))
DOTTED: Dashes = (0.0, (1.0, 1.2))
DASHDOT: Dashes = (0.0, (6.0, 1.5, 1.0, 1.5))

PAPER: dict[Any, Any] = {
    "font.family": "serif",
    "font.serif": ["STIX Two Text", "STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "lines.linewidth": 0.9,
    "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
    "savefig.dpi": 220,
}
"""The look of the paper's figures, small, serif, black on white; for ``matplotlib.rc_context``."""


@dataclass(frozen=True)
class Picture:
    """A drawn figure: its two files, its title, words for who does not see it, and pixels across the page."""

    pdf: Path
    png: Path
    title: str
    alt: str
    width: int


@dataclass(frozen=True, eq=False)
class Curve:
    """Values against a length, a radius or a layer: dots if it has a mark, a line if it has dashes.

    With neither it is not seen, and only has the axes make room for it.

    Attributes
    ----------
    x, y
        Places, each of shape (points,). A curve without a finite value is not drawn.
    label
        For the legend; empty for none.
    colour, mark, dashes
        As matplotlib has them.
    size, alpha
        Of a dot in square points, and its opacity.
    filled
        All dots, none, or which, of shape (points,); the others are hollow.
    spread
        Smallest and largest values around the dots, for bars, or around the line, for a shade.
    spans
        Whether a log axis must show all of it; else it is cut where others end.
    fit
        Whether it is a line fitted to dots, which is drawn above these.

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
        """Draw it; dots are above all lines."""
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
            axis.plot(
                x, y, color=self.colour, linestyle=self.dashes, linewidth=width, alpha=self.alpha, label=own,
                zorder=above,
            )  # fmt: skip
        if self.mark:
            faces = np.where(np.broadcast_to(self.filled, y.shape), self.colour, "none")
            kind: dict[str, Any] = {"facecolors": faces, "edgecolors": self.colour}
            if self.mark in "x+":
                kind = {"color": self.colour}
            axis.scatter(
                x, y, s=self.size, marker=self.mark, linewidths=0.6, alpha=self.alpha, zorder=4, label=label,
                **kind,
            )  # fmt: skip


def fit_factor(x: np.ndarray, y: np.ndarray, slope: float) -> tuple[float, float]:
    """Fit c · x^slope by least squares of the logarithms; return c and the standard deviation around it."""
    residual = np.log(y) - slope * np.log(x)
    return math.exp(float(residual.mean())), float(residual.std(ddof=1)) if len(x) > 1 else math.nan


def lines(
    x: pd.Series, rows: pd.DataFrame, *columns: tuple[str, str, Dashes, str], spans: bool = False
) -> list[Curve]:
    """Give columns of a table, with their colours, dashes and labels, as lines; axes may cut them."""
    return [
        Curve(x, rows[name], label, colour, dashes=dashes, spans=spans)
        for name, colour, dashes, label in columns
    ]


def fitted(fit: Exponent, colour: str, label: str = "", dashes: Dashes = SOLID) -> Iterator[Curve]:
    """Give the line of an exponent from its shortest to its longest sequence, if there is one."""
    if not fit.note:
        ends = [fit.n_min, fit.n_max]
        yield Curve(ends, [fit.at(n) for n in ends], label, colour, dashes=dashes, fit=True)


def with_slope(
    rows: pd.DataFrame, x: str, y: str, slope: float, label: str, colour: str, dashes: Dashes = DASHED
) -> Iterator[Curve]:
    """Give the line c · x^slope through two columns of a table, if they have two places that are positive."""
    there = rows[(rows[x] > 0) & (rows[y] > 0)]
    if there[x].nunique() > 1:
        factor, _ = fit_factor(there[x].to_numpy(np.float64), there[y].to_numpy(np.float64), slope)
        ends = [float(there[x].min()), float(there[x].max())]
        yield Curve(ends, [factor * end**slope for end in ends], label, colour, dashes=dashes, fit=True)


@dataclass(frozen=True, eq=False)
class Panel:
    """Curves in one pair of axes.

    Attributes
    ----------
    curves
        What is drawn.
    title, x, y
        Words above it and at its axes.
    scales
        Of both axes: ``log``; ``lengths``, a log scale whose ticks are whole numbers; ``decades``, where the
        values are powers of ten; ``linear``.
    limits
        Of axes that are not log: left, right, bottom and top. Else matplotlib chooses.
    verticals
        Places of vertical lines.

    """

    curves: Sequence[Curve]
    title: str = ""
    x: str = "sequence length $n$"
    y: str = "local Lipschitz constant"
    scales: tuple[str, str] = ("lengths", "log")
    limits: tuple[float, float, float, float] | None = None
    verticals: Sequence[float] = ()


def sheets(items: Sequence[Any], most: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Divide what does not fit beside each other into pictures: the end of a file's name, and its items."""
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
    """Draw rows of panels.

    Parameters
    ----------
    panels
        From above; the last row may be shorter than the others.
    height
        In inches.
    wide
        Whether a picture with one panel across is as wide as others.
    sharex, sharey
        Whether the panels of a column, and of a row, have one axis.

    Returns
    -------
    tuple
        The canvas, and the axes of the panels, (rows, columns), for what is more than curves.

    """
    down, across = len(panels), len(panels[0])
    canvas = new_figure(_WIDTH if wide or across > 1 else _NARROW, height)
    axes: Any = canvas.subplots(
        down, across, squeeze=False, sharex="col" if sharex else False, sharey="row" if sharey else False
    )
    for (i, j), axis in np.ndenumerate(axes):
        if j >= len(panels[i]):
            axis.set_visible(False)
            continue
        panel = panels[i][j]
        for curve in panel.curves:
            curve.draw(axis)
        for place in panel.verticals:
            axis.axvline(place, color="0.6", linewidth=0.7, linestyle=DOTTED, zorder=1)
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
    """Give an axis its scale, on log scales with room for the curves of all panels that share it."""
    if scale in ("log", "lengths"):
        set_axis(axis, which, _values(panels, which), whole=scale == "lengths")
        return
    if scale == "decades":
        target = axis.xaxis if which == "x" else axis.yaxis
        target.set_major_locator(MaxNLocator(nbins=8, integer=True))
        target.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{value:.0f}}}$"))
    if scale == "decades" or which == "y":
        axis.grid(visible=True, which="major", axis=which, linewidth=0.4, color="0.88", zorder=0)


def _values(panels: Sequence[Panel], which: str) -> pd.Series:
    parts: list[Any] = [[]]
    for curve in (curve for panel in panels for curve in panel.curves if curve.spans):
        parts += [curve.x] if which == "x" else [curve.y, *(curve.spread or ())]
    values = np.concatenate([np.asarray(part, dtype=float) for part in parts])
    return pd.Series(values[np.isfinite(values)])


def picture(
    canvas: Canvas, folder: Path, stem: str, title: str, *, legend: int = 4, above: bool = False
) -> Picture:
    """Put all labels into one legend, each once, and write a canvas as PDF and PNG into a folder.

    Parameters
    ----------
    canvas
        From :func:`draw`.
    folder, stem
        Where the files are, and their name without its end.
    title
        Of the picture, as the page and the files have it.
    legend
        Columns of the legend.
    above
        Whether it is above the panels.

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
    # Scales of colours have no title.
    titled = [axis for axis in canvas.axes if axis.get_title()]
    x, y, titles = (
        _plain(list(filter(None, (getattr(axis, get)() for axis in titled))))
        for get in ("get_xlabel", "get_ylabel", "get_title")
    )
    alt = f"{title}. Axes: {y or 'names'}, against {x}. Panels: {titles}. Drawn are: {_plain(list(found))}."
    with writing(folder):
        png, pdf = save(canvas, folder, stem, title)
    return Picture(pdf, png, title, alt, round(canvas.get_figwidth() * _PIXELS_AN_INCH))


def _plain(words: list[str]) -> str:
    """Join words, each once, without the signs that they have for matplotlib."""
    joined = "; ".join(dict.fromkeys(words)).replace("\\,", " ").replace("\n", ", ")
    return re.sub(" +", " ", re.sub(r"[${}\\]", "", re.sub(r"\\([a-z]+)", r" \1 ", joined)))
