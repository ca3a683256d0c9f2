"""Draw and write the pictures of the paper's figures, and word the numbers in their labels and sentences."""

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
from howsmooth.study.exponents import LEVEL, Correlation, Exponent
from howsmooth.words import decimal

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
    "between",
    "correlation_label",
    "draw_panels",
    "exponentials",
    "fitted",
    "lines",
    "power",
    "power_label",
    "sheets",
    "with_slope",
    "write_picture",
]  # fmt: skip

_WIDTH, _NARROW = 6.75, 3.7
"""Widths in inches: of a page with two columns, and of a picture with a single panel in a row."""

_LARGEST = 700.0  # a logarithm whose number does not overflow
_PIXELS_AN_INCH = 110  # on the HTML page, where a picture is slightly larger than in print

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
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.5),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "figure.titlesize": 9,
    "lines.linewidth": 0.9,
    "savefig.dpi": 220,
}
"""The style of the paper's figures for ``matplotlib.rc_context``: small serif type, black on white."""


def lines(x: pd.Series, rows: pd.DataFrame, *columns: tuple[str, str, Dashes, str]) -> list[Curve]:
    """Return a line against ``x`` for each of the given columns (name, colour, dashes, label) of a table."""
    return [
        Curve(x, rows[name], label, colour, dashes=dashes, spans=False)
        for name, colour, dashes, label in columns
    ]


def fitted(fit: Exponent, colour: str, label: str = "", dashes: Dashes = SOLID) -> Iterator[Curve]:
    """Yield the line of a fitted power law over the fitted lengths; yield nothing if the fit failed."""
    if not fit.note:
        ends = [fit.n_min, fit.n_max]
        yield Curve(ends, [fit.at(n) for n in ends], label, colour, dashes=dashes, fit=True)


def with_slope(
    rows: pd.DataFrame, x: str, y: str, slope: float, label: str, colour: str, dashes: Dashes = DASHED
) -> Iterator[Curve]:
    """Yield the line c · x^slope, where c is fitted to two columns of a table by least squares of the
    logarithms. Yield nothing if the positive points have fewer than two different x.
    """
    there = rows[(rows[x] > 0) & (rows[y] > 0)]
    if there[x].nunique() > 1:
        factor = math.exp(float((np.log(there[y]) - slope * np.log(there[x])).mean()))
        ends = [float(there[x].min()), float(there[x].max())]
        yield Curve(ends, [factor * end**slope for end in ends], label, colour, dashes=dashes, fit=True)


def sheets(items: Sequence[Any], most: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield groups of at most ``most`` items, each with a suffix for the name of its file."""
    for first in range(0, len(items), most):
        yield f"-{first // most + 1}" if first else "", items[first : first + most]


def draw_panels(
    panels: Sequence[Sequence[Panel]],
    height: float,
    *,
    wide: bool = False,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Canvas, np.ndarray]:
    """Draw rows of panels as :func:`howsmooth.results.curves.draw` does, in the width of a page. A single
    column of panels is narrower unless ``wide``.
    """
    width = _WIDTH if wide or len(panels[0]) > 1 else _NARROW
    return drawn(panels, (width, height), sharex=sharex, sharey=sharey)


def write_picture(
    canvas: Canvas, folder: Path, stem: str, title: str, *, legend: int = 4, above: bool = False
) -> Picture:
    """Add a legend of ``legend`` columns below or above the panels, and write the figure as PDF and PNG.

    ``stem`` is their name without suffix; the title stands on the HTML page and in the files' metadata. A
    StoreError is raised if a file cannot be written.
    """
    add_legend(canvas, legend, above=above)
    with written_beside(folder, "finished measurements"):
        return written(canvas, folder, stem, title, dots=_PIXELS_AN_INCH)


def power(fit: Exponent) -> str:
    """Put a fitted exponent into words, as in "n to the power 0.31 (95 % interval 0.29 to 0.33)"."""
    if fit.note:
        return f"n to no power that could be fitted ({fit.note})"
    slope, low, high = (decimal(value, 2) for value in (fit.slope, fit.low, fit.high))
    return f"n to the power {slope} ({LEVEL * 100:.0f} % interval {low} to {high})"


def power_label(fit: Exponent, *, ends: bool = True) -> str:
    """Write a fitted exponent as a matplotlib label, such as "$n^{0.31}$ [0.29, 0.33]"."""
    slope, low, high = (decimal(value, 2) for value in (fit.slope, fit.low, fit.high))
    return "no exponent" if fit.note else f"$n^{{{slope}}}$" + (f" [{low}, {high}]" if ends else "")


def correlation_label(found: Correlation) -> str:
    """Write a correlation as a matplotlib label, such as "$r = 0.31$ [0.29, 0.33]"."""
    value, low, high = (decimal(one, 2) for one in found)
    return "no correlation" if math.isnan(found.value) else f"$r = {value}$ [{low}, {high}]"


def between(values: pd.Series, say: str = "{:.3g}") -> str:
    """Put the range of some numbers into words, as in "0.3 to 1.2"; one number if all are equal."""
    low, high = (say.format(float(end)) for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def exponentials(logs: pd.Series) -> pd.Series:
    """Return the exponentials of logarithms, infinite where they overflow."""
    values = logs.to_numpy(np.float64)
    return pd.Series(np.where(values > _LARGEST, math.inf, np.exp(np.minimum(values, _LARGEST))), logs.index)
