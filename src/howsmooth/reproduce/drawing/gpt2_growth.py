"""Appendix E.2, drawn from its studies: constant and norm of the tokens; nothing here measures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from howsmooth.reproduce.drawing.fits import beside_corrected, fit_measured, fit_published, is_steady
from howsmooth.reproduce.drawing.paper import PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.reproduce.words import power, ratio
from howsmooth.study.exponents import LEVEL, Exponent
from howsmooth.study.figures.style import literal, new_figure, set_axis
from howsmooth.study.names import decimal, file_stem, readable
from howsmooth.study.published_rows import read_rows
from howsmooth.study.radius import Correlation, radius_correlation
from howsmooth.study.store import Store

__all__ = ["Series", "draw"]

_COLOURS = ("#440154", "#e07b00", "#21918c", "#3b528b")
_MARKERS = ("o", "^", "s", "D")
_PUBLISHED_LINE = (0.0, (1.0, 1.2))
_MOST_ACROSS = 4


@dataclass(frozen=True, eq=False)
class Series:
    """One layer on one text.

    Attributes
    ----------
    model, layer, text
        What it is.
    rows
        Its measurements.
    fit
        The power of n fitted to the converged ones.
    entering
        Norms of the tokens that enter the layer, with columns ``n`` and ``radius``; empty if they could not
        be captured.
    published
        What the published code computes at the same sequences, with columns ``n``, ``lipschitz`` and
        ``ratio`` (to the corrected constant); empty if it was not asked for.
    published_fit
        The power of n fitted to it.

    """

    model: str
    layer: int
    text: str
    rows: pd.DataFrame
    fit: Exponent
    entering: pd.DataFrame
    published: pd.DataFrame
    published_fit: Exponent

    @property
    def attended_correlation(self) -> Correlation:
        """Correlation of log norm and log n, for the tokens that attention is given."""
        return radius_correlation(self.rows["n"].to_numpy(), self.rows["radius_mean"].to_numpy(), LEVEL)

    @property
    def entering_correlation(self) -> Correlation:
        """Correlation of log norm and log n, for the tokens that enter the layer."""
        return radius_correlation(self.entering["n"].to_numpy(), self.entering["radius"].to_numpy(), LEVEL)


def draw(folder: Path) -> Finding:
    """Draw the figures from what ``folder`` holds, and say what is seen in them.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    pictures: list[Picture] = []
    everything: list[Series] = []
    seen: list[str] = []
    for one in note["models"]:
        series = _read(folder, one, note)
        with rc_context(PAPER):
            pictures += _pictures(series, one, note["texts"], folder)
        seen += [_words(each) for each in series]
        if one["reason"]:
            seen.append(
                f"{readable(one['model'])}: the tokens that enter a layer are not shown. {one['reason']}"
            )
        everything += series
    table = pd.DataFrame([_row(each) for each in everything])
    made = [(what, words) for what, words in note["made"]]
    return Finding(pictures, seen, [("Exponents, and correlations of norm and length", table)], made)


def _read(folder: Path, one: dict[str, Any], note: dict[str, Any]) -> list[Series]:
    with Store.open(folder / one["store"], write=False) as store:
        rows = store.measurements()
    rows = rows[rows["n"].isin(note["lengths"]) & (rows["sample"] < note["samples"])]
    theirs = read_rows(folder / one["store"])
    theirs = theirs[
        theirs["n"].isin(note["lengths"]) & (theirs["sample"] < note["samples"]) & note["as_published"]
    ]
    kept = Kept(folder / "units")
    entering = {unit["text"]: kept.table([unit]) for unit in one["units"]}
    nothing = pd.DataFrame({"layer": [], "n": [], "radius": []}, dtype="float64")
    found = []
    for layer in one["layers"]:
        for text in note["texts"]:
            part = rows[(rows["layer"] == layer) & (rows["text"] == text)]
            norms = entering.get(text, nothing)
            published = beside_corrected(theirs[(theirs["layer"] == layer) & (theirs["text"] == text)])
            series = Series(
                model=one["model"],
                layer=layer,
                text=text,
                rows=part,
                fit=fit_measured(part),
                entering=norms[norms["layer"] == layer],
                published=published,
                published_fit=fit_published(published),
            )
            found.append(series)
    return found


# ---- the pictures


def _pictures(series: list[Series], one: dict[str, Any], texts: list[str], folder: Path) -> list[Picture]:
    layers = one["layers"]
    return [
        _picture([s for s in series if s.layer in layers[first : first + _MOST_ACROSS]], one, texts, folder)
        for first in range(0, len(layers), _MOST_ACROSS)
    ]


def _picture(series: list[Series], one: dict[str, Any], texts: list[str], folder: Path) -> Picture:
    layers = list(dict.fromkeys(each.layer for each in series))
    figure = new_figure(WIDTH if len(layers) > 1 else 0.5 * WIDTH, 4.3)
    axes = figure.subplots(2, len(layers), squeeze=False, sharex="col", sharey="row")
    norms = [each.entering["radius"] for each in series] + [each.rows["radius_mean"] for each in series]
    for place, layer in enumerate(layers):
        above, below = axes[0, place], axes[1, place]
        here = [each for each in series if each.layer == layer]
        titles = [f"layer {layer}"]
        for each in here:
            look = texts.index(each.text) % len(_COLOURS)
            _constants(above, each, _COLOURS[look], _MARKERS[look])
            _norms(below, each, _COLOURS[look], _MARKERS[look])
            if not each.fit.note:
                low, high = decimal(each.fit.low, 2), decimal(each.fit.high, 2)
                titles.append(f"{_short(each.text)}: $n^{{{decimal(each.fit.slope, 2)}}}$ [{low}, {high}]")
        above.set_title("\n".join(titles))
        below.set_title("\n".join(_correlated(each) for each in here))
        below.set_xlabel("sequence length $n$")
        set_axis(below, "x", pd.concat([each.rows["n"] for each in here]), whole=True)
        values = [each.rows["lipschitz"] for each in series]
        set_axis(above, "y", pd.concat([*values, *(each.published["lipschitz"] for each in series)]))
        set_axis(below, "y", pd.concat(norms))
    axes[0, 0].set_ylabel("local Lipschitz constant")
    axes[1, 0].set_ylabel("norm of the tokens")
    published = any(len(each.published) for each in series)
    figure.legend(handles=_handles(texts, published=published), loc="outside lower center", ncols=5)
    name = readable(one["model"])
    figure.suptitle(literal(name))
    stem = file_stem("gpt2", one["model"], *(f"layer-{layer:02d}" for layer in layers))
    pdf, png = save_picture(figure, folder, stem, f"Appendix E.2: {name}")
    alt = (
        f"{name}: constants above and norms of the tokens below, against the length on log axes. "
        + " ".join(f"Layer {each.layer}, {readable(each.text)}: {power(each.fit)}." for each in series)
    )
    caption = (
        f"{name}. Above, the local Lipschitz constant of attention, with the fitted exponent and its 95 % "
        "interval. Below, the root mean square norm of a sequence's tokens, filled for those that attention "
        "is given and hollow for those that enter the layer, and the correlation of the latter's logarithm "
        "with that of n." + (" Dotted and with crosses, as published." if published else "")
    )
    return Picture(pdf, png, alt, caption)


def _constants(axis: Axes, each: Series, colour: str, marker: str) -> None:
    rows = each.rows[each.rows["lipschitz"] > 0]
    axis.scatter(
        rows["n"],
        rows["lipschitz"],
        s=9,
        marker=marker,
        facecolors=[colour if good else "white" for good in rows["converged"]],
        edgecolors=colour,
        linewidths=0.4,
        alpha=0.7,
        zorder=3,
    )
    axis.scatter(
        each.published["n"],
        each.published["lipschitz"],
        s=12,
        marker="+",
        color=colour,
        linewidths=0.5,
        zorder=2,
    )
    for fit, style in ((each.fit, "solid"), (each.published_fit, _PUBLISHED_LINE)):
        if not fit.note:
            ends = [float(fit.n_min), float(fit.n_max)]
            axis.plot(ends, [fit.at(n) for n in ends], color=colour, linestyle=style, linewidth=1.2, zorder=4)


def _norms(axis: Axes, each: Series, colour: str, marker: str) -> None:
    axis.scatter(
        each.rows["n"], each.rows["radius_mean"], s=9, marker=marker, color=colour, linewidths=0, zorder=3
    )
    axis.scatter(
        each.entering["n"],
        each.entering["radius"],
        s=9,
        marker=marker,
        facecolors="none",
        edgecolors=colour,
        linewidths=0.5,
        zorder=3,
    )


def _handles(texts: list[str], *, published: bool) -> list[Line2D]:
    def point(colour: str, marker: str, words: str, *, filled: bool = True) -> Line2D:
        face = colour if filled else "none"
        return Line2D(
            [],
            [],
            color=colour,
            marker=marker,
            markersize=3.5,
            linestyle="none",
            markerfacecolor=face,
            label=words,
        )

    handles = [
        point(_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)], _short(text))
        for place, text in enumerate(texts)
    ]
    handles += [
        point("0.3", "o", "given to attention"),
        point("0.3", "o", "entering the layer", filled=False),
    ]
    if published:
        handles.append(
            Line2D(
                [], [], color="0.3", marker="+", markersize=4, linestyle=_PUBLISHED_LINE, label="as published"
            )
        )
    return handles


def _short(text: str) -> str:
    return literal(readable(text, 24))


def _correlated(each: Series) -> str:
    found = each.entering_correlation
    if math.isnan(found.value):
        return f"{_short(each.text)}: no correlation"
    low, high = decimal(found.low, 2), decimal(found.high, 2)
    return f"{_short(each.text)}: $r = {decimal(found.value, 2)}$ [{low}, {high}]"


# ---- the words


def _words(each: Series) -> str:
    where = f"{readable(each.model)}, layer {each.layer}, on {readable(each.text)}: "
    words = f"{where}the constant grows like {power(each.fit)}"
    if each.fit.note:
        words = f"{where}there is no exponent, {each.fit.note}"
    words += f", from {each.fit.n_points} sequences of {each.fit.n_min} to {each.fit.n_max} tokens."
    attended = _norm_words(each.rows["radius_mean"].to_numpy(np.float64), each.attended_correlation)
    words += f" The norm of the tokens that attention is given {attended}."
    if len(each.entering):
        entering = _norm_words(each.entering["radius"].to_numpy(np.float64), each.entering_correlation)
        words += f" That of the tokens that enter the layer {entering}."
    if each.fit.left_out:
        words += f" {each.fit.left_out} measurements are left out, as they did not converge or are zero."
    if len(each.published):
        words += (
            f" As published, the quantity goes like {power(each.published_fit)}, and is in the median "
            f"{ratio(float(each.published['ratio'].median()))} times the corrected constant."
        )
    return words


def _norm_words(radius: np.ndarray, found: Correlation) -> str:
    if not len(radius):
        return "was not measured"
    if is_steady(radius):
        return f"is {radius.mean():.4g} for all, to within 0.1 %, so that it cannot make the constant grow"
    words = f"goes from {radius.min():.3g} to {radius.max():.3g}"
    if math.isnan(found.value):
        return words
    return (
        f"{words}, and the correlation of its logarithm with that of n is {decimal(found.value, 2)} "
        f"({LEVEL * 100:.0f} % interval {decimal(found.low, 2)} to {decimal(found.high, 2)})"
    )


def _row(each: Series) -> dict[str, Any]:
    attended, entering = each.attended_correlation, each.entering_correlation
    row = {
        "model": each.model,
        "layer": each.layer,
        "text": each.text,
        "exponent": each.fit.slope,
        "low": each.fit.low,
        "high": each.fit.high,
        "p of 1/4": each.fit.quarter,
        "sequences": each.fit.n_points,
        "correlation, given to attention": attended.value,
        "its low": attended.low,
        "its high": attended.high,
        "correlation, entering the layer": entering.value,
        "from": entering.low,
        "to": entering.high,
    }
    if len(each.published):
        fit = each.published_fit
        row |= {"published exponent": fit.slope, "published low": fit.low, "published high": fit.high}
        row["published / corrected"] = float(each.published["ratio"].median())
    return row
