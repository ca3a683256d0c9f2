"""Draw the curves, panels and legends of the paper's figures, and write the figures as PDF and PNG files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.files import written_beside
from howsmooth.results.curves import DASHED, SOLID, Curve, Dashes, Panel, add_legend
from howsmooth.results.curves import draw as drawn
from howsmooth.results.drawing import GREY, STYLE, Picture
from howsmooth.results.drawing import Figure as Canvas
from howsmooth.results.drawing import picture as written
from howsmooth.study.exponents import Exponent

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
    """Draw rows of panels as :func:`howsmooth.results.curves.draw` does, in the width of a page; one panel a
    row is narrower unless ``wide``.
    """
    width = _WIDTH if wide or len(panels[0]) > 1 else _NARROW
    return drawn(panels, (width, height), sharex=sharex, sharey=sharey)


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
    add_legend(canvas, legend, above=above)
    with written_beside(folder, "finished measurements"):
        return written(canvas, folder, stem, title, dots=_PIXELS_AN_INCH)
