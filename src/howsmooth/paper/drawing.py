"""What the figures' pictures share: look, lines, marks and their legend, files for print and screen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from howsmooth.paper.units import writing
from howsmooth.study.exponents import Exponent
from howsmooth.study.figures.style import FIT_COLOUR, GREY, save
from howsmooth.study.figures.style import new_figure as canvas

__all__ = [
    "BLUE", "COLUMN", "DASHDOT", "DASHED", "DOTTED", "FIT_COLOUR", "GREY", "LOOKS", "ORANGE", "PAPER",
    "SOLID", "TEAL", "VIOLET", "WIDTH", "Picture", "canvas", "dots", "legend", "lines", "picture",
    "power_line", "sheets",
]  # fmt: skip

WIDTH, COLUMN = 6.75, 3.25
"""Inches that a page of two columns has across, and one column."""

VIOLET, ORANGE, TEAL, BLUE = "#440154", "#e07b00", "#21918c", "#3b528b"
LOOKS = ((VIOLET, "o"), (ORANGE, "^"), (TEAL, "s"), (BLUE, "D"), ("#7f7f7f", "v"))
"""Colours and marks of a family of dots, told apart without colour too."""

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
    """A drawn figure: its two files, a caption for the page, and words for the reader who does not see it."""

    pdf: Path
    png: Path
    alt: str
    caption: str = ""


def sheets(items: Sequence[Any], most: int) -> Iterable[tuple[str, Sequence[Any]]]:
    """Divide what does not fit beside each other into pictures: the end of a file's name, and its items."""
    for number, first in enumerate(range(0, len(items), most)):
        yield f"-{number + 1}" if number else "", items[first : first + most]


def dots(
    axis: Axes,
    x: pd.Series,
    y: pd.Series,
    look: tuple[str, str],
    label: str = "",
    *,
    size: int = 10,
    filled: pd.Series | bool = True,
    alpha: float | None = None,
) -> None:
    """Draw dots above all lines; those that are not filled are hollow. Nothing is drawn if there are none.

    Parameters
    ----------
    axis
        Where.
    x, y
        Places, each of shape (points,).
    look
        Colour and mark.
    label
        For the legend; empty for none.
    size, alpha
        Of a dot in square points, and its opacity.
    filled
        All of them, none, or which, of shape (points,).

    """
    if not np.isfinite(y.to_numpy(np.float64)).any():
        return
    colour, marker = look
    good = np.broadcast_to(np.asarray(filled, dtype=bool), len(y))
    faces = [colour if one else "none" for one in good]
    kind = {"color": colour} if marker in "x+" else {"facecolors": faces, "edgecolors": colour}
    axis.scatter(
        x, y, s=size, marker=marker, linewidths=0.6, alpha=alpha, zorder=4, label=label or None, **kind
    )


def lines(
    axis: Axes,
    x: pd.Series,
    rows: pd.DataFrame,
    columns: Iterable[tuple[str, str, Dashes, str]],
    most: float = math.inf,
) -> None:
    """Draw columns of a table as lines up to ``most``: their names, colours, dashes and labels."""
    for name, colour, dashes, label in columns:
        values = rows[name].astype(float)
        shown = values <= most
        if shown.any():
            axis.plot(x[shown], values[shown], color=colour, linestyle=dashes, label=label or None, zorder=2)


def power_line(axis: Axes, fit: Exponent, colour: str, label: str = "", dashes: Dashes = SOLID) -> None:
    """Draw the line of an exponent from its shortest to its longest sequence, if there is one."""
    if not fit.note:
        ends = [float(fit.n_min), float(fit.n_max)]
        line = [fit.at(n) for n in ends]
        axis.plot(ends, line, color=colour, linestyle=dashes, linewidth=1.3, label=label or None, zorder=5)


def legend(figure: Canvas, columns: int = 4, *, above: bool = False) -> None:
    """Put all labels of a figure into one legend, each once."""
    found: dict[str, Artist] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper center" if above else "outside lower center",
        ncols=columns,
        handlelength=2.2,
    )


def picture(figure: Canvas, folder: Path, stem: str, title: str, alt: str, caption: str) -> Picture:
    """Write a figure as PDF and PNG into a folder.

    Raises
    ------
    StoreError
        If one cannot be written.

    """
    with writing(folder):
        png, pdf = save(figure, folder, stem, title)
    return Picture(pdf, png, alt, caption)
