"""Define the common style of all figures, draw the parts that they share, and write figures to files."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as _Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

__all__ = [
    "COLOURS", "GREY", "STYLE", "Figure", "LogNorm", "Normalize", "Picture", "add_colourbar",
    "data_url", "linear_ticks", "literal", "log_ticks", "logarithmic", "new_figure", "picture", "png",
    "rc_context", "save", "set_axis", "set_bar_ticks", "shades", "styled", "titled",
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
    "savefig.dpi": 150,
}
P = ParamSpec("P")
T = TypeVar("T")

# The larger a value, the further from a white page, and from a dark one, where pages turn lightness around.
COLOURS = ListedColormap(colormaps["viridis_r"](np.linspace(0.3, 1.0, 256)))
GREY = "0.35"
_FEW_LENGTHS = 6
_PHONE = 368  # pixels of a picture on a phone
_MOST_STACKED = 24  # panels: more would be higher than an image may be
_CHARACTERS = 10  # of a title in an inch


class Figure(_Figure):
    """A figure that a notebook shows without ``%matplotlib inline``."""

    def savefig(self, *to: Any, **options: Any) -> None:
        """Save the figure without warnings about characters that the font lacks, which become boxes."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
            super().savefig(*to, **options)

    def _repr_png_(self) -> bytes:
        return png(self)


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it draws in the common style of all figures."""
    return rc_context(STYLE)(function)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a given size in inches, which a notebook shows."""
    # Without pyplot, which keeps its figures in a global list and may open a window.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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


def shades(values: Sequence[float] | pd.Series, norm: Normalize) -> np.ndarray:
    """Return the colours of some values as RGBA, of shape (values, 4)."""
    found: np.ndarray = ScalarMappable(norm, COLOURS).to_rgba(np.asarray(values, dtype=float))
    return found


def add_colourbar(
    figure: Figure,
    axis: Axes | Sequence[Axes],
    norm: Normalize,
    label: str = "",
    *,
    whole: bool = False,
    inside: Axes | None = None,
    below: bool = False,
) -> None:
    """Add a colour bar beside one axis or several, or ``below`` them, or ``inside`` an axis of its own."""
    where: dict[str, Any] = {"cax": inside} if inside else {"ax": axis, "pad": 0.015, "aspect": 28}
    where |= {"location": "bottom", "aspect": 60} if below else {}
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), **where)
    set_bar_ticks(bar, norm, whole=whole)
    # Beside the bar it would read as the name of an axis of the panel.
    bar.ax.set_title(label, loc="right", fontsize="medium")


def set_bar_ticks(bar: Colorbar, norm: Normalize, *, whole: bool = False) -> None:
    """Set round ticks on a colour bar."""
    low, high = float(norm.vmin or 0.0), float(norm.vmax or 0.0)
    ticks = (log_ticks if isinstance(norm, LogNorm) else linear_ticks)(low, high, whole=whole)
    bar.set_ticks(ticks, labels=[number(tick) for tick in ticks])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def literal(words: str) -> str:
    """Escape dollar signs and backslashes, so that matplotlib does not read them as mathematics."""
    return words.replace("\\", "\\\\").replace("$", r"\$")


def titled(title: str, width: float) -> str:
    """Break a title into lines of a width in inches; escape what matplotlib reads as mathematics."""
    return "\n".join(literal(fill(line, int(_CHARACTERS * width))) for line in title.split("\n"))


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": "howsmooth"})
    return file.getvalue()


def data_url(image: bytes) -> str:
    """Return a PNG file as a URL that contains it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


@dataclass(frozen=True)
class Picture:
    """A drawn picture: the paths of its PDF and PNG file, its title, its alternative text, its width on a
    page in pixels, and whether it is an overview of others.
    """

    pdf: Path
    png: Path
    title: str
    alt: str
    width: int
    overview: bool = False
    #: The PNG with the panels below each other, for a phone; empty if there is one, or very many.
    narrow: bytes = b""

    def on_page(self) -> dict[str, Any]:
        """Return the arguments of the page template that shows the picture."""
        narrow = data_url(self.narrow) if self.narrow else ""
        source = data_url(self.png.read_bytes())
        return {"source": source, "alt": self.alt, "width": self.width, "narrow": narrow}


def picture(
    figure: Figure, folder: Path, stem: str, title: str, *, dots: int, overview: bool = False
) -> Picture:
    """Write a figure as PNG and PDF, and return its description. On a page, an inch has ``dots`` pixels."""
    # Axes without a title or labels are colour bars and empty, which the alternative text does not mention.
    x, y, titles = (
        _plain([found for axis in figure.axes if axis.get_xlabel() and (found := getattr(axis, get)())])
        for get in ("get_xlabel", "get_ylabel", "get_title")
    )
    labels = _plain([text.get_text() for legend in figure.legends for text in legend.get_texts()])
    panels = f" Panels: {titles}." if titles else ""
    alt = f"{title}. Axes: {y or 'names'}, against {x}.{panels} Drawn are: {labels or 'points'}."
    png, pdf = save(figure, folder, stem, title)
    width = round(figure.get_figwidth() * dots)
    return Picture(pdf, png, title, alt, width, overview, _stacked(figure, _PHONE / dots, rows=overview))


def _stacked(figure: Figure, width: float, *, rows: bool) -> bytes:
    """Stack all panels of a figure, in the order of rows or columns, and return the PNG."""
    panels = [axis for axis in figure.axes if axis.get_visible() and axis.get_label() != "<colorbar>"]
    if not 2 <= len(panels) <= _MOST_STACKED:
        return b""
    places: Any = {panel: panel.get_subplotspec() for panel in panels}
    if not rows:
        panels.sort(key=lambda panel: places[panel].colspan.start)
    height = figure.get_figheight() / places[panels[0]].get_gridspec().nrows
    grid = figure.add_gridspec(len(panels), 1)
    for i, panel in enumerate(panels):
        panel.set_subplotspec(grid[i])
        panel.tick_params(labelleft=True, labelbottom=True)
        panel.xaxis.label.set_visible(True)
        panel.yaxis.label.set_visible(True)
    for legend in list(figure.legends):
        handles: Any = legend.legend_handles
        names = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        figure.legend(handles, names, loc="outside lower center", frameon=False)
    figure.suptitle("")
    figure.set_size_inches(width, height * len(panels))
    figure.set_layout_engine("constrained")
    return png(figure)


def _plain(words: list[str]) -> str:
    joined = "; ".join(dict.fromkeys(words)).replace("\\,", " ").replace("\n", ", ")
    return re.sub(" +", " ", re.sub(r"[${}\\]", "", re.sub(r"\\([a-z]+)", r" \1 ", joined)))


def save(figure: Figure, folder: Path, stem: str, title: str) -> tuple[Path, Path]:
    """Write a figure as PNG and PDF, and return their paths. The same numbers give the same files."""
    image, pdf = folder / f"{stem}.png", folder / f"{stem}.pdf"
    title = title.encode("latin-1", "replace").decode("latin-1")
    figure.savefig(image, metadata={"Title": title, "Software": "howsmooth"})
    figure.set_layout_engine("none")  # keep the layout: computing it again takes as long as drawing
    # Without a date, the same store gives the same file. TrueType: journals refuse Type 3.
    with rc_context({"pdf.fonttype": 42}):
        figure.savefig(pdf, metadata={"Title": title, "Creator": "howsmooth", "CreationDate": None})
    return image, pdf


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
    """Format the number at a tick of an axis; matplotlib passes its position too."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.6g}"
