"""Figures of attacks: the largest constants found against the length, and how strong the scores are.

The first is the paper's Figure 2 with more on it: what was found, with its fitted exponent and the slope
1/2, the paper's construction, the constant at the given tokens, and the upper bound that nothing in
the ball can exceed. The second is that of its Appendix C.5, γR² for every head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.style import (
    FIT_COLOUR,
    GREY,
    STYLE,
    Slopes,
    draw_guides,
    guide_handles,
    literal,
    new_figure,
    save,
    set_axis,
)
from howsmooth.study.names import decimal, file_stem, readable
from howsmooth.study.ticks import number

__all__ = ["AttackPicture", "draw_attacks"]

_DOTS = (0.0, (1.2, 1.6))
_HALF: Slopes = ((0.5, "1/2", _DOTS),)
_ASIDE = 0.7
_FOUND, _PAPER, _TOKENS = "#440154", "#21918c", "#9aa0a6"  # two of viridis, and a grey
_SERIES = (
    ("tokens", _TOKENS, "s", "at the given tokens"),
    ("paper", _PAPER, "^", "the paper's construction"),
    ("found", _FOUND, "o", "largest found"),
)
_MOST_COLUMNS = 8
_MOST_PANELS = 96


@dataclass(frozen=True)
class AttackPicture:
    """A drawn figure: its two files, and words for the reader who sees it and for the one who does not."""

    png: Path
    pdf: Path
    title: str
    alt: str


@dataclass(frozen=True, eq=False)
class _Panel:
    """The rows of one attention, by length, and the exponent of the largest constant found."""

    layer: int
    head: int | None
    rows: pd.DataFrame
    fit: Exponent

    @property
    def name(self) -> str:
        return f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")


def draw_attacks(
    label: str,
    summary: pd.DataFrame,
    heads: pd.DataFrame,
    folder: Path,
    on_figure: Callable[[int, int], None] = lambda done, total: None,
) -> list[AttackPicture]:
    """Draw the constant against n for every attention, an overview of several, and γR² of all heads.

    Parameters
    ----------
    label
        Name of the model or file.
    summary
        As :func:`howsmooth.study.attack_tables.summary`.
    heads
        The rows of :class:`howsmooth.study.records.HeadStrength`.
    folder
        For the files; made if it is not there.
    on_figure
        Told how many figures are drawn, of how many.

    """
    folder.mkdir(parents=True, exist_ok=True)
    panels = _panels(summary)
    strong = heads[heads["gamma"].notna()]
    several = 1 < len(panels) <= _MOST_PANELS
    total = len(panels) + several + bool(len(strong))
    pictures: list[AttackPicture] = []
    with rc_context(STYLE):
        if several:
            pictures.append(_overview(panels, label, folder))
            on_figure(len(pictures), total)
        if len(strong):
            pictures.append(_strengths(strong, summary, label, folder))
            on_figure(len(pictures), total)
        for panel in panels:
            pictures.append(_single(panel, label, folder))
            on_figure(len(pictures), total)
    return pictures


def _panels(summary: pd.DataFrame) -> list[_Panel]:
    panels = []
    for _, group in summary.groupby(["layer", "head"], dropna=False, sort=True):
        rows = group.sort_values("n")
        layer, head = int(rows["layer"].iloc[0]), rows["head"].iloc[0]
        fit = fit_exponent(rows["n"].to_numpy(), rows["found"].to_numpy(), rows["converged"].to_numpy())
        panels.append(_Panel(layer, None if pd.isna(head) else int(head), rows, fit))
    return panels


# ---- the constant against the length


def _single(panel: _Panel, label: str, folder: Path) -> AttackPicture:
    figure = new_figure(7.6, 4.3)
    axis = figure.subplots()
    _draw(axis, panel, size=34.0)
    _limits(axis, [panel], 0.075)
    axis.set_xlabel("sequence length n (tokens)")
    axis.set_ylabel("local Lipschitz constant")
    rows, fit = panel.rows, panel.fit
    title = f"{readable(label)}, {panel.name}, scope {rows['scope'].iloc[0]}"
    below = f"tokens of norm at most R = {rows['radius'].iloc[0]:.4g}, {_mask(rows)}"
    if not rows["converged"].all():
        below += "; hollow: not converged, not in the fit"
    figure.suptitle(_heading(title, below))
    words = "" if fit.note else f"fit $n^{{{fit.slope:z.3f}}}$, 95 % {_interval(fit, 3)}"
    figure.legend(handles=_handles([panel], words), loc="outside right center", handlelength=2.2)
    stem = [f"layer-{panel.layer:02d}", *([] if panel.head is None else [f"head-{panel.head:02d}"])]
    png, pdf = save(figure, folder, file_stem(label, "attack", *stem), title)
    return AttackPicture(png, pdf, title, f"Constants against the length on log axes: {_words(panel)}")


def _overview(panels: list[_Panel], label: str, folder: Path) -> AttackPicture:
    heads = len({panel.head for panel in panels})
    columns = min(heads, _MOST_COLUMNS) if heads > 1 else min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(1.2 + 2.2 * columns, 1.6 + 2.0 * rows)
    axes = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).ravel()
    for place, axis in enumerate(axes):
        if place >= len(panels):
            axis.set_visible(False)
            continue
        panel = panels[place]
        _draw(axis, panel, size=14.0)
        _limits(axis, panels, 0.2)
        axis.set_title(panel.name, pad=4)
        if not panel.fit.note:
            axis.text(
                0.04,
                0.96,
                decimal(panel.fit.slope, 2),
                transform=axis.transAxes,
                va="top",
                fontsize=8.5,
                color=FIT_COLOUR,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
            )
        if place + columns >= len(panels):
            axis.tick_params(labelbottom=True)
            axis.set_xlabel("length n (tokens)")
    figure.supylabel("local Lipschitz constant", fontsize=10)
    scope = panels[0].rows["scope"].iloc[0]
    title = f"{readable(label)}, scope {scope}: the largest constants found"
    figure.suptitle(literal(title))
    fitted = any(not panel.fit.note for panel in panels)
    handles = _handles(panels, "fit of the largest found, with its exponent" if fitted else "")
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if columns > 2 else 2)
    png, pdf = save(figure, folder, file_stem(label, "attack", "overview"), title)
    found = [panel.fit.slope for panel in panels if not panel.fit.note]
    alt = "Small plots of the constant against the length on log axes, one an attention. " + (
        f"Fitted exponents from {decimal(min(found), 2)} to {decimal(max(found), 2)}."
        if found
        else "No exponent could be fitted."
    )
    return AttackPicture(png, pdf, title, alt)


def _draw(axis: Axes, panel: _Panel, size: float) -> None:
    """Draw the four series of a panel, and the fit of what was found."""
    rows = panel.rows
    bounded = rows[np.isfinite(rows["upper"])]
    if len(bounded):
        # What lies above the bound is ruled out: shaded, up to where the axis is cut.
        axis.fill_between(
            bounded["n"], bounded["upper"], 1e9 * bounded["upper"], color="0.93", linewidth=0, zorder=0
        )
        axis.plot(bounded["n"], bounded["upper"], color="0.15", linewidth=1.2, zorder=2)
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
    draw_guides(axis, panel.fit, ())
    if not panel.fit.note:
        # Beside the fit, not through it: where the exponent is 1/2 one would hide the other.
        ends = np.array([panel.fit.n_min, panel.fit.n_max], dtype=float)
        middle = math.sqrt(panel.fit.n_min * panel.fit.n_max)
        height = _ASIDE * panel.fit.at(middle)
        axis.plot(ends, height * np.sqrt(ends / middle), color=GREY, linestyle=_DOTS, linewidth=1.1, zorder=1)


def _apart(lengths: list[int], gap: float) -> list[float]:
    """Choose lengths whose numbers do not run into each other: the first, the last, and what fits between."""
    width = math.log(lengths[-1] / lengths[0]) or 1.0
    chosen = [float(lengths[-1])]
    for n in reversed(lengths[:-1]):
        room = math.log(n / lengths[0]) / width
        if math.log(chosen[-1] / n) / width >= gap and (n == lengths[0] or room >= gap):
            chosen.append(float(n))
    return chosen


def _limits(axis: Axes, panels: list[_Panel], gap: float) -> None:
    rows = pd.concat([panel.rows for panel in panels])
    values = pd.concat([rows[name] for name in ("tokens", "paper", "found", "upper")])
    set_axis(axis, "x", rows["n"], whole=True)
    axis.xaxis.set_major_locator(FixedLocator(_apart(sorted({int(n) for n in rows["n"]}), gap)))
    set_axis(axis, "y", values[np.isfinite(values)])


def _handles(panels: list[_Panel], fit: str) -> list[Line2D | Patch]:
    rows = pd.concat([panel.rows for panel in panels])
    handles: list[Line2D | Patch] = []
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


# ---- how strong the scores are


def _strengths(heads: pd.DataFrame, summary: pd.DataFrame, label: str, folder: Path) -> AttackPicture:
    """Draw γR² of each head against its layer, or against the head where there is one layer."""
    by_layer = heads["layer"].nunique() > 1
    across = heads["layer"] if by_layer else heads["head"]
    strength = (heads["gamma"] * heads["radius"] ** 2).to_numpy(np.float64)
    negative = (-heads["gamma_min"] > heads["gamma_max"] / 8).to_numpy(bool)
    ticks = sorted({int(value) for value in across})
    figure = new_figure(max(5.6, min(11.0, 2.4 + 0.42 * len(ticks))), 4.0)
    axis = figure.subplots()
    place = across.to_numpy(np.float64)
    for chosen, colour, marker in ((negative, _FOUND, "o"), (~negative, _PAPER, "^")):
        axis.scatter(
            place[chosen],
            strength[chosen],
            s=22,
            color=colour,
            marker=marker,
            alpha=0.8,
            linewidths=0,
            zorder=3,
        )
    attacked = set(zip(summary["layer"], summary["head"].fillna(-1), strict=True))
    ringed = [(row.layer, row.head) in attacked for row in heads.itertuples()]
    if 0 < sum(ringed) < len(heads):
        axis.scatter(
            place[ringed],
            strength[ringed],
            s=70,
            facecolors="none",
            edgecolors=FIT_COLOUR,
            linewidths=1,
            zorder=4,
        )
    if by_layer:
        for tick in ticks:
            middle = float(np.median(strength[place == tick]))
            axis.plot([tick - 0.28, tick + 0.28], [middle, middle], color=GREY, linewidth=1.4, zorder=2)
    if (strength > 0).all() and strength.max() > 20 * strength.min():
        set_axis(axis, "y", pd.Series(strength))
    else:
        axis.set_ylim(min(0.0, 1.08 * float(strength.min())), 1.08 * float(strength.max()) or 1.0)
        axis.yaxis.set_major_formatter(FuncFormatter(number))
        axis.grid(visible=True, which="major", axis="y", linewidth=0.4, color="0.88", zorder=0)
    axis.xaxis.set_major_locator(FixedLocator([float(tick) for tick in ticks[:: -(-len(ticks) // 26)]]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(min(ticks) - 0.7, max(ticks) + 0.7)
    axis.set_xlabel("layer" if by_layer else "head")
    axis.set_ylabel(r"$\gamma R^2$, $\gamma = \max(-\gamma_{\min}, \gamma_{\max}/8)$")
    title = f"{readable(label)}: how strong the scores of each head can be"
    figure.suptitle(literal(title))
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=5, label=words)
        for rows, colour, marker, words in (
            (negative, _FOUND, "o", r"$\gamma = -\gamma_{\min}$"),
            (~negative, _PAPER, "^", r"$\gamma = \gamma_{\max}/8$"),
        )
        if rows.any()
    ]
    if by_layer:
        handles.append(Line2D([], [], color=GREY, linewidth=1.4, label="median of the layer"))
    if 0 < sum(ringed) < len(heads):
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": FIT_COLOUR, "markersize": 8}
        handles.append(Line2D([], [], marker="o", linestyle="none", label="attacked here", **ring))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    png, pdf = save(figure, folder, file_stem(label, "gamma"), title)
    alt = f"Dots, one a head: gamma R squared goes from {strength.min():.3g} to {strength.max():.3g}."
    return AttackPicture(png, pdf, title, alt)


# ---- words


def _mask(rows: pd.DataFrame) -> str:
    masking = str(rows["masking"].iloc[0])
    return "unmasked" if masking == "none" else masking


def _heading(title: str, below: str) -> str:
    return literal(f"{title}\n{below}")


def _interval(fit: Exponent, digits: int) -> str:
    return f"[{decimal(fit.low, digits)}, {decimal(fit.high, digits)}]"


def _words(panel: _Panel) -> str:
    found = panel.rows["found"]
    words = f"{panel.name}, largest found from {found.min():.3g} to {found.max():.3g}"
    if panel.fit.note:
        return f"{words}; no exponent, {panel.fit.note}."
    return f"{words}; fitted exponent {decimal(panel.fit.slope, 3)}, 95 % interval {_interval(panel.fit, 3)}."
