"""Draw the values of the paper's published code beside the constants that are measured correctly.

The correct constants are measured without the published code's differences. Fitted powers of n are drawn with
both.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.lines import Line2D

from howsmooth.study.figures.style import Files, draw_each, literal, new_panels, save, set_axis
from howsmooth.study.progress_listener import Silent
from howsmooth.study.text_formatting import decimal, file_stem, readable

__all__ = ["draw_published"]

_SERIES = (("corrected", "#440154", "o", "corrected"), ("as published", "#e07b00", "^", "as published"))
_COLUMNS = 3


def draw_published(
    rows: pd.DataFrame, exponents: pd.DataFrame, folder: str | os.PathLike[str]
) -> list[Files]:
    """Draw the published code's values against n: a figure for each model and text, a panel for each layer.

    Parameters
    ----------
    rows
        The rows of ``published.csv``.
    exponents
        The rows of ``published-exponents.csv``.
    folder
        The folder for the files, which is created if needed.

    Returns
    -------
    list of tuple of pathlib.Path
        The paths of each figure as PNG and PDF.

    """
    folder = Path(folder)
    figures = [
        partial(_draw, str(model), str(text), family, exponents, folder)
        for (model, text), family in rows.groupby(["model", "text"], sort=True)
    ]
    return draw_each(figures, folder, Silent())


def _draw(model: str, text: str, family: pd.DataFrame, exponents: pd.DataFrame, folder: Path) -> Files:
    layers = sorted(family["layer"].unique())
    columns = min(_COLUMNS, len(layers))
    figure, axes = new_panels(len(layers), columns, (3.6 if columns > 1 else 4.6, 3.0), (0.8, 1.3))
    shown = family[family["quantity"].isin([name for name, *_ in _SERIES])]
    for axis, layer in zip(axes, layers, strict=True):
        words = [f"layer {layer}"]
        for name, colour, marker, label in _SERIES:
            points = shown[(shown["layer"] == layer) & (shown["quantity"] == name)]
            axis.scatter(points["n"], points["lipschitz"], s=9, marker=marker, color=colour, alpha=0.45, lw=0)
            fit = _fit(exponents, model, text, int(layer), name)
            if fit is None:
                continue
            ends = [float(fit["n_min"]), float(fit["n_max"])]
            axis.plot(
                ends,
                [math.exp(fit["intercept"]) * n ** fit["slope"] for n in ends],
                color=colour,
                linewidth=1.7,
            )
            interval = f"{decimal(fit['low'], 3)}, {decimal(fit['high'], 3)}"
            words.append(f"{label}: $n^{{{decimal(fit['slope'], 3)}}}$ [{interval}]")
        axis.set_title("\n".join(words), fontsize=9)
        axis.set_xlabel("sequence length n (tokens)")
        set_axis(axis, "x", shown["n"], whole=True)
        set_axis(axis, "y", shown["lipschitz"])
    figure.supylabel("local Lipschitz constant", fontsize=10)
    title = f"{readable(model)}, text {readable(text)}"
    figure.suptitle(literal(title))
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for _, colour, marker, label in _SERIES
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=2,
        title="above each panel: exponent [95 % interval]",
    )
    return save(figure, folder, file_stem("published", model, text), title)


def _fit(exponents: pd.DataFrame, model: str, text: str, layer: int, quantity: str) -> pd.Series | None:
    """Find the exponent of one layer and quantity in the table of fitted exponents.

    If several were fitted, return the last one; if none was, return None.
    """
    found = exponents[
        (exponents["model"] == model)
        & (exponents["text"] == text)
        & (exponents["layer"] == layer)
        & (exponents["quantity"] == quantity)
        & (exponents["note"] == "")
    ]
    return None if found.empty else found.iloc[-1]
