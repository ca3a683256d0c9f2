"""All bounds over the measured constant, one line a bound; nothing here measures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from howsmooth.reproduce.drawing.bound_rows import (
    AS_CODED,
    KINDS,
    bound_table,
    bound_words,
    read_bounds,
    spoken,
)
from howsmooth.reproduce.drawing.paper import PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.study.figures.style import literal, new_figure
from howsmooth.study.names import readable

__all__ = ["AS_CODED", "draw"]

# Okabe and Ito's, which do not depend on colour vision, and markers for print without colour.
_LOOKS = (
    ("#0072b2", "o"),
    ("#d55e00", "^"),
    ("#009e73", "s"),
    ("#cc79a7", "D"),
    ("#56b4e9", "v"),
    ("#e69f00", "P"),
)
_MOST_DECADES = 6.0
_SCOPES = {"head": "one head", "attention": "all heads and the output projection"}


def draw(folder: Path) -> Finding:
    """Draw the figure from what ``folder`` holds, and say what is seen in it.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    rows = read_bounds(folder, note)
    with rc_context(PAPER):
        pictures = [
            _draw(part, folder, str(scope))
            for scope, part in rows.groupby("scope", sort=False)
            if part["holds"].any()
        ]
    return Finding(
        pictures,
        bound_words(rows),
        [
            ("Bounds over the measured constant", bound_table(rows)),
            ("Every bound at every sequence", _all(rows)),
        ],
        [(what, words) for what, words in note["made"]],
    )


def _all(rows: pd.DataFrame) -> pd.DataFrame:
    shown = rows.assign(
        value=np.exp(rows["log_value"].clip(upper=700)).where(rows["log_value"] < 700, math.inf)
    )
    names = (
        "model", "layer", "head", "scope", "masking", "text", "n", "radius", "lower", "upper", "name", "side",
        "quantity", "value", "log_value", "log_ratio", "holds", "source",
    )  # fmt: skip
    columns = shown[list(names)].rename(columns={"lower": "measured lower", "upper": "measured upper"})
    return columns.astype({"head": "Int64"})


def _draw(rows: pd.DataFrame, folder: Path, scope: str) -> Picture:
    drawn = rows[(rows["holds"] | (rows["name"] == AS_CODED)) & np.isfinite(rows["log_ratio"])]
    groups = [
        (title, _by_median(drawn[drawn["kind"] == kind]))
        for kind, title in KINDS.items()
        if kind in set(drawn["kind"])
    ]
    lines = sum(1 + len(names) for _, names in groups)
    figure = new_figure(WIDTH, 1.1 + 0.165 * lines)
    axis = figure.subplots()
    families = list(drawn.groupby(["model", "layer"], sort=False))
    places: list[float] = []
    labels: list[str] = []
    place = 0.0
    for title, names in groups:
        places.append(place)
        labels.append(title)
        for name in names:
            place += 1
            places.append(place)
            labels.append("    " + spoken(name))
            axis.axhline(place, color="0.92", linewidth=0.5, zorder=0)
            for index, (_, family) in enumerate(families):
                shift = 0.5 * ((index + 0.5) / len(families) - 0.5)
                _dots(axis, family.loc[family["name"] == name, "log_ratio"], place + shift, index)
        place += 1
    axis.set_yticks(places, labels)
    for label, words in zip(axis.get_yticklabels(), labels, strict=True):
        label.set_horizontalalignment("left")
        if not words.startswith(" "):
            label.set_fontweight("bold")
    longest = max(len(words) for words in labels)
    axis.tick_params(axis="y", length=0, pad=4.1 * longest)
    axis.set_ylim(place - 0.4, -0.6)
    _set_ratio_axis(axis, drawn["log_ratio"] / math.log(10))
    axis.spines["left"].set_visible(False)
    title = f"All bounds over the measured constant: {_SCOPES.get(scope, scope)}"
    axis.set_title(title)
    handles = [
        Line2D([], [], color=_look(index)[0], marker=_look(index)[1], markersize=3.5, linestyle="none",
               label=literal(f"{readable(str(model), 40)}, layer {layer}"))
        for index, ((model, layer), _) in enumerate(families)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    pdf, png = save_picture(figure, folder, f"bounds-{scope}", title)
    alt = (
        f"Dots for each bound, one a sequence and head, at its ratio to the measured constant on a log axis, "
        f"for {_SCOPES.get(scope, scope)}. " + " ".join(bound_words(rows)[1:])
    )
    caption = (
        f"Bounds over the measured constant, {_SCOPES.get(scope, scope)}. A dot is a head at a sequence, the "
        "larger mark the median; dots at the right end lie beyond it. The vertical line is the measured "
        "constant."
    )
    return Picture(pdf, png, alt, caption)


def _look(index: int) -> tuple[str, str]:
    return _LOOKS[index % len(_LOOKS)]


def _dots(axis: Axes, logs: pd.Series, place: float, index: int) -> None:
    if logs.empty:
        return
    colour, marker = _look(index)
    decades = logs.to_numpy(dtype=float) / math.log(10)
    shown = np.minimum(decades, _MOST_DECADES)
    axis.scatter(
        shown, np.full(len(shown), place), s=4, marker=marker, color=colour, alpha=0.3, linewidths=0, zorder=2
    )
    middle = min(float(np.median(decades)), _MOST_DECADES)
    axis.scatter(
        [middle], [place], s=16, marker=marker, color=colour, edgecolors="white", linewidths=0.4, zorder=3
    )


def _set_ratio_axis(axis: Axes, decades: pd.Series) -> None:
    low = math.floor(min(0.0, float(decades.min())) * 2) / 2 - 0.1
    high = min(_MOST_DECADES, math.ceil(float(decades.max()))) + 0.1
    axis.set_xlim(low, high)
    beyond = float(decades.max()) > _MOST_DECADES
    ticks = list(range(math.ceil(low), math.floor(high) + 1))
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticklabels([_power_of_ten(tick, beyond=beyond and tick == _MOST_DECADES) for tick in ticks])
    axis.axvline(0.0, color="black", linewidth=0.8, zorder=1)
    axis.grid(visible=True, axis="x", linewidth=0.4, color="0.9", zorder=0)
    axis.set_xlabel("bound / measured constant")


def _power_of_ten(power: int, *, beyond: bool) -> str:
    words = f"$10^{{{power}}}$" if abs(power) > 2 else f"{10.0**power:g}"
    return rf"$\geq${words}" if beyond else words


def _by_median(rows: pd.DataFrame) -> list[str]:
    return [str(name) for name in rows.groupby("name")["log_ratio"].median().sort_values().index]
