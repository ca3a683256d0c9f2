"""Draw figures of measurements in the style of the paper, from the rows in the store of a study.

Each figure shows the constant against the length, coloured by the radius, with the fitted exponent and lines
of slope 1/4 and 1/2; and the constant against the radius, coloured by the length. Axes are logarithmic. The
viridis colours do not depend on colour vision. Unconverged measurements are hollow, with their interval.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from howsmooth.results.curves import SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import (
    GREY,
    Figure,
    LogNorm,
    Normalize,
    add_colourbar,
    literal,
    save,
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

__all__ = ["Picture", "draw_all", "overview"]

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
    *,
    overviews: bool = False,
) -> list[Picture]:
    """Draw a figure of the constants for each layer or head, and overviews of several layers or heads.

    There is an overview for each model, text and scope with several layers or heads; it comes before the
    figures of its layers. With ``overviews`` there is one figure for each model: of its first text, in the
    scope ``attention`` if that was measured.
    ``kinds`` maps the name of each input that is not a text to its kind, one of
    :data:`howsmooth.study.plans.KINDS`.
    """
    folder = Path(folder)
    figures: list[Callable[[], Picture]] = []
    for family, parts in _families(measurements, folder, kinds, overviews=overviews):
        several = len(parts) > 1
        figures += [partial(_overview, parts, family)] if several else []
        figures += [] if overviews and several else [partial(_single, part, family) for part in parts]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for draw_one in figures:
        drawn.append(draw_one())
        listener.advance(float(len(drawn)), float(len(figures)), f"{len(drawn)} of {len(figures)}")
    return drawn


def overview(measurements: pd.DataFrame, kinds: Mapping[str, str] = {}) -> Figure:
    """Return the figure of the first model that :func:`draw_all` draws as an overview."""
    family, parts = next(_families(measurements, Path(), kinds, overviews=True))
    if len(parts) > 1:
        return _draw_overview(parts, family, family.title("every layer"))
    return _draw_single(parts[0], family, family.title(parts[0].name))


def _families(
    measurements: pd.DataFrame, folder: Path, kinds: Mapping[str, str], *, overviews: bool
) -> Iterator[tuple[_Family, list[_Part]]]:
    """Yield each model on one input in one scope with its layers and heads; with ``overviews``, one of each
    model.
    """
    families = dict(iter(measurements.groupby(["model", "text", "scope"], sort=True)))
    chosen = sorted(families)
    if overviews:
        usual = sorted(families, key=lambda names: (names[2] != "attention", names), reverse=True)
        chosen = sorted({names[0]: names for names in usual}.values())
    for names in chosen:
        model, text, scope = map(str, names)
        rows = families[names]
        kind, words = kinds.get(text, "text"), scope_in_words(rows.iloc[0])
        yield _Family(folder, model, text, scope, kind, words), _parts_of(rows)


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

    def title(self, place: str) -> str:
        """Return the title of a figure of a layer or head, or of every layer."""
        where = f"{kind_in_words(self.kind)} {readable(self.text)}"
        return f"{readable(self.model)}, {self.scope_words}, {where}: {place}"

    @styled
    def saved(self, figure: Figure, title: str, alt: str, part: _Part | None = None) -> Picture:
        """Write a figure of a layer or head, or of all of them (``part`` is None), as PNG and PDF."""
        words = ["overview"] if part is None else part.stem
        png, pdf = save(figure, self.folder, file_stem(self.model, self.text, self.scope, *words), title)
        layer, head = (None, None) if part is None else (part.layer, part.head)
        where = (self.model, self.text, self.scope, layer, head)
        return Picture(png, pdf, alt, *where, overview=part is None, inches=figure.get_figwidth())


# ---- One layer


def _single(part: _Part, family: _Family) -> Picture:
    title = family.title(part.name)
    alt = f"Two scatter plots on log axes for {title}: {_description(part)}"
    return family.saved(_draw_single(part, family, title), title, alt, part)


@styled
def _draw_single(part: _Part, family: _Family, title: str) -> Figure:
    group, fit = part.rows, part.fit
    first, last = float(group["n"].min()), float(group["n"].max())
    lengths = LogNorm(first, last) if last > first else Normalize(first - 0.5, last + 0.5)
    radii = _radius_norm(group["radius_mean"])
    label = f"fit $n^{{{fit.slope:z.3f}}}$, 95 % interval {fit.ends()}"
    against_length = Panel(
        [*_points(group, "n", "radius_mean", radii), *_guides(fit, label)],
        f"no exponent: {fit.note}" if fit.note else "",
        f"sequence length n ({unit_in_words(family.kind)})",
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


# ---- All layers


def _overview(parts: Sequence[_Part], family: _Family) -> Picture:
    by_head = any(part.head is not None for part in parts)
    title = family.title(f"every layer{' and head' if by_head else ''}")
    alt = (
        "Small scatter plots of the constant against the length on log axes, one a layer, for "
        f"{title}. {_range_of_exponents(parts)}"
    )
    return family.saved(_draw_overview(parts, family, title), title, alt)


@styled
def _draw_overview(parts: Sequence[_Part], family: _Family, title: str) -> Figure:
    radii = pd.concat([part.rows["radius_mean"] for part in parts])
    norm, unit = _radius_norm(radii), unit_in_words(family.kind).split(":")[0]
    heads = len({part.head for part in parts})
    columns = min(heads, _MOST_COLUMNS) if heads > 1 else min(len(parts), _FEW_COLUMNS)
    label = "least-squares fit, exponent [95 % interval]"
    panels = [
        Panel(
            [*_points(part.rows, "n", "radius_mean", norm, size=7.0), *_guides(part.fit, label)],
            part.name,
            f"length n ({unit})",
            "",
        )
        for part in parts
    ]
    table = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    width = 2.3 if columns <= _FEW_COLUMNS else 1.7
    size = 1.6 + width * columns, 1.3 + 2.0 * len(table)
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
    add_colourbar(figure, list(axes.ravel()), norm, "radius R", aspect=5 * figure.get_figheight())
    figure.suptitle(literal(title))
    return figure


# ---- Points and lines


def _guides(fit: Exponent, label: str) -> list[Curve]:
    """Return the line of a fitted power law, and those of the reference slopes that meet it in its middle."""
    if fit.note:
        return []
    ends = np.array([fit.n_min, fit.n_max], dtype=float)
    middle = math.sqrt(fit.n_min * fit.n_max)
    line = Curve(
        ends, [fit.at(end) for end in ends], label, _FIT_COLOUR, dashes=SOLID, spans=False, halo=True
    )
    return [line] + [
        Curve(ends, fit.at(middle) * (ends / middle) ** slope, f"slope {words}", dashes=dashes, spans=False)
        for slope, words, dashes in _REFERENCE_SLOPES
    ]


def _points(
    group: pd.DataFrame, across: str, colour: str, norm: Normalize, size: float = 13.0
) -> list[Curve]:
    """Return the constants as dots, coloured by a column; those that did not converge are hollow, with their
    intervals.
    """
    positive = group[group["lipschitz"] > 0]
    curves = []
    for converged in (True, False):
        rows = positive[positive["converged"] == converged]
        floor = rows["lipschitz"].min() * 1e-3
        curves.append(
            Curve(
                rows[across],
                rows["lipschitz"],
                colour=shades(rows[colour], norm),
                mark="o",
                size=size,
                alpha=0.85,
                filled=converged,
                spread=None if converged else (rows["lower"].clip(lower=floor), rows["upper"]),
            )
        )
    return curves


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
