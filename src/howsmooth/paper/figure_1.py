"""Draw Figure 1 of the paper: the local Lipschitz constant on texts, for three models, against the sequence
length and against the mean radius of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from howsmooth.paper import plotting
from howsmooth.paper.bench import Bench
from howsmooth.paper.exponent_text import power_label
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.growth_with_length import Growth, correlation_label, growths
from howsmooth.paper.model_with_texts import models_of
from howsmooth.paper.plotting import Curve, Panel, fitted
from howsmooth.results.drawing import COLOURS, literal, set_bar_ticks
from howsmooth.study.exponents import QUARTER, Exponent
from howsmooth.words import readable

__all__ = ["measure", "result_sentences", "show"]

_MOST_ACROSS = 3
_NAMES = {"n": "sequence length", "radius_mean": "mean radius"}


def measure(bench: Bench) -> list[list[Growth]]:
    """Measure how the constant of each layer grows with the sequence length. The result contains one list for
    each layer, and each list contains one ``Growth`` for each text.
    """
    return growths(models_of(bench))


def show(panels: list[list[Growth]], folder: Path) -> Finding:
    """Draw one panel for each layer and text, with at most three layers in a picture, first against the
    length and then against the mean radius, and describe the results.
    """
    pictures = [
        _picture(part, folder, f"figure-1{row}{end}", across, colour)
        for row, across, colour in (("", "n", "radius_mean"), ("-radius", "radius_mean", "n"))
        for end, part in plotting.sheets(panels, _MOST_ACROSS)
    ]
    every = [panel for column in panels for panel in column]
    table = pd.DataFrame([panel.columns() for panel in every])
    return Finding(pictures, result_sentences(every), [("Exponents of the panels", table)])


def _picture(
    panels: Sequence[list[Growth]], folder: Path, stem: str, across: str, colour: str
) -> plotting.Picture:
    panel_of = _panel if across == "n" else _radius_panel
    canvas, axes = plotting.draw(
        [list(map(panel_of, row)) for row in zip(*panels, strict=True)],
        1.15 + 1.75 * len(panels[0]),
        sharex=True,
    )
    for column, below in zip(panels, axes.T, strict=True):
        norm = _colours(pd.concat([panel.drawn[colour] for panel in column]))
        for axis, panel in zip(below, column, strict=True):
            rows = panel.drawn
            axis.scatter(
                rows[across],
                rows["lipschitz"],
                c=rows[colour],
                cmap=COLOURS,
                norm=norm,
                s=6,
                linewidths=0,
                alpha=0.85,
                zorder=4,
                rasterized=len(rows) > 5000,
            )
            axis.scatter([], [], s=6, color=plotting.GREY, label="a sequence")
        name = f"{literal(readable(column[0].model, 34))}\nlayer {column[0].layer}"
        below[0].set_title(f"{name}\n{below[0].get_title()}")
        bar = canvas.colorbar(
            ScalarMappable(norm, COLOURS), ax=list(below), location="bottom", aspect=32, pad=0.02
        )
        set_bar_ticks(bar, norm)
        bar.set_label(_NAMES[colour])
        bar.ax.tick_params(width=0.5, length=2)
    title = f"Figure 1, against the {_NAMES[across]}: {'; '.join(column[0].name for column in panels)}"
    return plotting.picture(canvas, folder, stem, title, above=True)


def _panel(panel: Growth) -> Panel:
    """Return the panel of one layer on one text, with its title and the fitted lines, but without the dots.

    The dots are drawn later, because each dot has the colour of its radius. An invisible curve through the
    measurements makes the limits of the axes include the dots.
    """
    rows, theirs = panel.drawn, panel.published
    title = power_label(panel.fit)
    if len(theirs):
        title += f"\nas published {power_label(panel.published_fit)}"
    curves = [
        Curve(rows["n"], rows["lipschitz"]),
        *fitted(panel.fit, plotting.RED, "fitted power"),
        *plotting.with_slope(rows, "n", "lipschitz", QUARTER, r"$c\,n^{1/4}$, $c$ fitted", "black"),
        Curve(theirs["n"], theirs["lipschitz"], "as published", plotting.ORANGE, "^", size=7, filled=False),
        *fitted(panel.published_fit, plotting.ORANGE),
    ]
    return Panel(curves, title, y=_constant_on(panel))


def _radius_panel(panel: Growth) -> Panel:
    """Return the panel against the mean radius, without the dots, as in :func:`_panel`."""
    rows = panel.drawn
    return Panel(
        [Curve(rows["radius_mean"], rows["lipschitz"])],
        correlation_label(panel.constant_correlation),
        x=_NAMES["radius_mean"],
        y=_constant_on(panel),
        scales=("log", "log"),
    )


def _constant_on(panel: Growth) -> str:
    return f"{literal(readable(panel.text, 30))}\nlocal Lipschitz constant"


def _colours(values: pd.Series) -> Normalize:
    """Return a colour scale at least 2 % wide, so that rounding of equal radii is not visible."""
    if values.empty:
        return Normalize(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    middle, half = (low + high) / 2, max((high - low) / 2, 0.01 * abs(high + low) / 2, 1e-12)
    return Normalize(middle - half, middle + half)


def result_sentences(panels: list[Growth]) -> list[str]:
    """Return sentences on the fitted exponents; the first sentences say in how many panels the confidence
    interval contains 1/4.
    """
    seen = [_quarters("The", [panel.fit for panel in panels])]
    seen += [_quarters("As published, the", [panel.published_fit for panel in panels])]
    return [words for words in seen if words] + [panel.result_sentences() for panel in panels]


def _quarters(beginning: str, fits: list[Exponent]) -> str:
    there = [fit for fit in fits if not fit.note]
    above, below = sum(fit.low > QUARTER for fit in there), sum(fit.high < QUARTER for fit in there)
    if not there:
        return ""
    return (
        f"{beginning} interval contains 1/4 in {len(there) - above - below} of {len(there)} panels; it lies "
        f"wholly above 1/4 in {above} and wholly below in {below}."
    )
