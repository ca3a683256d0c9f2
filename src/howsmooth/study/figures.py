"""Draw figures of measurements in the style of the paper: the constant against the length, coloured by the
radius, with the fitted exponent and lines of slope 1/4 and 1/2, and the constant against the radius, coloured
by the length. Unconverged measurements are hollow, with their interval.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from howsmooth.results.curves import SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import (
    GREY,
    Figure,
    LogNorm,
    Normalize,
    Picture,
    add_colourbar,
    literal,
    picture,
    shades,
    styled,
)
from howsmooth.study.exponents import Exponent, fitted_groups
from howsmooth.study.progress_listener import Listener
from howsmooth.words import (
    decimal,
    file_stem,
    kind_in_words,
    place_in_words,
    readable,
    scope_in_words,
    unit_in_words,
)

__all__ = ["draw_all", "overview"]

_DOTS_AN_INCH = 96  # of a CSS pixel
_MOST_COLUMNS = 16
_WIDE = 20.0
_NEARLY_CONSTANT = 1.02
_FEW_COLUMNS = 4
_FIT_COLOUR = "#c1121f"
_REFERENCE_SLOPES = ((0.25, "1/4", (0.0, (5.0, 2.0))), (0.5, "1/2", (0.0, (1.2, 1.6))))


def draw_all(
    measurements: pd.DataFrame,
    folder: str | os.PathLike[str],
    listener: Listener,
    kinds: Mapping[str, str] = {},
    *,
    overviews: bool = False,
) -> list[Picture]:
    """Draw a figure for each layer or head, and an overview for each model, text and scope. With
    ``overviews``, draw only one figure for each model: of its first text, in the scope ``attention`` if that
    was measured. ``kinds`` maps the name of an input to its kind.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figures = list(_figures(measurements, kinds, overviews=overviews))
    drawn = []
    for stem, title, several, draw_it in figures:
        drawn.append(picture(draw_it(), folder, stem, title, dots=_DOTS_AN_INCH, overview=several))
        listener.advance(float(len(drawn)), float(len(figures)), f"{len(drawn)} of {len(figures)}")
    return drawn


def overview(measurements: pd.DataFrame, kinds: Mapping[str, str] = {}) -> Figure:
    """Return the overview that :func:`draw_all` draws for the first model."""
    *_, draw_it = next(_figures(measurements, kinds, overviews=True))
    return draw_it()


# The stem of the files of a figure, its title, whether it is an overview, and what draws it
_Drawing = tuple[str, str, bool, Callable[[], Figure]]


def _figures(measurements: pd.DataFrame, kinds: Mapping[str, str], *, overviews: bool) -> Iterator[_Drawing]:
    families = dict(iter(measurements.groupby(["model", "text", "scope"], sort=True)))
    chosen = sorted(families)
    if overviews:
        usual = sorted(families, key=lambda names: (names[2] != "attention", names), reverse=True)
        chosen = sorted({names[0]: names for names in usual}.values())
    for names in chosen:
        rows, (model, text, scope) = families[names], map(str, names)
        kind = kinds.get(text, "text")
        what = f"{readable(model)}, {scope_in_words(rows.iloc[0])}, {kind_in_words(kind)} {readable(text)}"
        parts = [
            _Part(int(place["layer"]), None if pd.isna(place["head"]) else int(place["head"]), own, fit)
            for place, own, fit in fitted_groups(rows, ("layer", "head"))
        ]
        if len(parts) > 1:
            every = "every layer and head" if parts[0].head is not None else "every layer"
            stem, title = file_stem(model, text, scope, "overview"), f"{what}: {every}"
            yield stem, title, True, partial(_draw_overview, parts, kind, title)
        if len(parts) == 1 or not overviews:
            for part in parts:
                stem, title = file_stem(model, text, scope, *part.stem), f"{what}: {part.name}"
                yield stem, title, False, partial(_draw_single, part, kind, title)


class _Part(NamedTuple):
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


@styled
def _draw_single(part: _Part, kind: str, title: str) -> Figure:
    group, fit = part.rows, part.fit
    first, last = float(group["n"].min()), float(group["n"].max())
    lengths = LogNorm(first, last) if last > first else Normalize(first - 0.5, last + 0.5)
    radii = _radius_norm(group["radius_mean"])
    label = f"fit $n^{{{fit.slope:z.3f}}}$, 95 % interval {fit.ends()}"
    against_length = Panel(
        [*_points(group, "n", "radius_mean", radii), *_guides(fit, label)],
        f"no exponent: {fit.note}" if fit.note else "",
        f"sequence length n ({unit_in_words(kind)})",
    )
    against_radius = Panel(
        _points(group, "radius_mean", "n", lengths),
        x="radius R (root mean square token norm)" + _constancy(group["radius_mean"]),
        scales=("log", "log"),
    )
    figure, axes = draw([[against_length, against_radius]], (9.6, 4.1), sharey=True)
    left, right = axes[0]
    # Without a line and ticks, the numbers of the left colour bar do not read as an axis of the right panel.
    right.spines["left"].set_visible(False)
    right.tick_params(axis="y", left=False)
    add_colourbar(figure, left, radii, "radius R")
    add_colourbar(figure, right, lengths, "length n", whole=True)
    add_legend(figure, 3)
    hollow = int((~group["converged"]).sum())
    words = f"\n{hollow} of {len(group)} did not converge: hollow, with their interval, not in the fit"
    figure.suptitle(literal(title) + (words if hollow else ""))
    return figure


@styled
def _draw_overview(parts: Sequence[_Part], kind: str, title: str) -> Figure:
    radii = pd.concat([part.rows["radius_mean"] for part in parts])
    norm, unit = _radius_norm(radii), unit_in_words(kind).split(":")[0]
    heads = len({part.head for part in parts})
    columns = min(heads, _MOST_COLUMNS) if heads > 1 else min(len(parts), _FEW_COLUMNS)
    label = "least-squares fit, exponent [95 % interval]"
    panels = []
    for part in parts:
        curves = [*_points(part.rows, "n", "radius_mean", norm, size=7.0), *_guides(part.fit, label)]
        panels.append(Panel(curves, part.name, f"length n ({unit})", ""))
    table = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    width = 2.3 if columns <= _FEW_COLUMNS else 1.7
    size = 1.1 + width * columns, 1.8 + 2.0 * len(table)
    figure, axes = draw(table, size, sharex="all", sharey="all")
    for axis, part in zip(axes.ravel(), parts, strict=False):
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
    add_legend(figure, 3)
    add_colourbar(figure, list(axes.ravel()), norm, "radius R", below=True)
    figure.suptitle(literal(title))
    return figure


# ---- Points and lines


def _guides(fit: Exponent, label: str) -> list[Curve]:
    if fit.note:
        return []
    ends = np.array([fit.n_min, fit.n_max], dtype=float)
    middle = math.sqrt(fit.n_min * fit.n_max)
    fitted = [fit.at(end) for end in ends]
    return [Curve(ends, fitted, label, _FIT_COLOUR, dashes=SOLID, spans=False, halo=True)] + [
        Curve(ends, fit.at(middle) * (ends / middle) ** slope, f"slope {words}", dashes=dashes, spans=False)
        for slope, words, dashes in _REFERENCE_SLOPES
    ]


def _points(
    group: pd.DataFrame, across: str, colour: str, norm: Normalize, size: float = 13.0
) -> list[Curve]:
    positive = group[group["lipschitz"] > 0]
    curves = []
    for converged in (True, False):
        rows = positive[positive["converged"] == converged]
        floor = rows["lipschitz"].min() * 1e-3
        spread = None if converged else (rows["lower"].clip(lower=floor), rows["upper"])
        dots = Curve(rows[across], rows["lipschitz"], colour=shades(rows[colour], norm), mark="o", alpha=0.85)
        curves.append(replace(dots, size=size, filled=converged, spread=spread))
    return curves


def _radius_norm(radii: pd.Series) -> Normalize:
    # The colours span what is there, unless radii agree to four digits, where rounding alone differs.
    middle = float(radii.min() + radii.max()) / 2
    half = max(float(radii.max() - radii.min()) / 2, 1e-4 * abs(middle), 1e-12)
    low, high = middle - half, middle + half
    return LogNorm(low, high) if high > _WIDE * low > 0 else Normalize(low, high)


def _constancy(radii: pd.Series) -> str:
    low, high = float(radii.min()), float(radii.max())
    if len(radii) < 2 or low <= 0 or high / low > _NEARLY_CONSTANT:
        return ""
    percent = 100 * (high / low - 1)
    return "\nthe same for every sequence" + (f" within {percent:.2g} %" if percent > 0.001 else "")
