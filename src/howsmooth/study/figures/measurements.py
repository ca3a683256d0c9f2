"""Draw figures of measurements in the style of the paper, from the rows in the store of a study.

Each figure shows the constant against the length, coloured by the radius, with the fitted exponent and lines
of slope 1/4 and 1/2; and the constant against the radius, coloured by the length. Axes are logarithmic. The
viridis colours do not depend on colour vision. Unconverged measurements are hollow, with their interval.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from PIL import Image

from howsmooth.study.figures.drawing import (
    COLOURS,
    STYLE,
    Part,
    add_colourbar,
    draw_each,
    draw_guides,
    draw_overview,
    drawing_code,
    guide_handles,
    is_current,
    literal,
    new_figure,
    parts_of,
    range_of_exponents,
    save,
    set_axis,
    set_bar_ticks,
)
from howsmooth.study.file_writing import csv_of
from howsmooth.study.progress_listener import Listener
from howsmooth.study.text_formatting import (
    decimal,
    file_stem,
    kind_in_words,
    readable,
    scope_in_words,
    unit_in_words,
)

__all__ = ["Picture", "draw_all"]

_MOST_COLUMNS = 16
_WIDE = 20.0
_NEARLY_CONSTANT = 1.02


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
    figures of its layers. Figures whose files show the same measurements already are not drawn again.
    ``kinds`` maps the name of each input that is not a text to its kind, one of
    :data:`howsmooth.study.plans.KINDS`.
    """
    folder = Path(folder)
    figures: list[Callable[[], Picture]] = []
    for (model, text, scope), family in measurements.groupby(["model", "text", "scope"], sort=True):
        parts = parts_of(family, "lipschitz")
        kind, words = kinds.get(str(text), "text"), scope_in_words(family.iloc[0])
        shown = _Family(folder, str(model), str(text), str(scope), kind, words)
        figures += [partial(_overview, parts, shown)] if len(parts) > 1 else []
        figures += [partial(_single, part, shown) for part in parts]
    return draw_each(figures, folder, listener)


@dataclass(frozen=True)
class _Family:
    """A group of figures that show one model on one input in one scope, with the folder for their files."""

    folder: Path
    model: str
    text: str
    scope: str
    kind: str
    scope_words: str

    def saved(
        self, draw: Callable[[], Figure], rows: pd.DataFrame, title: str, alt: str, part: Part | None = None
    ) -> Picture:
        """Draw a figure of some rows and write it as PNG and PDF, unless the files show these rows already.

        The figure shows the layer or head ``part``, or is an overview if ``part`` is None.
        """
        words = ["overview"] if part is None else part.stem
        stem = file_stem(self.model, self.text, self.scope, *words)
        shown = "\n".join([drawing_code(), title, alt, csv_of(rows.drop(columns="run", errors="ignore"))])
        source = hashlib.sha256(shown.encode("utf-8", "backslashreplace")).hexdigest()
        if not is_current(self.folder, stem, source):
            save(draw(), self.folder, stem, title, source)
        png, pdf = self.folder / f"{stem}.png", self.folder / f"{stem}.pdf"
        with Image.open(png) as image:
            inches = image.width / STYLE["savefig.dpi"]
        layer, head = (None, None) if part is None else (part.layer, part.head)
        where = (self.model, self.text, self.scope, layer, head)
        return Picture(png, pdf, alt, *where, overview=part is None, inches=inches)


# ---- One layer


def _single(part: Part, family: _Family) -> Picture:
    title = (
        f"{readable(family.model)}, {part.name}, {family.scope_words}, {kind_in_words(family.kind)} "
        f"{readable(family.text)}"
    )
    alt = f"Two scatter plots on log axes for {title}: {_description(part)}"
    return family.saved(lambda: _draw_single(part, family, title), part.rows, title, alt, part)


def _draw_single(part: Part, family: _Family, title: str) -> Figure:
    group, fit = part.rows, part.fit
    figure = new_figure(9.6, 4.1)
    left, right = figure.subplots(1, 2, sharey=True)
    first, last = float(group["n"].min()), float(group["n"].max())
    lengths = LogNorm(first, last) if last > first else Normalize(first - 0.5, last + 0.5)
    radii = _radius_norm(group["radius_mean"])
    _scatter(left, group, "n", "radius_mean", radii)
    draw_guides(left, fit)
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
        figure.legend(handles=guide_handles(label), loc="outside lower left", ncols=3, handlelength=2.6)
    hollow = int((~group["converged"]).sum())
    words = f"\n{hollow} of {len(group)} did not converge: hollow, with their interval, not in the fit"
    figure.suptitle(literal(title) + (words if hollow else ""))
    return figure


# ---- All layers


def _overview(parts: Sequence[Part], family: _Family) -> Picture:
    rows = pd.concat([part.rows for part in parts])
    by_head = any(part.head is not None for part in parts)
    title = (
        f"{readable(family.model)}, {family.scope_words}, {kind_in_words(family.kind)} "
        f"{readable(family.text)}: every layer{' and head' if by_head else ''}"
    )
    alt = (
        "Small scatter plots of the constant against the length on log axes, one a layer, for "
        f"{title}. {range_of_exponents(parts)}"
    )
    return family.saved(lambda: _draw_overview(parts, rows, family, title), rows, title, alt)


def _draw_overview(parts: Sequence[Part], rows: pd.DataFrame, family: _Family, title: str) -> Figure:
    norm = _radius_norm(rows["radius_mean"])

    def draw(axis: Axes, part: Part) -> None:
        _scatter(axis, part.rows, "n", "radius_mean", norm, size=7.0)
        draw_guides(axis, part.fit)
        set_axis(axis, "x", rows["n"], whole=True)
        set_axis(axis, "y", pd.concat([rows["lower"], rows["upper"]]))

    figure = draw_overview(parts, draw, unit_in_words(family.kind).split(":")[0], _MOST_COLUMNS)
    slim = 5 * figure.get_figheight()
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=figure.axes, aspect=slim, pad=0.015)
    set_bar_ticks(bar, norm)
    bar.ax.set_title("radius R", loc="right", fontsize="medium")
    figure.suptitle(literal(title))
    figure.legend(handles=guide_handles(), loc="outside lower center", ncols=3)
    return figure


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


def _description(part: Part) -> str:
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
