"""Figure 1: the local Lipschitz constant on text, against the length and against the radius of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from howsmooth.paper import plotting
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench
from howsmooth.paper.growth_with_length import LengthGrowth, growths
from howsmooth.paper.model_with_texts import models_of
from howsmooth.paper.plotting import Curve, Panel, correlation_label, fitted, power_label
from howsmooth.results.drawing import COLOURS, literal, logarithmic, set_bar_ticks, shades
from howsmooth.study.exponents import QUARTER, Exponent
from howsmooth.words import readable

__all__ = ["measure", "result_sentences", "show"]

_MOST_ACROSS = 3
_NAMES = {"n": "sequence length", "radius_mean": "mean radius"}


def measure(bench: Bench) -> list[list[LengthGrowth]]:
    """Measure how the constant grows with the length. Return a list for each layer, with an item per text."""
    return growths(models_of(bench))


def show(columns: list[list[LengthGrowth]], folder: Path) -> Finding:
    """Draw a panel for each layer and text, with at most three layers a picture, and describe the results."""
    pictures = [
        _picture(part, folder, f"figure-1{row}{end}", across, colour)
        for row, across, colour in (("", "n", "radius_mean"), ("-radius", "radius_mean", "n"))
        for end, part in plotting.sheets(columns, _MOST_ACROSS)
    ]
    every = [growth for column in columns for growth in column]
    table = pd.DataFrame([growth.columns() for growth in every])
    return Finding(pictures, result_sentences(every), [("Exponents of the panels", table)])


def _picture(
    columns: Sequence[list[LengthGrowth]], folder: Path, stem: str, across: str, colour: str
) -> plotting.Picture:
    norms = [logarithmic(np.concatenate([growth.drawn[colour] for growth in column])) for column in columns]
    panels = [
        [_panel(growth, across, colour, norm) for growth, norm in zip(row, norms, strict=True)]
        for row in zip(*columns, strict=True)
    ]
    canvas, axes = plotting.draw_panels(panels, 1.15 + 1.75 * len(panels), sharex=True)
    for column, norm, below in zip(columns, norms, axes.T, strict=True):
        name = f"{literal(readable(column[0].model, 34))}\nlayer {column[0].layer}"
        below[0].set_title(f"{name}\n{below[0].get_title()}")
        colours = ScalarMappable(norm, COLOURS)
        bar = canvas.colorbar(colours, ax=list(below), location="bottom", aspect=32, pad=0.02)
        set_bar_ticks(bar, norm)
        bar.set_label(_NAMES[colour])
    title = f"Figure 1, against the {_NAMES[across]}: {'; '.join(column[0].name for column in columns)}"
    return plotting.write_picture(canvas, folder, stem, title, above=True)


def _panel(growth: LengthGrowth, across: str, colour: str, norm: Normalize) -> Panel:
    rows, theirs = growth.drawn, growth.published
    y = f"{literal(readable(growth.text, 30))}\nlocal Lipschitz constant"
    colours = shades(rows[colour], norm)
    dots = Curve(rows[across], rows["lipschitz"], "", colours, "o", size=6, alpha=0.85)
    if across != "n":
        title = correlation_label(growth.constant_correlation)
        return Panel([dots], title, _NAMES[across], y, ("log", "log"))
    title = power_label(growth.fit)
    if len(theirs):
        title += f"\nas published {power_label(growth.published_fit)}"
    curves = [
        dots,
        *fitted(growth.fit, plotting.RED, "fitted power"),
        *plotting.with_slope(rows, "n", "lipschitz", QUARTER, r"$c\,n^{1/4}$, $c$ fitted", "black"),
        Curve(theirs["n"], theirs["lipschitz"], "as published", plotting.ORANGE, "^", size=7, filled=False),
        *fitted(growth.published_fit, plotting.ORANGE),
    ]
    return Panel(curves, title, y=y)


def result_sentences(growths: list[LengthGrowth]) -> list[str]:
    """Return sentences on the fitted exponents. The first says how many of the intervals contain 1/4."""
    seen = [_quarters("The", [growth.fit for growth in growths])]
    seen += [_quarters("As published, the", [growth.published_fit for growth in growths])]
    return [words for words in seen if words] + [growth.result_sentences() for growth in growths]


def _quarters(beginning: str, fits: list[Exponent]) -> str:
    there = [fit for fit in fits if not fit.note]
    above, below = sum(fit.low > QUARTER for fit in there), sum(fit.high < QUARTER for fit in there)
    if not there:
        return ""
    return (
        f"{beginning} interval contains 1/4 in {len(there) - above - below} of {len(there)} panels; it lies "
        f"wholly above 1/4 in {above} and wholly below in {below}."
    )
