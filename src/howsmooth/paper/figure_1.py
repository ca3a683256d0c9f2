"""Figure 1: the local Lipschitz constant against the length on two texts, for three models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from howsmooth.paper import drawing
from howsmooth.paper.figure import Bench, Figure, Finding
from howsmooth.paper.growth import Growth, growths, is_steady
from howsmooth.paper.setting import Setting, columns
from howsmooth.paper.words import power, power_label
from howsmooth.study.exponents import LEVEL, QUARTER
from howsmooth.study.figures.style import COLOURS, literal, set_axis, set_bar_ticks
from howsmooth.study.names import decimal, readable
from howsmooth.study.radius import radius_correlation

__all__ = ["FIGURE_1", "measure", "panel_table", "panel_words", "quarter_line", "show"]

_LENGTHS = tuple(range(4, 101, 4))
_SAMPLES = 10
_MOST_ACROSS = 3

Panels = list[list[Growth]]
"""One list a column, a layer of a model; in it one panel a text."""


def measure(bench: Bench) -> Panels:
    """Measure each column as a study; return the panels."""
    request = bench.request
    lengths, samples = request.lengths or _LENGTHS, request.samples or _SAMPLES
    found = columns(bench)
    panels = []
    for column, part in bench.each(found, [one.cost for one in found]):
        here = Setting(bench, column.spec, lengths=lengths, samples=samples, layers=column.layers)
        studied = here.study(f"columns/{column.stem}", part, published=request.as_published)
        panels.append(growths(here, studied))
    return panels


def show(panels: Panels, folder: Path) -> Finding:
    """Draw the panels, three columns a picture, and say what is seen in them."""
    pictures = [
        _picture(part, folder, f"figure-1{end}") for end, part in drawing.sheets(panels, _MOST_ACROSS)
    ]
    every = [panel for column in panels for panel in column]
    return Finding(pictures, panel_words(every), [("Exponents of the panels", panel_table(every))])


def panel_table(panels: list[Growth]) -> pd.DataFrame:
    """Tabulate the exponents of the panels."""
    return pd.DataFrame([panel.columns() for panel in panels])


# ---- the picture


def _picture(panels: Sequence[list[Growth]], folder: Path, stem: str) -> drawing.Picture:
    across, down = len(panels), len(panels[0])
    figure = drawing.canvas(drawing.WIDTH if across > 1 else 0.55 * drawing.WIDTH, 1.15 + 1.75 * down)
    axes = figure.subplots(down, across, squeeze=False, sharex="col")
    for place, column in enumerate(panels):
        norm = _radius_norm(pd.concat([panel.drawn["radius_mean"] for panel in column]))
        for axis, panel in zip(axes[:, place], column, strict=True):
            _draw_panel(axis, panel, norm)
        top = f"{literal(readable(column[0].model, 34))}\nlayer {column[0].layer}\n"
        axes[0, place].set_title(top + axes[0, place].get_title())
        axes[-1, place].set_xlabel("sequence length $n$")
        below = list(axes[:, place])
        bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=below, location="bottom", aspect=32, pad=0.02)
        set_bar_ticks(bar, norm)
        bar.set_label("mean radius")
        bar.ax.tick_params(width=0.5, length=2)
    for axis, panel in zip(axes[:, 0], panels[0], strict=True):
        axis.set_ylabel(f"{literal(readable(panel.text, 30))}\nlocal Lipschitz constant")
    drawing.legend(figure, above=True)
    names = "; ".join(column[0].name for column in panels)
    alt = (
        "Scatter plots of the local Lipschitz constant against the sequence length on log axes, coloured by "
        f"the mean radius, a column for each of {names}, a row for each text. "
        + " ".join(
            f"{panel.name} on {readable(panel.text)}: {power(panel.fit)}." for one in panels for panel in one
        )
    )
    caption = (
        "The local Lipschitz constant of attention against the length, coloured by the mean radius of the "
        "tokens. Above each panel: the fitted exponent with its 95 % interval."
    )
    return drawing.picture(figure, folder, stem, f"Figure 1: {names}", alt, caption)


def _draw_panel(axis: Axes, panel: Growth, norm: Normalize) -> None:
    rows, fit, theirs = panel.drawn, panel.fit, panel.published
    axis.scatter(
        rows["n"], rows["lipschitz"], c=rows["radius_mean"], cmap=COLOURS, norm=norm, s=6, linewidths=0,
        alpha=0.85, zorder=4, rasterized=len(rows) > 5000,
    )  # fmt: skip
    axis.scatter(
        [], [], s=6, color=drawing.GREY, label="a sequence"
    )  # for the legend: the others have no one colour
    drawing.power_line(axis, fit, drawing.FIT_COLOUR, "fitted power")
    values, words = [rows["lipschitz"]], power_label(fit)
    if not fit.note:
        factor, _ = quarter_line(rows["n"].to_numpy(), rows["lipschitz"].to_numpy())
        ends = np.array([fit.n_min, fit.n_max], dtype=float)
        line = factor * ends**QUARTER
        axis.plot(
            ends, line, color="black", linestyle=drawing.DASHED, label=r"$c\,n^{1/4}$, $c$ fitted", zorder=4
        )
        values.append(pd.Series(line))
    if len(theirs):
        drawing.dots(
            axis,
            theirs["n"],
            theirs["lipschitz"],
            (drawing.ORANGE, "^"),
            "as published",
            size=7,
            filled=False,
        )
        drawing.power_line(axis, panel.published_fit, drawing.ORANGE)
        values.append(theirs["lipschitz"])
        if not panel.published_fit.note:
            words += f"; as published {power_label(panel.published_fit)}"
    axis.set_title(words, fontsize=7 if len(words) < 50 else 5.6)
    set_axis(axis, "x", rows["n"], whole=True)
    set_axis(axis, "y", pd.concat(values))


def quarter_line(n: np.ndarray, lipschitz: np.ndarray) -> tuple[float, float]:
    """Fit c · n^(1/4) by least squares of the logarithms; return c and the standard deviation around it."""
    residual = np.log(lipschitz) - QUARTER * np.log(n)
    return math.exp(float(residual.mean())), float(residual.std(ddof=1)) if len(n) > 1 else math.nan


def _radius_norm(radii: pd.Series) -> Normalize:
    """Span the radii, at least 2 %: those of a norm layer differ by rounding, which is no colour."""
    if radii.empty:
        return Normalize(0.0, 1.0)
    low, high = float(radii.min()), float(radii.max())
    middle, half = (low + high) / 2, max((high - low) / 2, 0.01 * abs(high + low) / 2, 1e-12)
    return Normalize(middle - half, middle + half)


# ---- the words


def panel_words(panels: list[Growth]) -> list[str]:
    """Say what is seen in the panels: how many exponents may be 1/4, and then of each panel what it shows."""
    seen = []
    fits = [panel.fit for panel in panels if not panel.fit.note]
    if fits:
        inside = sum(fit.low <= QUARTER <= fit.high for fit in fits)
        above, below = sum(fit.low > QUARTER for fit in fits), sum(fit.high < QUARTER for fit in fits)
        seen.append(
            f"The interval contains 1/4 in {inside} of {len(fits)} panels; it lies wholly above 1/4 "
            f"in {above} and wholly below in {below}."
        )
    theirs = [panel.published_fit for panel in panels if not panel.published_fit.note]
    if theirs:
        inside = sum(fit.low <= QUARTER <= fit.high for fit in theirs)
        seen.append(f"As published, the interval contains 1/4 in {inside} of {len(theirs)} panels.")
    return seen + [_words(panel) for panel in panels]


def _words(panel: Growth) -> str:
    rows, fit = panel.drawn, panel.fit
    words = f"{panel.name}, on {readable(panel.text)}: "
    if fit.note:
        return words + f"there is no exponent, {fit.note}."
    _, around = quarter_line(rows["n"].to_numpy(), rows["lipschitz"].to_numpy())
    words += (
        f"the constant grows like {power(fit)}, from {len(rows)} sequences of {fit.n_min} to {fit.n_max} "
        f"tokens; the points scatter by a factor of about {math.exp(fit.spread):.2f} around this line, and "
        f"of {math.exp(around):.2f} around n to the power 1/4. {_radius_words(rows)}"
    )
    hollow = len(panel.rows) - len(rows)
    if hollow:
        words += f" {hollow} measurements are left out, as they did not converge or are zero."
    return words + panel.published_words()


def _radius_words(rows: pd.DataFrame) -> str:
    radius = rows["radius_mean"].to_numpy(dtype=float)
    if is_steady(radius):
        return f"The mean radius is {radius.mean():.4g} for all of them."
    found = radius_correlation(rows["n"].to_numpy(), radius, LEVEL)
    words = f"The mean radius goes from {radius.min():.4g} to {radius.max():.4g}"
    if math.isnan(found.value):
        return words + "."
    return (
        f"{words}, and the correlation of its logarithm with that of n is {decimal(found.value, 2)} "
        f"({decimal(found.low, 2)} to {decimal(found.high, 2)})."
    )


FIGURE_1 = Figure(
    name="figure-1",
    title="The constant of attention on text, against the length",
    paper="Figure 1",
    about=(
        "Each point is a sequence of n tokens of a text. Its height is the local Lipschitz constant there of "
        "an attention layer, all heads and the output projection, without residual and norm; its colour is "
        "the root mean square norm of its tokens. The paper's columns are the first layer of an encoder, "
        "layer 6 (or the last) of the same encoder run as a decoder with its causal mask, and layer 6 of an "
        "untrained GPT-2. The solid line is the least-squares fit of a power of n; the dashed one is n to "
        "the power 1/4 with only its factor fitted to the same points."
    ),
    measure=measure,
    show=show,
)
