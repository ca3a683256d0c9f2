"""Draw figures of measurements in the style of the paper, from the rows in the store of a study.

Each figure shows the constant against the length, coloured by the radius, with the fitted exponent and lines
of slope 1/4 and 1/2; and the constant against the radius, coloured by the length. Axes are logarithmic. The
viridis colours do not depend on colour vision. Unconverged measurements are hollow, with their interval.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal, Stroke

from howsmooth.study.exponents import Exponent, fitted_groups
from howsmooth.study.figures.drawing import (
    COLOURS,
    GREY,
    STYLE,
    add_colourbar,
    literal,
    new_figure,
    save,
    set_axis,
    set_bar_ticks,
)
from howsmooth.study.progress_listener import Listener
from howsmooth.study.text_formatting import (
    decimal,
    file_stem,
    kind_in_words,
    place_in_words,
    readable,
    scope_in_words,
    unit_in_words,
)

__all__ = ["Picture", "draw_all"]

_MOST_COLUMNS = 16
_WIDE = 20.0
_NEARLY_CONSTANT = 1.02
_FEW_COLUMNS = 4
_FIT_COLOUR = "#c1121f"
_REFERENCE_SLOPES = ((0.25, "1/4", (0.0, (5.0, 2.0))), (0.5, "1/2", (0.0, (1.2, 1.6))))


@dataclass(frozen=True)
class Picture:
    """The files of a figure of measurements, and the model, text, scope, layer and head that it shows.

    ``alt`` is the text for readers who cannot see it. ``layer`` is None for an overview of all layers,
    ``head`` also for scopes without heads. ``inches`` is its width.
    """

    png: Path
    pdf: Path
    alt: str
    model: str
    text: str
    scope: str
    layer: int | None
    head: int | None
    overview: bool
    inches: float


def draw_all(
    measurements: pd.DataFrame,
    folder: str | os.PathLike[str],
    listener: Listener,
    kinds: Mapping[str, str] = {},
) -> list[Picture]:
    """Draw a figure of the constants for each layer or head, and overviews of several layers or heads.

    There is an overview for each model, text and scope with several layers or heads; it comes before the
    figures of its layers.
    ``kinds`` maps the name of each input that is not a text to its kind, one of
    :data:`howsmooth.study.plans.KINDS`.
    """
    folder = Path(folder)
    figures: list[Callable[[], Picture]] = []
    for (model, text, scope), family in measurements.groupby(["model", "text", "scope"], sort=True):
        parts = _parts_of(family)
        kind, words = kinds.get(str(text), "text"), scope_in_words(family.iloc[0])
        shown = _Family(folder, str(model), str(text), str(scope), kind, words)
        figures += [partial(_overview, parts, shown)] if len(parts) > 1 else []
        figures += [partial(_single, part, shown) for part in parts]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with rc_context(STYLE):
        for draw in figures:
            drawn.append(draw())
            listener.advance(float(len(drawn)), float(len(figures)), f"{len(drawn)} of {len(figures)}")
    return drawn


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows of a table that belong to one layer or one head, and the exponent fitted to them."""

    layer: int
    head: int | None
    rows: pd.DataFrame
    fit: Exponent

    @property
    def name(self) -> str:
        return place_in_words(self.layer, self.head)

    @property
    def stem(self) -> list[str]:
        return [f"layer-{self.layer:02d}", *([] if self.head is None else [f"head-{self.head:02d}"])]


def _parts_of(table: pd.DataFrame) -> list[_Part]:
    """Split a table of measurements by layer and head, and fit the exponents of the constants."""
    return [
        _Part(int(names["layer"]), None if pd.isna(names["head"]) else int(names["head"]), rows, fit)
        for names, rows, fit in fitted_groups(table, ("layer", "head"))
    ]


@dataclass(frozen=True)
class _Family:
    """A group of figures that show one model on one input in one scope, with the folder for their files."""

    folder: Path
    model: str
    text: str
    scope: str
    kind: str
    scope_words: str

    def saved(self, figure: Figure, title: str, alt: str, part: _Part | None = None) -> Picture:
        """Write a figure of a layer or head, or of all of them (``part`` is None), as PNG and PDF."""
        words = ["overview"] if part is None else part.stem
        png, pdf = save(figure, self.folder, file_stem(self.model, self.text, self.scope, *words), title)
        layer, head = (None, None) if part is None else (part.layer, part.head)
        where = (self.model, self.text, self.scope, layer, head)
        return Picture(png, pdf, alt, *where, overview=part is None, inches=figure.get_figwidth())


# ---- One layer


def _single(part: _Part, family: _Family) -> Picture:
    title = (
        f"{readable(family.model)}, {part.name}, {family.scope_words}, {kind_in_words(family.kind)} "
        f"{readable(family.text)}"
    )
    alt = f"Two scatter plots on log axes for {title}: {_description(part)}"
    return family.saved(_draw_single(part, family, title), title, alt, part)


def _draw_single(part: _Part, family: _Family, title: str) -> Figure:
    group, fit = part.rows, part.fit
    figure = new_figure(9.6, 4.1)
    left, right = figure.subplots(1, 2, sharey=True)
    first, last = float(group["n"].min()), float(group["n"].max())
    lengths = LogNorm(first, last) if last > first else Normalize(first - 0.5, last + 0.5)
    radii = _radius_norm(group["radius_mean"])
    _scatter(left, group, "n", "radius_mean", radii)
    _draw_guides(left, fit)
    _scatter(right, group, "radius_mean", "n", lengths)
    set_axis(left, "x", group["n"], whole=True)
    set_axis(right, "x", group["radius_mean"])
    set_axis(left, "y", pd.concat([group["lower"], group["upper"]]))
    # Without a line and ticks, the numbers of the left colour bar do not read as an axis of the right panel.
    right.spines["left"].set_visible(False)
    right.tick_params(axis="y", left=False)
    left.set_xlabel(f"sequence length n ({unit_in_words(family.kind)})")
    left.set_ylabel("local Lipschitz constant")
    right.set_xlabel("radius R (root mean square token norm)" + _constancy(group["radius_mean"]))
    add_colourbar(figure, left, radii, "radius R")
    add_colourbar(figure, right, lengths, "length n", whole=True)
    if fit.note:
        left.set_title(f"no exponent: {fit.note}", fontsize=9)
    else:
        label = f"fit $n^{{{fit.slope:z.3f}}}$, 95 % interval {fit.ends()}"
        figure.legend(handles=_guide_handles(label), loc="outside lower left", ncols=3, handlelength=2.6)
    hollow = int((~group["converged"]).sum())
    words = f"\n{hollow} of {len(group)} did not converge: hollow, with their interval, not in the fit"
    figure.suptitle(literal(title) + (words if hollow else ""))
    return figure


# ---- All layers


def _overview(parts: Sequence[_Part], family: _Family) -> Picture:
    rows = pd.concat([part.rows for part in parts])
    by_head = any(part.head is not None for part in parts)
    title = (
        f"{readable(family.model)}, {family.scope_words}, {kind_in_words(family.kind)} "
        f"{readable(family.text)}: every layer{' and head' if by_head else ''}"
    )
    alt = (
        "Small scatter plots of the constant against the length on log axes, one a layer, for "
        f"{title}. {_range_of_exponents(parts)}"
    )
    return family.saved(_draw_overview(parts, rows, family, title), title, alt)


def _draw_overview(parts: Sequence[_Part], rows: pd.DataFrame, family: _Family, title: str) -> Figure:
    norm, unit = _radius_norm(rows["radius_mean"]), unit_in_words(family.kind).split(":")[0]
    heads = len({part.head for part in parts})
    columns = min(heads, _MOST_COLUMNS) if heads > 1 else min(len(parts), _FEW_COLUMNS)
    lines = math.ceil(len(parts) / columns)
    width = 2.3 if columns <= _FEW_COLUMNS else 1.7
    figure = new_figure(1.6 + width * columns, 1.3 + 2.0 * lines)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in axes[len(parts) :]:
        axis.set_visible(False)
    axes = axes[: len(parts)]
    # If the last row is not full, the panels above its gaps are the lowest of their columns.
    for axis in axes[-columns:]:
        axis.tick_params(labelbottom=True)
        axis.set_xlabel(f"length n ({unit})")
    for axis, part in zip(axes, parts, strict=True):
        _scatter(axis, part.rows, "n", "radius_mean", norm, size=7.0)
        _draw_guides(axis, part.fit)
        set_axis(axis, "x", rows["n"], whole=True)
        set_axis(axis, "y", pd.concat([rows["lower"], rows["upper"]]))
        axis.set_title(part.name, pad=4)
        axis.text(
            0.04,
            0.96,
            "no exponent" if part.fit.note else f"{decimal(part.fit.slope, 3)} {part.fit.ends()}",
            transform=axis.transAxes,
            va="top",
            fontsize=8.5 if columns <= 8 else 7.5,
            color=GREY if part.fit.note else _FIT_COLOUR,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
        )
    figure.supylabel("local Lipschitz constant", fontsize=10)
    slim = 5 * figure.get_figheight()
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=figure.axes, aspect=slim, pad=0.015)
    set_bar_ticks(bar, norm)
    bar.ax.set_title("radius R", loc="right", fontsize="medium")
    figure.suptitle(literal(title))
    figure.legend(handles=_guide_handles(), loc="outside lower center", ncols=3)
    return figure


# ---- Lines


def _draw_guides(axis: Axes, fit: Exponent) -> None:
    """Draw a fitted power law, and lines of the reference slopes, which meet it in the middle."""
    if fit.note:
        return
    ends = np.array([fit.n_min, fit.n_max], dtype=float)
    middle = math.sqrt(fit.n_min * fit.n_max)
    for slope, _, dashes in _REFERENCE_SLOPES:
        axis.plot(
            ends,
            fit.at(middle) * (ends / middle) ** slope,
            color=GREY,
            linestyle=dashes,
            linewidth=1.1,
            zorder=1,
        )
    halo = [Stroke(linewidth=3.2, foreground="white"), Normal()]
    fitted = [fit.at(end) for end in ends]
    axis.plot(ends, fitted, color=_FIT_COLOUR, linewidth=1.7, zorder=1.5, path_effects=halo)


def _guide_handles(label: str = "least-squares fit, exponent [95 % interval]") -> list[Line2D]:
    """Return the legend entries of the lines that :func:`_draw_guides` draws."""
    handles = [Line2D([], [], color=_FIT_COLOUR, linewidth=1.6, label=label)]
    handles += [
        Line2D([], [], color=GREY, linestyle=dashes, linewidth=1.1, label=f"slope {words}")
        for _, words, dashes in _REFERENCE_SLOPES
    ]
    return handles


# ---- Points


def _scatter(
    axis: Axes, group: pd.DataFrame, across: str, colour: str, norm: Normalize, size: float = 13.0
) -> None:
    positive = group[group["lipschitz"] > 0]
    good = positive[positive["converged"]]
    rest = positive[~positive["converged"]]
    axis.scatter(
        good[across],
        good["lipschitz"],
        c=good[colour],
        cmap=COLOURS,
        norm=norm,
        s=size,
        alpha=0.85,
        linewidths=0,
        zorder=2,
    )
    if len(rest):
        colours: Any = ScalarMappable(norm, COLOURS).to_rgba(rest[colour].to_numpy())
        floor = rest["lipschitz"].min() * 1e-3
        axis.vlines(
            rest[across],
            rest["lower"].clip(lower=floor),
            rest["upper"],
            colors=colours,
            linewidth=0.9,
            zorder=2,
        )
        axis.scatter(
            rest[across],
            rest["lipschitz"],
            s=size * 1.3,
            facecolors="white",
            edgecolors=colours,
            linewidths=0.9,
            zorder=3,
        )


def _description(part: _Part) -> str:
    group, fit = part.rows, part.fit
    values = group["lipschitz"]
    words = (
        f"the local Lipschitz constant goes from {values.min():.3g} to {values.max():.3g} over lengths "
        f"{group['n'].min()} to {group['n'].max()} and radii {group['radius_mean'].min():.3g} to "
        f"{group['radius_mean'].max():.3g}; "
    )
    if fit.note:
        return words + f"no exponent, {fit.note}."
    interval = f"{decimal(fit.low, 3)} to {decimal(fit.high, 3)}"
    return words + f"fitted exponent {decimal(fit.slope, 3)}, 95 % interval {interval}."


def _range_of_exponents(parts: Sequence[_Part]) -> str:
    found = [part.fit.slope for part in parts if not part.fit.note]
    if not found:
        return "No exponent could be fitted."
    return f"Fitted exponents from {decimal(min(found), 3)} to {decimal(max(found), 3)}."


def _radius_norm(radii: pd.Series) -> Normalize:
    # The ends of the scale are at least 2 % apart, so that rounding alone does not change the colour.
    middle = float(radii.min() + radii.max()) / 2
    half = max(float(radii.max() - radii.min()) / 2, 0.01 * abs(middle), 1e-12)
    low, high = middle - half, middle + half
    return LogNorm(low, high) if high > _WIDE * low > 0 else Normalize(low, high)


def _constancy(radii: pd.Series) -> str:
    low, high = float(radii.min()), float(radii.max())
    if len(radii) < 2 or low <= 0 or high / low > _NEARLY_CONSTANT:
        return ""
    percent = 100 * (high / low - 1)
    return "\nthe same for every sequence" + (f" within {percent:.2g} %" if percent > 0.001 else "")
