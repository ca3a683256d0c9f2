"""The figure of the published quantity beside the corrected one: both against n, with their fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.lines import Line2D

from howsmooth.study.figures.style import STYLE, literal, new_figure, save, set_axis
from howsmooth.study.names import decimal, file_stem, readable

__all__ = ["PublishedPicture", "draw_published"]

_SERIES = (("corrected", "#440154", "o", "corrected"), ("as published", "#e07b00", "^", "as published"))
_COLUMNS = 3


@dataclass(frozen=True)
class PublishedPicture:
    """A drawn figure: its two files, and words for the reader who does not see it."""

    png: Path
    pdf: Path
    alt: str


def draw_published(rows: pd.DataFrame, exponents: pd.DataFrame, folder: Path) -> list[PublishedPicture]:
    """Draw one figure for each model and text, a panel for each layer.

    Parameters
    ----------
    rows
        Of ``published.csv``.
    exponents
        Of ``published-exponents.csv``.
    folder
        For the files; made if it is not there.

    """
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        return [
            _draw(str(model), str(text), family, exponents, folder)
            for (model, text), family in rows.groupby(["model", "text"], sort=True)
        ]


def _draw(
    model: str, text: str, family: pd.DataFrame, exponents: pd.DataFrame, folder: Path
) -> PublishedPicture:
    layers = sorted(family["layer"].unique())
    columns = min(_COLUMNS, len(layers))
    lines = math.ceil(len(layers) / columns)
    figure = new_figure(max(5.4, 0.8 + 3.6 * columns), 1.3 + 3.0 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    shown = family[family["quantity"].isin([name for name, *_ in _SERIES])]
    said = []
    for axis, layer in zip(axes, layers, strict=False):
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
            interval = f"{decimal(fit['low'], 2)}, {decimal(fit['high'], 2)}"
            words.append(f"{label}: $n^{{{decimal(fit['slope'], 2)}}}$ [{interval}]")
        said.append("; ".join(words).replace("$n^{", "n to the power ").replace("}$", ""))
        axis.set_title("\n".join(words), fontsize=9)
        axis.set_xlabel("sequence length n (tokens)")
        set_axis(axis, "x", shown["n"], whole=True)
        set_axis(axis, "y", shown["lipschitz"])
    for axis in axes[len(layers) :]:
        axis.set_visible(False)
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
    png, pdf = save(figure, folder, file_stem("published", model, text), title)
    return PublishedPicture(
        png, pdf, f"The corrected and the published constant against n: {title}. {'. '.join(said)}."
    )


def _fit(exponents: pd.DataFrame, model: str, text: str, layer: int, quantity: str) -> pd.Series | None:
    """Return the fit of a quantity, the last one measured; None if there is none."""
    found = exponents[
        (exponents["model"] == model)
        & (exponents["text"] == text)
        & (exponents["layer"] == layer)
        & (exponents["quantity"] == quantity)
        & (exponents["note"] == "")
    ]
    return None if found.empty else found.iloc[-1]
