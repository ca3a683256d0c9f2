"""Figures of measurements in the paper's arrangement, drawn from the store alone.

The constant against the length, coloured by the radius, with the fitted exponent and the slopes 1/4
and 1/2 for comparison; and the constant against the radius, coloured by the length. Log axes, and
colours (viridis) that do not depend on colour vision. Unconverged measurements are hollow, with
their interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.style import (
    COLOURS,
    FIT_COLOUR,
    GREY,
    STYLE,
    add_colourbar,
    draw_guides,
    guide_handles,
    literal,
    new_figure,
    save,
    set_axis,
    set_bar_ticks,
)
from howsmooth.study.names import decimal, file_stem, kind_in_words, readable, unit_in_words
from howsmooth.study.progress import Listener

__all__ = ["Picture", "draw_all"]

_MOST_COLUMNS = 16
_WIDE = 20.0
_NEARLY_CONSTANT = 1.02


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes
    ----------
    png, pdf
        Its two files.
    title, alt
        For the reader who sees it, and for the one who does not.
    model, text, scope
        What it shows.
    layer, head
        ``None`` for an overview, and for scopes without heads.
    overview
        Whether it shows all layers.
    inches
        Its width.

    """

    png: Path
    pdf: Path
    title: str
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
    folder: Path,
    listener: Listener,
    kinds: Mapping[str, str] = {},
) -> list[Picture]:
    """Draw a figure of every layer (and head), and an overview of every (model, text, scope) with several.

    Parameters
    ----------
    measurements
        Of :class:`~howsmooth.study.records.Contents`.
    folder
        For the files; made if it is not there.
    listener
        Told how many figures are drawn, of how many.
    kinds
        What is no text, by its name: of :data:`howsmooth.study.plan.KINDS`.

    Returns
    -------
    list of Picture
        Overviews before their parts.

    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    families = list(measurements.groupby(["model", "text", "scope"], sort=True))
    sizes = [family.groupby(["layer", "head"], dropna=False).ngroups for _, family in families]
    total = sum(size + (size > 1) for size in sizes)
    with rc_context(STYLE):
        for (model, text, scope), family in families:
            parts = _parts(family)
            kind = kinds.get(str(text), "text")
            if len(parts) > 1:
                pictures.append(_overview(parts, folder, str(model), str(text), str(scope), kind))
                listener.advance(float(len(pictures)), float(total), f"{len(pictures)} of {total}")
            for part in parts:
                pictures.append(_single(part, folder, str(model), str(text), str(scope), kind))
                listener.advance(float(len(pictures)), float(total), f"{len(pictures)} of {total}")
    return pictures


# ---- one layer


def _single(part: _Part, folder: Path, model: str, text: str, scope: str, kind: str) -> Picture:
    group, fit = part.rows, part.fit
    figure = new_figure(9.6, 4.1)
    left, right = figure.subplots(1, 2, sharey=True)
    lengths = _length_norm(group["n"])
    radii = _radius_norm(group["radius_mean"])
    _scatter(left, group, "n", "radius_mean", radii)
    draw_guides(left, fit)
    _scatter(right, group, "radius_mean", "n", lengths)
    set_axis(left, "x", group["n"], whole=True)
    set_axis(right, "x", group["radius_mean"])
    set_axis(left, "y", pd.concat([group["lower"], group["upper"]]))
    left.set_xlabel(f"sequence length n ({unit_in_words(kind)})")
    left.set_ylabel("local Lipschitz constant")
    right.set_xlabel("radius R (root mean square token norm)" + _constancy(group["radius_mean"]))
    add_colourbar(figure, left, radii, "radius R")
    add_colourbar(figure, right, lengths, "length n", whole=True)
    if fit.note:
        left.set_title(f"no exponent: {fit.note}", fontsize=9)
    else:
        interval = f"[{decimal(fit.low, 3)}, {decimal(fit.high, 3)}]"
        label = f"fit $n^{{{fit.slope:z.3f}}}$, 95 % interval {interval}"
        figure.legend(handles=guide_handles(label), loc="outside lower left", ncols=3, handlelength=2.6)
    place = part.name
    title = f"{readable(model)}, {place}, scope {scope}, {kind_in_words(kind)} {readable(text)}"
    figure.suptitle(literal(title) + _unconverged_words(group, fit))
    stem = [f"layer-{part.layer:02d}", *([] if part.head is None else [f"head-{part.head:02d}"])]
    alt = f"Two scatter plots on log axes for {title}: {_description(group, fit)}"
    png, pdf = save(figure, folder, file_stem(model, text, scope, *stem), title)
    return Picture(
        png,
        pdf,
        title,
        alt,
        model,
        text,
        scope,
        part.layer,
        part.head,
        overview=False,
        inches=figure.get_figwidth(),
    )


# ---- all layers


def _overview(parts: list[_Part], folder: Path, model: str, text: str, scope: str, kind: str) -> Picture:
    family = pd.concat([part.rows for part in parts])
    heads = len({part.head for part in parts})
    columns = min(heads, _MOST_COLUMNS) if heads > 1 else min(len(parts), 4)
    rows = math.ceil(len(parts) / columns)
    figure = new_figure(1.6 + (2.3 if columns <= 4 else 1.7) * columns, 1.3 + 2.0 * rows)
    axes = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).ravel()
    norm = _radius_norm(family["radius_mean"])
    for place, axis in enumerate(axes):
        if place >= len(parts):
            axis.set_visible(False)
            continue
        group, fit = parts[place].rows, parts[place].fit
        _scatter(axis, group, "n", "radius_mean", norm, size=7.0)
        draw_guides(axis, fit)
        set_axis(axis, "x", family["n"], whole=True)
        set_axis(axis, "y", pd.concat([family["lower"], family["upper"]]))
        axis.set_title(parts[place].name, pad=4)
        words = (
            "no exponent"
            if fit.note
            else f"{decimal(fit.slope, 2)} [{decimal(fit.low, 2)}, {decimal(fit.high, 2)}]"
        )
        axis.text(
            0.04,
            0.96,
            words,
            transform=axis.transAxes,
            va="top",
            fontsize=8.5 if columns <= 8 else 7.5,
            color=GREY if fit.note else FIT_COLOUR,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
        )
        # The lowest panel of a column carries the length's axis even where the last row is not full.
        if place + columns >= len(parts):
            axis.tick_params(labelbottom=True)
            axis.set_xlabel(f"length n ({unit_in_words(kind).split(':')[0]})")
    figure.supylabel("local Lipschitz constant", fontsize=10)
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=list(axes), aspect=max(12, 10 * rows), pad=0.015)
    set_bar_ticks(bar, norm)
    bar.set_label("radius R")
    title = f"{readable(model)}, scope {scope}, {kind_in_words(kind)} {readable(text)}: every layer" + (
        " and head" if heads > 1 else ""
    )
    figure.suptitle(literal(title))
    figure.legend(handles=guide_handles(), loc="outside lower center", ncols=3)
    found = [part.fit.slope for part in parts if not part.fit.note]
    alt = (
        f"Small scatter plots of the constant against the length on log axes, one a layer, for {title}. "
        + (
            f"Fitted exponents from {decimal(min(found), 2)} to {decimal(max(found), 2)}."
            if found
            else "No exponent could be fitted."
        )
    )
    png, pdf = save(figure, folder, file_stem(model, text, scope, "overview"), title)
    return Picture(
        png, pdf, title, alt, model, text, scope, None, None, overview=True, inches=figure.get_figwidth()
    )


# ---- parts


@dataclass(frozen=True)
class _Part:
    """The measurements of one layer, or of one head of it, and their exponent."""

    layer: int
    head: int | None
    rows: pd.DataFrame
    fit: Exponent

    @property
    def name(self) -> str:
        return f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")


def _parts(family: pd.DataFrame) -> list[_Part]:
    parts = []
    for layer in sorted(family["layer"].unique()):
        rows = family[family["layer"] == layer]
        heads = [int(head) for head in sorted(rows["head"].dropna().unique())]
        splits: list[tuple[int | None, pd.DataFrame]] = [(head, rows[rows["head"] == head]) for head in heads]
        splits.append((None, rows[rows["head"].isna()]))
        parts += [_Part(int(layer), head, split, _fit(split)) for head, split in splits if len(split)]
    return parts


def _fit(group: pd.DataFrame) -> Exponent:
    return fit_exponent(group["n"].to_numpy(), group["lipschitz"].to_numpy(), group["converged"].to_numpy())


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


def _unconverged_words(group: pd.DataFrame, fit: Exponent) -> str:
    hollow = int((~group["converged"]).sum())
    if hollow == 0:
        return ""
    return f"\n{hollow} of {len(group)} did not converge: hollow, with their interval, not in the fit"


def _description(group: pd.DataFrame, fit: Exponent) -> str:
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


def _length_norm(lengths: pd.Series) -> Normalize:
    low, high = float(lengths.min()), float(lengths.max())
    return LogNorm(low, high) if high > low else Normalize(low - 0.5, high + 0.5)


def _radius_norm(radii: pd.Series) -> Normalize:
    low, high = _radius_limits(radii)
    return LogNorm(low, high) if high > _WIDE * low > 0 else Normalize(low, high)


def _radius_limits(radii: pd.Series) -> tuple[float, float]:
    """Widen a nearly constant radius to 2 %: normalised inputs differ by rounding, which is no colour."""
    low, high = float(radii.min()), float(radii.max())
    middle = (low + high) / 2
    half = max((high - low) / 2, 0.01 * abs(middle), 1e-12)
    return middle - half, middle + half


def _constancy(radii: pd.Series) -> str:
    low, high = float(radii.min()), float(radii.max())
    if len(radii) < 2 or low <= 0 or high / low > _NEARLY_CONSTANT:
        return ""
    percent = 100 * (high / low - 1)
    return "\nthe same for every sequence" + (f" within {percent:.2g} %" if percent > 0.001 else "")
