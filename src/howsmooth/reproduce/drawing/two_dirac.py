"""Proposition 3.6, drawn from the finished units of its experiment; nothing here measures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from howsmooth.reproduce.drawing.paper import PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.study.figures.style import FIT_COLOUR, GREY, new_figure

__all__ = ["BETTER", "HALF", "OPPOSITE", "PAPER_WEIGHT", "draw"]

OPPOSITE, HALF = "A = −I, heavy Dirac at −Ru", "A = 8I, heavy Dirac at Ru/2"
"""The two families."""

PAPER_WEIGHT, BETTER = "e^(−2g)", "1/(1 + 3e^(2g))"
"""The two weights of the light Dirac."""

_COLOURS = {PAPER_WEIGHT: "#440154", BETTER: "#e07b00"}
_MARKERS = {OPPOSITE: "o", HALF: "^"}
_SHARP, _THEIRS = (0.0, ()), (0.0, (6.0, 1.5, 1.0, 1.5))
_FREE, _TWO = (0.0, (1.0, 1.2)), (0.0, (4.0, 2.0))
# Beyond this radius the ratios hardly move.
_NEAR = 10.0
# Where e^{2γR²} is no float64 number any more.
_OVERFLOW = math.sqrt(math.log(np.finfo(np.float64).max) / 2)


def draw(folder: Path) -> Finding:
    """Draw the figure from what ``folder`` holds, and say what is seen in it.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    rows = Kept(folder / "units").table(note["units"])
    with rc_context(PAPER):
        picture = _picture(rows, folder)
    table = rows.assign(ratio=_over(rows, "log_value"))[
        ["family", "weight", "radius", "g", "log_value", "ratio", "log_paper", "log_free", "converged"]
    ]
    caption = "Logarithms of the constant, and its ratio to (g/2) e^g"
    return Finding(
        [picture], _words(rows), [(caption, table)], [(what, words) for what, words in note["made"]]
    )


def _over(rows: pd.DataFrame, name: str) -> np.ndarray:
    """Divide by the proposition's (g/2) e^g."""
    ratios: np.ndarray = np.exp(rows[name].to_numpy(np.float64) - rows["log_asymptotic"].to_numpy(np.float64))
    return ratios


# ---- the picture


def _picture(rows: pd.DataFrame, folder: Path) -> Picture:
    figure = new_figure(WIDTH, 2.9)
    left, right = figure.subplots(1, 2)
    _growth(left, rows[rows["family"] == OPPOSITE])
    _ratios(right, rows)
    figure.legend(handles=_handles(), loc="outside lower center", ncols=3, handlelength=2.2)
    pdf, png = save_picture(figure, folder, "two-dirac", "Proposition 3.6: two Diracs")
    highest = float(rows["log_value"].max()) / math.log(10)
    alt = (
        "Left, the logarithm of the constant against the radius, growing like the square of the radius up to "
        f"10 to the power {highest:.0f}, between the lower bounds and the bound for "
        "every n. Right, its ratio to (g/2) e^g, which tends to 1 for the paper's weight and to 1.3 for the "
        "better one."
    )
    caption = (
        "Left: the local constant in W₂ of mean-field attention at two Diracs, A = −I, against R, with "
        "bounds; beyond the vertical line e^(2γR²) is no float64 number. Right: for both families, up to "
        "R = 10, divided by (g/2) e^g, g = γR², the rate of Proposition 3.6; bounds for A = −I."
    )
    return Picture(pdf, png, alt, caption)


def _growth(axis: Axes, rows: pd.DataFrame) -> None:
    decade = math.log(10)
    top = 1.35 * float(rows["log_value"].max()) / decade
    one = rows[rows["weight"] == BETTER]
    for name, style, colour in (
        ("log_theorem", _THEIRS, GREY),
        ("log_free", _FREE, GREY),
        ("log_asymptotic", _TWO, FIT_COLOUR),
    ):
        axis.plot(one["radius"], one[name] / decade, linestyle=style, color=colour, zorder=2)
    for place, (weight, part) in enumerate(rows.groupby("weight", sort=False)):
        # Every other radius for each weight: in logarithms they lie upon each other.
        some = part.iloc[place::2]
        axis.scatter(
            some["radius"], some["log_value"] / decade, s=9, marker=_MARKERS[OPPOSITE],
            color=_COLOURS[str(weight)], linewidths=0, zorder=4,
        )  # fmt: skip
    axis.axvline(_OVERFLOW, color="0.7", linewidth=0.7, zorder=1)
    axis.set(xlim=(0, 1.02 * float(rows["radius"].max())), ylim=(-0.02 * top, top), xlabel="radius $R$")
    axis.set_ylabel("local constant in $W_2$")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"$10^{{{value:.0f}}}$"))
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, color="0.88", zorder=0)


def _ratios(axis: Axes, rows: pd.DataFrame) -> None:
    shown = rows[(rows["g"] >= 1) & (rows["radius"] <= _NEAR)]
    one = shown[(shown["family"] == OPPOSITE) & (shown["weight"] == BETTER)]
    for name, style, colour in (
        ("log_free", _FREE, GREY),
        ("log_asymptotic", _TWO, FIT_COLOUR),
        ("log_better", _SHARP, _COLOURS[BETTER]),
        ("log_paper", _SHARP, _COLOURS[PAPER_WEIGHT]),
    ):
        axis.plot(one["radius"], _over(one, name), linestyle=style, color=colour, linewidth=0.8, zorder=2)
    for (family, weight), part in shown.groupby(["family", "weight"], sort=False):
        axis.scatter(
            part["radius"], _over(part, "log_value"), s=9, marker=_MARKERS[str(family)],
            color=_COLOURS[str(weight)], linewidths=0, zorder=3,
        )  # fmt: skip
    axis.set(xlim=(0, 1.02 * _NEAR), ylim=(0, 4.2), xlabel="radius $R$")
    axis.set_ylabel(r"divided by $(g/2)\,e^g$")
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, color="0.88", zorder=0)


def _handles() -> list[Line2D]:
    dots = [
        Line2D([], [], color=_COLOURS[weight], marker=_MARKERS[family], markersize=3, linestyle="none",
               label=f"{side}, light mass {words}")
        for weight, words in ((PAPER_WEIGHT, "$e^{-2g}$"), (BETTER, "$1/(1+3e^{2g})$"))
        for family, side in ((OPPOSITE, "$A=-I$"), (HALF, "$A=8I$"))
    ]  # fmt: skip
    return [
        *dots,
        Line2D([], [], color=FIT_COLOUR, linestyle=_TWO, label="Proposition 3.6, $(g/2)\\,e^g$"),
        Line2D([], [], color="0.15", linestyle=_SHARP, linewidth=0.8, label="its forms for finite $R$"),
        Line2D([], [], color=GREY, linestyle=_FREE, label="howsmooth's bound for every $n$"),
        Line2D([], [], color=GREY, linestyle=_THEIRS, label="Theorem 3.5"),
    ]


# ---- the words


def _words(rows: pd.DataFrame) -> list[str]:
    seen = []
    for family, part in rows.groupby("family", sort=False):
        words = []
        for weight, own in part.groupby("weight", sort=False):
            last = own.sort_values("radius").iloc[-1]
            ratio = math.exp(last["log_value"] - last["log_asymptotic"])
            name = "log_paper" if weight == PAPER_WEIGHT else "log_better"
            gap = math.exp(last["log_value"] - last[name]) - 1
            words.append(
                f"with the light mass {weight} the constant at R = {last['radius']:.4g} is 10 to the power "
                f"{last['log_value'] / math.log(10):.4g}, which is {ratio:.4g} times (g/2) e^g and exceeds "
                f"the proposition's form for finite R, with this mass, by a share of {max(gap, 0.0):.2g}"
            )
        seen.append(f"{family}: {'; '.join(words)}.")
    opposite = rows[(rows["family"] == OPPOSITE) & (rows["weight"] == BETTER)].sort_values("radius")
    last = opposite.iloc[-1]
    free = math.exp(last["log_free"] - last["log_value"])
    theirs = (last["log_theorem"] - last["log_value"]) / math.log(10)
    beyond = rows[(rows["radius"] > _OVERFLOW) & rows["converged"].astype(bool)]
    seen.append(
        f"For A = −I howsmooth's bound for every n is {free:.3g} times the better one of the two at "
        f"R = {last['radius']:.4g}; Theorem 3.5 is 10 to the power {theirs:.3g} times as large."
    )
    form = rows["log_paper"].where(rows["weight"] == PAPER_WEIGHT, rows["log_better"])
    below = int((rows["log_value"] < np.maximum(form, rows["log_asymptotic"]) - 1e-9).sum())
    above = int((rows["log_value"] > rows["log_free"] + 1e-9).sum())
    missed = int((~rows["converged"].astype(bool)).sum())
    split = int((rows["by"] == "splitting").sum())
    seen.append(
        f"Of {len(rows)} measurements {above} are above the bound for every n, {below} below the "
        f"proposition's form with their mass, and {missed} did not converge; {len(beyond)} are at radii "
        f"where e^(2γR²) is no float64 number. In {split} of them it is an atom that splits."
    )
    return seen
