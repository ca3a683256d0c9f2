"""Draw figures of attacks: the largest constants against the length.

They extend the paper's Figure 2: the largest constants found, with their fitted exponent and a line of slope
1/2; the constants at the paper's construction and at the given tokens; and the upper bound, which no tokens
in the ball can exceed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from howsmooth.study.figures.drawing import (
    REFERENCE_SLOPES,
    Files,
    Part,
    draw_each,
    draw_guides,
    draw_overview,
    guide_handles,
    literal,
    new_figure,
    parts_of,
    save,
    set_axis,
)
from howsmooth.study.progress_listener import Listener
from howsmooth.study.text_formatting import file_stem, mask_in_words, readable

__all__ = ["draw_attacks"]

_HALF = REFERENCE_SLOPES[1:]
_ASIDE = 0.7
_FOUND, _PAPER, _TOKENS = "#440154", "#21918c", "#9aa0a6"  # two of viridis, and a grey
_SERIES = (
    ("tokens", _TOKENS, "s", "at the given tokens"),
    ("paper", _PAPER, "^", "the paper's construction"),
    ("found", _FOUND, "o", "largest found"),
)
_MOST_COLUMNS = 8
_MOST_PANELS = 96


def draw_attacks(
    label: str, summary: pd.DataFrame, folder: str | os.PathLike[str], listener: Listener
) -> list[Files]:
    """Draw the constants that attacks found against the length n.

    Each attention layer or head has a figure. If there are several, but not too many, they also share an
    overview. ``summary`` is the table from :func:`howsmooth.study.attack_outputs.summary`. The result has
    the paths of each figure as PNG and PDF.
    """
    folder = Path(folder)
    parts = parts_of(summary, "found")
    figures: list[Callable[[], Files]] = [partial(_single, part, label, folder) for part in parts]
    if 1 < len(parts) <= _MOST_PANELS:
        figures.insert(0, partial(_overview, parts, label, folder))
    return draw_each(figures, folder, listener)


def _single(part: Part, label: str, folder: Path) -> Files:
    figure = new_figure(7.6, 4.3)
    axis = figure.subplots()
    _draw(axis, part, size=34.0)
    _limits(axis, part.rows, 0.075)
    axis.set_xlabel("sequence length n (tokens)")
    axis.set_ylabel("local Lipschitz constant")
    rows, fit = part.rows, part.fit
    title = f"{readable(label)}, {part.name}, scope {rows['scope'].iloc[0]}"
    masking = mask_in_words(rows["masking"].iloc[0])
    below = f"tokens of norm at most R = {rows['radius'].iloc[0]:.4g}, {masking}"
    if not rows["converged"].all():
        below += "; hollow: not converged, not in the fit"
    figure.suptitle(literal(f"{title}\n{below}"))
    words = "" if fit.note else f"fit $n^{{{fit.slope:z.3f}}}$, 95 % {fit.ends()}"
    figure.legend(handles=_handles(rows, words), loc="outside right center", handlelength=2.2)
    return save(figure, folder, file_stem(label, "attack", *part.stem), title)


def _overview(parts: Sequence[Part], label: str, folder: Path) -> Files:
    rows = pd.concat([part.rows for part in parts])

    def draw(axis: Axes, part: Part) -> None:
        _draw(axis, part, size=14.0)
        _limits(axis, rows, 0.2)

    figure = draw_overview(parts, draw, "tokens", _MOST_COLUMNS)
    title = f"{readable(label)}, scope {rows['scope'].iloc[0]}: the largest constants found"
    figure.suptitle(literal(title))
    fitted = any(not part.fit.note for part in parts)
    handles = _handles(rows, "fit of the largest found, with its exponent" if fitted else "")
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if len(parts) > 2 else 2)
    return save(figure, folder, file_stem(label, "attack", "overview"), title)


def _draw(axis: Axes, part: Part, size: float) -> None:
    """Draw the constants and the upper bound of one layer or head against n, and the fitted power law."""
    rows = part.rows
    bounded = rows[np.isfinite(rows["upper"])]
    if len(bounded):
        # Shade the area above the bound, which the bound rules out, up to far beyond the limit of the axis.
        axis.fill_between(
            bounded["n"], bounded["upper"], 1e9 * bounded["upper"], color="0.93", linewidth=0, zorder=0
        )
        marker = "_" if len(bounded) == 1 else ""  # a line of one point cannot be seen
        axis.plot(bounded["n"], bounded["upper"], color="0.15", linewidth=1.2, marker=marker, zorder=2)
    for name, colour, marker, _ in _SERIES:
        there = rows[rows[name] > 0]
        whole = there["converged"] if name == "found" else pd.Series(data=True, index=there.index)
        axis.scatter(
            there["n"],
            there[name],
            s=size * (1.15 if marker == "^" else 1.0),
            marker=marker,
            facecolors=[colour if good else "white" for good in whole],
            edgecolors=colour,
            linewidths=0.9,
            zorder=5 if name == "found" else 3,
        )
    # Draw the line of slope 1/2 below the fit: through the fit, it would hide a fit with exponent 1/2.
    draw_guides(axis, part.fit, _HALF, share=_ASIDE)


def _tick_lengths(lengths: list[int], gap: float) -> list[float]:
    """Choose tick lengths whose labels do not overlap: the first, the last, and lengths that fit between."""
    width = math.log(lengths[-1] / lengths[0]) or 1.0
    chosen = [float(lengths[-1])]
    for n in reversed(lengths[:-1]):
        room = math.log(n / lengths[0]) / width
        if math.log(chosen[-1] / n) / width >= gap and (n == lengths[0] or room >= gap):
            chosen.append(float(n))
    return chosen


def _limits(axis: Axes, rows: pd.DataFrame, gap: float) -> None:
    values = pd.concat([rows[name] for name in ("tokens", "paper", "found", "upper")])
    set_axis(axis, "x", rows["n"], whole=True)
    axis.xaxis.set_major_locator(FixedLocator(_tick_lengths(sorted({int(n) for n in rows["n"]}), gap)))
    set_axis(axis, "y", values[np.isfinite(values)])


def _handles(rows: pd.DataFrame, fit: str) -> list[Line2D]:
    handles: list[Line2D] = []
    if np.isfinite(rows["upper"]).any():
        handles.append(Line2D([], [], color="0.15", linewidth=1.2, label="upper bound: none above"))
    for name, colour, marker, words in reversed(_SERIES):
        if (rows[name] > 0).any():
            handles.append(
                Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=6, label=words)
            )
    if fit:
        handles += guide_handles(fit, _HALF)
    return handles
