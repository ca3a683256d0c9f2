"""Define the common style of all figures, draw the parts that they share, and write figures to files."""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from PIL import Image

from howsmooth.study.exponents import Exponent, fitted_groups
from howsmooth.study.html_assets import png
from howsmooth.study.progress_listener import Listener
from howsmooth.study.text_formatting import decimal, place_in_words

__all__ = [
    "COLOURS", "FIT_COLOUR", "GREY", "REFERENCE_SLOPES", "STYLE", "Files", "Part", "Slopes", "add_colourbar",
    "draw_cells", "draw_each", "draw_guides", "draw_overview", "drawing_code", "guide_handles", "is_current",
    "linear_ticks", "literal", "log_ticks", "logarithmic", "new_figure", "parts_of", "range_of_exponents",
    "save", "set_axis", "set_bar_ticks",
]  # fmt: skip

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "figure.titlesize": 11,
    "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
    "savefig.dpi": 150,
}
COLOURS = "viridis"
FIT_COLOUR = "#c1121f"
GREY = "0.35"
Files = tuple[Path, Path]
"""The paths of a figure as PNG and as PDF."""
Slopes = tuple[tuple[float, str, tuple[float, tuple[float, ...]]], ...]
REFERENCE_SLOPES: Slopes = ((0.25, "1/4", (0.0, (5.0, 2.0))), (0.5, "1/2", (0.0, (1.2, 1.6))))
_FEW_LENGTHS = 6
T = TypeVar("T")


def draw_each(figures: Sequence[Callable[[], T]], folder: Path, listener: Listener) -> list[T]:
    """Call functions that each draw a figure into a folder, and tell a listener how many are done."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with rc_context(STYLE):
        for draw in figures:
            drawn.append(draw())
            listener.advance(float(len(drawn)), float(len(figures)), f"{len(drawn)} of {len(figures)}")
    return drawn


class NotebookFigure(Figure):
    """A figure that a notebook shows without ``%matplotlib inline``."""

    def savefig(self, *to: Any, **options: Any) -> None:
        """Save the figure, without a warning for each character that the font lacks and that is a box."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
            super().savefig(*to, **options)

    def _repr_png_(self) -> bytes:
        return png(self)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a given size in inches, which a notebook shows."""
    # Without pyplot, which keeps its figures in a global list and may open a window.
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_guides(axis: Axes, fit: Exponent, slopes: Slopes = REFERENCE_SLOPES, *, share: float = 1.0) -> None:
    """Draw a fitted power law, and lines with the reference slopes for comparison.

    In the middle of the fitted range, the reference lines have ``share`` times the height of the power law.
    """
    if fit.note:
        return
    ends = np.array([fit.n_min, fit.n_max], dtype=float)
    middle = math.sqrt(fit.n_min * fit.n_max)
    for slope, _, dashes in slopes:
        axis.plot(
            ends,
            share * fit.at(middle) * (ends / middle) ** slope,
            color=GREY,
            linestyle=dashes,
            linewidth=1.1,
            zorder=1,
        )
    halo = [Stroke(linewidth=3.2, foreground="white"), Normal()]
    fitted = [fit.at(end) for end in ends]
    axis.plot(ends, fitted, color=FIT_COLOUR, linewidth=1.7, zorder=1.5, path_effects=halo)


def guide_handles(
    label: str = "least-squares fit, exponent [95 % interval]", slopes: Slopes = REFERENCE_SLOPES
) -> list[Line2D]:
    """Return the legend entries of the lines that :func:`draw_guides` draws."""
    handles = [Line2D([], [], color=FIT_COLOUR, linewidth=1.6, label=label)]
    handles += [
        Line2D([], [], color=GREY, linestyle=dashes, linewidth=1.1, label=f"slope {words}")
        for _, words, dashes in slopes
    ]
    return handles


def set_axis(axis: Axes, which: str, values: pd.Series, *, whole: bool = False) -> None:
    """Set a logarithmic scale on an axis, with limits and round ticks that suit the given values."""
    positive = values[values > 0]
    if positive.empty:
        return
    low, high = float(positive.min()), float(positive.max())
    if high < 1.05 * low:
        low, high = low / 1.03, high * 1.03
    margin = (high / low) ** 0.06
    low, high = low / margin, high * margin
    ticks = log_ticks(low, high, whole=whole)
    if whole and positive.nunique() <= _FEW_LENGTHS:
        ticks = sorted(float(value) for value in positive.unique())
    axis.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    target = axis.xaxis if which == "x" else axis.yaxis
    target.set_major_locator(FixedLocator(ticks))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(number))
    axis.grid(visible=True, which="major", linewidth=0.4, color="0.88", zorder=0)


def logarithmic(values: np.ndarray) -> Normalize:
    """Return a colour scale for positive values: logarithmic, or linear if they are nearly equal."""
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (1.0, 1.0)
    return LogNorm(low, high) if high > 1.001 * low else Normalize(0.9 * low, 1.1 * high)


def draw_cells(axis: Axes, values: np.ndarray, norm: Normalize) -> None:
    """Draw a matrix as coloured cells, without tick marks or a frame; a NaN stays white."""
    axis.imshow(values, cmap=COLOURS, norm=norm, aspect="auto", interpolation="nearest")
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def add_colourbar(figure: Figure, axis: Axes, norm: Normalize, label: str, *, whole: bool = False) -> None:
    """Add a colour bar beside an axis."""
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=axis, pad=0.015, aspect=28)
    set_bar_ticks(bar, norm, whole=whole)
    bar.ax.set_title(label, loc="right", fontsize="medium")


def set_bar_ticks(bar: Colorbar, norm: Normalize, *, whole: bool = False) -> None:
    """Set round ticks on a colour bar."""
    low, high = float(norm.vmin or 0.0), float(norm.vmax or 0.0)
    if isinstance(norm, LogNorm):
        ticks = log_ticks(low, high, whole=whole)
    else:
        ticks = linear_ticks(low, high, whole=whole)
    bar.set_ticks(ticks, labels=[number(tick) for tick in ticks])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def literal(words: str) -> str:
    """Escape dollar signs and backslashes, so that matplotlib does not read them as mathematics."""
    return words.replace("\\", "\\\\").replace("$", r"\$")


def save(figure: Figure, folder: Path, stem: str, title: str, source: str = "") -> Files:
    """Write a figure as PNG and PDF, and return their paths. The same numbers give the same files.

    ``source`` identifies what the figure was drawn from, for :func:`is_current`.
    """
    image, pdf = folder / f"{stem}.png", folder / f"{stem}.pdf"
    # The PNG gets its name last, so that one with this source is whole and has its PDF beside it.
    partial = folder / f".{stem}.partial"
    title = title.encode("latin-1", "replace").decode("latin-1")
    described = {"Title": title, "Software": "howsmooth"} | ({"Source": source} if source else {})
    figure.savefig(partial, format="png", metadata=described)
    figure.set_layout_engine("none")  # keep the layout: computing it again takes as long as drawing
    # Without a date, the same store gives the same file.
    figure.savefig(pdf, metadata={"Title": title, "Creator": "howsmooth", "CreationDate": None})
    partial.replace(image)
    return image, pdf


def is_current(folder: Path, stem: str, source: str) -> bool:
    """Return whether the files of a figure exist and were drawn from the data with the digest ``source``."""
    try:
        with Image.open(folder / f"{stem}.png") as image:
            return image.info.get("Source") == source and (folder / f"{stem}.pdf").exists()
    except OSError:  # no such file, or no image
        return False


@functools.cache
def drawing_code() -> str:
    """Return a digest of the drawing code and the matplotlib version, which changes if either changes."""
    digest = hashlib.sha256(version("matplotlib").encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- Ticks


def linear_ticks(low: float, high: float, *, whole: bool = False, most: int = 7) -> list[float]:
    """Return at most ``most`` + 1 round numbers, evenly spaced between ``low`` and ``high``."""
    ticks = MaxNLocator(most, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high)
    return [round(float(tick), 12) for tick in ticks if low <= tick <= high]


def log_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return a few round numbers between two positive numbers, spaced for ticks on a logarithmic axis."""
    decades = math.log10(high / low)
    if decades < 0.5:
        return linear_ticks(low, high, whole=whole, most=8)
    digits: tuple[int, ...] = (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
    if decades < 1:
        digits = (1, 2, 3, 4, 6, 8)
    stride = max(1, round(decades / 6)) if digits == (1,) else 1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers if power % stride == 0 for digit in digits]
    return [tick for tick in ticks if low <= tick <= high and (not whole or tick >= 1)]


def number(value: float, position: int | None = None) -> str:
    """Format the number at a tick of an axis. matplotlib passes its ``position`` too, which is not used."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.6g}"


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
    """Draw one small panel for each layer or head, and write into it the exponent of the fitted power of the
    length n.

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
