"""Appendix C.7, drawn from the finished units of its experiment: growth with R²; nothing here measures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from howsmooth.reproduce.drawing.paper import COLUMN, PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.style import FIT_COLOUR, GREY, literal, new_figure, set_axis
from howsmooth.study.names import decimal, readable

__all__ = ["FAR", "IDENTITY", "draw", "exponents_in_radius"]

IDENTITY = "A = V = I"
"""The model of the first panel: one head of four dimensions."""

FAR = 300.0
"""‖A‖R² from which on the growth is fitted."""

_COLOURS = ("#440154", "#21918c", "#e07b00", "#3b528b", "#7f7f7f")
_SAME = 1e-5  # of a ratio from one: the measurement's own accuracy
_MARKERS = ("o", "^", "s", "D", "v")
_SHARP, _THEIRS = (0.0, ()), (0.0, (6.0, 1.5, 1.0, 1.5))
_FREE, _TWO = (0.0, (1.0, 1.2)), (0.0, (4.0, 2.0))


def draw(folder: Path) -> Finding:
    """Draw the figure from what ``folder`` holds, and say what is seen in it.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    rows = Kept(folder / "units").table(note["units"])
    table = exponents_in_radius(rows)
    with rc_context(PAPER):
        picture = _picture(rows, table, folder)
    seen = [_identity_words(rows[rows["model"] == IDENTITY], table)]
    others = rows[rows["model"] != IDENTITY].groupby(["model", "layer"], sort=False)
    seen += [_words(part, table) for _, part in others]
    caption = f"Exponents in R, where ‖A‖R² is at least {FAR:g}"
    return Finding([picture], seen, [(caption, table)], [(what, words) for what, words in note["made"]])


def exponents_in_radius(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit the growth with R of every head, where ‖A‖R² is at least :data:`FAR`.

    Parameters
    ----------
    rows
        One a model, layer, head, n and radius, with ``strength`` (‖A‖R²), ``value``, ``converged`` and
        ``real``, whether the radius is that of real tokens (these are no part of the fit).

    Returns
    -------
    pandas.DataFrame
        Columns ``model, layer, head, n, exponent, low, high, points``.

    """
    found = []
    for key, part in rows[~rows["real"].astype(bool)].groupby(["model", "layer", "head", "n"], sort=False):
        fit = _fit(part)
        names = ("model", "layer", "head", "n")
        found.append(
            {
                **dict(zip(names, key, strict=True)),
                "exponent": fit.slope,
                "low": fit.low,
                "high": fit.high,
                "points": fit.n_points,
            }
        )
    return pd.DataFrame(found)


def _fit(rows: pd.DataFrame) -> Exponent:
    far = rows[rows["strength"] >= FAR]
    return fit_exponent(
        far["radius"].to_numpy(np.float64), far["value"].to_numpy(np.float64), far["converged"].to_numpy(bool)
    )


# ---- the picture


def _picture(rows: pd.DataFrame, table: pd.DataFrame, folder: Path) -> Picture:
    panels = [part for _, part in rows.groupby(["model", "layer"], sort=False)]
    across = min(2, len(panels))
    down = math.ceil(len(panels) / across)
    figure = new_figure(WIDTH if across > 1 else COLUMN, 0.7 + 2.1 * down)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis, part in zip(axes, panels, strict=False):
        if part["model"].iloc[0] == IDENTITY:
            _identity_panel(axis, part)
        else:
            _heads_panel(axis, part)
        fits = _of(table, part)
        title = f"{readable(str(part['model'].iloc[0]), 34)}"
        if part["model"].iloc[0] != IDENTITY:
            title += f", layer {part['layer'].iloc[0]}, n = {part['n'].iloc[0]}"
        axis.set_title(f"{literal(title)}: {_power(fits)}")
        axis.set_xlabel("radius $R$")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for place in range(0, len(panels), across):
        axes[place].set_ylabel("local Lipschitz constant")
    figure.legend(handles=_handles(panels), loc="outside lower center", ncols=4, handlelength=2.2)
    names = "; ".join(readable(str(part["model"].iloc[0])) for part in panels)
    pdf, png = save_picture(figure, folder, "quadratic-growth", f"Appendix C.7: {names}")
    alt = "The local Lipschitz constant against the radius on log axes, with fitted exponents: " + "; ".join(
        f"{readable(str(part['model'].iloc[0]))} {_span(_of(table, part))}" for part in panels
    )
    caption = (
        "The local Lipschitz constant at one or two tokens 0 and all others at ±Ru, against R. First panel: "
        "A = V = I in four dimensions, dashed 1/n + γR²m/n, m the number of tokens ±Ru. Other panels: every "
        "head of a layer, and R² dashed with only its factor fitted to their median; the vertical line is "
        "the norm of real tokens. "
        f"Exponents are fitted where ‖A‖R² is at least {FAR:g}."
    )
    return Picture(pdf, png, f"{alt}.", caption)


def _identity_panel(axis: Axes, rows: pd.DataFrame) -> None:
    longest = rows[rows["n"] == rows["n"].max()].sort_values("radius")
    top = 3 * math.exp(float(longest["log_sharp"].max()))
    for name, style, colour in (
        ("log_sharp", _SHARP, "0.15"),
        ("log_paper", _THEIRS, GREY),
        ("log_free", _FREE, GREY),
    ):
        logs = longest[name].to_numpy(np.float64)
        shown = logs < math.log(1e3 * top)  # what leaves the axis would overflow
        axis.plot(longest["radius"][shown], np.exp(logs[shown]), linestyle=style, color=colour, zorder=2)
    for place, (_, part) in enumerate(rows.groupby("n", sort=True)):
        colour = _COLOURS[place % len(_COLOURS)]
        axis.plot(part["radius"], part["formula"], color=colour, linestyle=_TWO, linewidth=0.8, zorder=3)
        axis.scatter(
            part["radius"],
            part["value"],
            s=11,
            marker=_MARKERS[place % len(_MARKERS)],
            facecolors=[colour if good else "white" for good in part["converged"]],
            edgecolors=colour,
            linewidths=0.5,
            zorder=4,
        )
    set_axis(axis, "x", rows["radius"])
    set_axis(axis, "y", pd.concat([rows["value"], pd.Series([top])]))


def _heads_panel(axis: Axes, rows: pd.DataFrame) -> None:
    free = rows[~rows["real"].astype(bool)]
    for _, part in free.groupby("head", sort=True):
        axis.plot(
            part["radius"], part["value"], color=_COLOURS[0], linewidth=0.5, marker="o", markersize=1.6,
            markeredgewidth=0, alpha=0.75, zorder=3,
        )  # fmt: skip
    far = free[(free["strength"] >= FAR) & free["converged"] & (free["value"] > 0)]
    if len(far):
        factor = math.exp(float(np.median(np.log(far["value"]) - 2 * np.log(far["radius"]))))
        ends = np.array([far["radius"].min(), far["radius"].max()])
        axis.plot(ends, factor * ends**2, color=FIT_COLOUR, linestyle=_TWO, linewidth=1.1, zorder=4)
    real = rows[rows["real"].astype(bool)]
    if len(real):
        axis.axvline(float(real["radius"].iloc[0]), color=GREY, linestyle=_FREE, zorder=1)
    set_axis(axis, "x", rows["radius"])
    set_axis(axis, "y", rows["value"])
    ticks = [float(tick) for tick in axis.get_yticks() if round(math.log10(tick), 6).is_integer()]
    if len(ticks) > 1:
        axis.yaxis.set_major_locator(FixedLocator(ticks))


def _handles(panels: list[pd.DataFrame]) -> list[Line2D]:
    handles = []
    identity = [part for part in panels if part["model"].iloc[0] == IDENTITY]
    for part in identity:
        for place, n in enumerate(sorted(part["n"].unique())):
            colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
            handles.append(
                Line2D([], [], color=colour, marker=marker, markersize=3, linestyle=_TWO, linewidth=0.8,
                       label=f"measured and formula, $n = {n}$")
            )  # fmt: skip
        n = int(part["n"].max())
        handles += [
            Line2D([], [], color="0.15", linestyle=_SHARP, label=f"howsmooth's bound, $n = {n}$"),
            Line2D([], [], color=GREY, linestyle=_THEIRS, label=f"Theorem 3.3, $n = {n}$"),
            Line2D([], [], color=GREY, linestyle=_FREE, label="bound for every $n$"),
        ]
    if len(panels) > len(identity):
        handles += [
            Line2D([], [], color=_COLOURS[0], marker="o", markersize=2, linewidth=0.5, label="a head"),
            Line2D([], [], color=FIT_COLOUR, linestyle=_TWO, linewidth=1.1, label="$c\\,R^2$, $c$ fitted"),
        ]
    return handles


# ---- the words


def _of(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    same = (table["model"] == rows["model"].iloc[0]) & (table["layer"] == rows["layer"].iloc[0])
    return pd.DataFrame(table[same & table["exponent"].notna()])


def _span(fits: pd.DataFrame) -> str:
    if fits.empty:
        return "without a fit"
    low, high = decimal(fits["exponent"].min(), 2), decimal(fits["exponent"].max(), 2)
    return low if low == high else f"{low} to {high}"


def _power(fits: pd.DataFrame) -> str:
    if fits.empty:
        return "no exponent"
    low, high = decimal(fits["exponent"].min(), 2), decimal(fits["exponent"].max(), 2)
    return f"$R^{{{low}}}$" if low == high else f"$R^{{{low}}}$ to $R^{{{high}}}$"


def _identity_words(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    fits = _of(table, rows)
    names = ("n", "exponent", "low", "high")
    exponents = ", ".join(
        f"{decimal(slope, 3)} at n = {n} ({decimal(low, 3)} to {decimal(high, 3)})"
        for n, slope, low, high in zip(*(fits[name] for name in names), strict=True)
    )
    good = rows[rows["converged"].astype(bool) & (rows["strength"] >= FAR)]
    if good.empty:
        return f"{IDENTITY}, four dimensions: no measurement converged where ‖A‖R² is at least {FAR:g}."
    off = float((good["value"] / good["formula"] - 1).abs().max())
    last = good[good["n"] == good["n"].max()].sort_values("radius").iloc[-1]
    apart = float((good["mean_field"].astype(float) / good["value"]).max()) - 1
    log = math.log(float(last["value"]))
    sharp, theirs = math.exp(last["log_sharp"] - log), math.exp(last["log_paper"] - log)
    same = "the same number" if apart < _SAME else f"up to {1 + apart:.4g} times as large"
    return (
        f"{IDENTITY}, four dimensions: where ‖A‖R² is at least {FAR:g} the measured constant grows like R to "
        f"the power {exponents}, with 95 % intervals, and differs from 1/n + γR²m/n, m the number of tokens "
        f"±Ru, by a share of at most {off:.1g}. At R = {last['radius']:.3g} and n = {last['n']} it is "
        f"{last['value']:.4g}; "
        f"howsmooth's bound on the ball is {sharp:.3g} times as large, Theorem 3.3 {theirs:.3g} times, and "
        f"the bound for every n is exp({last['log_free']:.4g}). Where the tokens are a measure, whose atoms "
        f"may split, the constant is {same}."
    )


def _words(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    name, layer, fits = readable(str(rows["model"].iloc[0])), rows["layer"].iloc[0], _of(table, rows)
    heads = rows["head"].nunique()
    words = (
        f"{name}, layer {layer}: at n = {rows['n'].iloc[0]} the exponent in R is {_span(fits)} over its "
        f"{heads} heads, where ‖A‖R² is at least {FAR:g}."
    )
    widest = float((fits["high"] - fits["low"]).max()) / 2 if len(fits) else math.nan
    if len(fits):
        words += f" The widest of the 95 % intervals is ± {widest:.2g}."
    real = rows[rows["real"].astype(bool) & rows["converged"].astype(bool)]
    if len(real):
        ratio = np.exp(real["log_sharp"].to_numpy(np.float64)) / real["value"].to_numpy(np.float64)
        words += (
            f" At the norm of real tokens, R = {real['radius'].iloc[0]:.4g}, ‖A‖R² is "
            f"{real['strength'].min():.3g} to {real['strength'].max():.3g}, and the balanced tokens give "
            f"constants from {real['value'].min():.3g} to {real['value'].max():.3g}; howsmooth's bound on "
            f"the ball is {ratio.min():.3g} to {ratio.max():.3g} times as large."
        )
    hollow = int((~rows["converged"].astype(bool)).sum())
    return words + (f" {hollow} measurements did not converge and are not fitted." if hollow else "")
