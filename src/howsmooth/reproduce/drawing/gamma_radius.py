"""Appendix C.5, drawn from the finished units of its experiment: γR² of every head; nothing here measures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from howsmooth.reproduce.drawing.paper import COLUMN, PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.study.figures.style import FIT_COLOUR, GREY, literal, new_figure, set_axis
from howsmooth.study.names import decimal, readable
from howsmooth.study.ticks import number

__all__ = ["LONG", "draw", "gamma_words", "over_texts"]

LONG = 100
"""The length at which the growth of the worst inputs is asked about."""

_MOST_ACROSS = 3
_NEGATIVE, _POSITIVE = "#440154", "#21918c"
_EIGENVALUES = ((True, _NEGATIVE, "o", r"$\gamma = -\gamma_{\min}$"),
                (False, _POSITIVE, "^", r"$\gamma = \gamma_{\max}/8$"))  # fmt: skip


def draw(folder: Path) -> Finding:
    """Draw the figure from what ``folder`` holds, and say what is seen in it.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    table = over_texts(Kept(folder / "units").table(note["units"]))
    families = [(str(model), part) for model, part in table.groupby("model", sort=False)]
    with rc_context(PAPER):
        pictures = [
            _picture(families[first : first + _MOST_ACROSS], folder, first // _MOST_ACROSS)
            for first in range(0, len(families), _MOST_ACROSS)
        ]
    seen = [gamma_words(model, part) for model, part in families]
    caption = "γR² of every head, R the root mean square norm of its tokens over all texts"
    return Finding(
        pictures, seen, [(caption, _shown(table))], [(what, words) for what, words in note["made"]]
    )


def over_texts(rows: pd.DataFrame) -> pd.DataFrame:
    """Take the radius over all texts and lengths, and γR² with it.

    Parameters
    ----------
    rows
        One a model, text, length, layer and head: the eigenvalues, ``radius`` (root mean square norm of the
        tokens), ``radius_from`` and ``radius_to`` (that of single sequences, the smallest and the largest),
        ``n`` and ``samples``.

    Returns
    -------
    pandas.DataFrame
        One row a model, layer and head: the eigenvalues, ``radius``, ``radius_from``, ``radius_to``, and
        ``strength``, ``strength_from`` and ``strength_to``, γR² with each. NaN where A has no real
        eigenvalue.

    """
    found = []
    for (model, layer, head), part in rows.groupby(["model", "layer", "head"], sort=False):
        weights = (part["n"] * part["samples"]).to_numpy(np.float64)
        radius = math.sqrt(float(weights @ part["radius"].to_numpy(np.float64) ** 2) / float(weights.sum()))
        low, high = float(part["radius_from"].min()), float(part["radius_to"].max())
        eigenvalues = part[["gamma_min", "gamma_max", "gamma"]].astype("float64").iloc[0]
        gamma = float(eigenvalues["gamma"])
        found.append(
            {
                "model": model,
                "layer": layer,
                "head": head,
                **eigenvalues.to_dict(),
                "radius": radius,
                "radius_from": low,
                "radius_to": high,
                "strength": gamma * radius**2,
                "strength_from": gamma * low**2,
                "strength_to": gamma * high**2,
            }
        )
    return pd.DataFrame(found)


# ---- the picture


def _picture(families: list[tuple[str, pd.DataFrame]], folder: Path, place: int) -> Picture:
    figure = new_figure(WIDTH if len(families) > 1 else COLUMN, 2.3)
    axes = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    everything = pd.concat([part for _, part in families])
    for axis, (model, part) in zip(axes, families, strict=True):
        _panel(axis, part)
        axis.set_title(literal(readable(model, 34)))
        axis.set_xlabel("layer")
    values = pd.concat([everything[name] for name in ("strength", "strength_from", "strength_to")]).dropna()
    if (values > 0).all() and len(values) and values.max() > 20 * values.min():
        for axis in axes:
            set_axis(axis, "y", pd.concat([values, pd.Series([_half()])]))
    else:
        axes[0].set_ylim(min(0.0, 1.05 * float(values.min())), 1.08 * max(float(values.max()), _half()))
        axes[0].yaxis.set_major_formatter(FuncFormatter(number))
    axes[0].set_ylabel(r"$\gamma R^2$")
    figure.legend(handles=_handles(everything), loc="outside lower center", ncols=4, handlelength=1.8)
    names = "; ".join(readable(model) for model, _ in families)
    stem = "gamma-r2" if place == 0 else f"gamma-r2-{place + 1}"
    pdf, png = save_picture(figure, folder, stem, f"Appendix C.5: {names}")
    spans = [
        f"{readable(model)}: from {part['strength'].min():.3g} to {part['strength'].max():.3g}"
        for model, part in families
        if part["strength"].notna().any()
    ]
    alt = f"Dots, one a head, gamma R squared against the layer. {'; '.join(spans)}."
    caption = (
        "γR² of every head, with γ = max(−γ_min, γ_max/8) and R the root mean square norm of the tokens "
        "that text gives the layer; bars from the smallest to the largest of a sequence. Above the dashed "
        f"line, log({LONG - 1})/2, the heavy one of the paper's two clusters has at least half of the weight "
        f"at n = {LONG}."
    )
    return Picture(pdf, png, alt, caption)


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    there = rows[rows["strength"].notna()]
    most = max(int(rows["head"].max()), 1)
    across = there["layer"] + 0.56 * (there["head"] / most - 0.5)
    axis.vlines(across, there["strength_from"], there["strength_to"], color=GREY, linewidth=0.5, zorder=2)
    for negative, colour, marker, _ in _EIGENVALUES:
        chosen = _negative(there) == negative
        axis.scatter(
            across[chosen],
            there["strength"][chosen],
            s=9,
            color=colour,
            marker=marker,
            linewidths=0,
            zorder=3,
        )
    axis.axhline(_half(), color=FIT_COLOUR, linestyle=(0, (4, 2)), linewidth=0.9, zorder=1)
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, color="0.88", zorder=0)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axis.set_xlim(rows["layer"].min() - 0.6, rows["layer"].max() + 0.6)


def _handles(rows: pd.DataFrame) -> list[Line2D]:
    there = rows[rows["strength"].notna()]
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=3, linestyle="none", label=words)
        for negative, colour, marker, words in _EIGENVALUES
        if (_negative(there) == negative).any()
    ]
    line = Line2D(
        [], [], color=FIT_COLOUR, linestyle=(0, (4, 2)), linewidth=0.9, label=rf"$\log({LONG - 1})/2$"
    )
    return [*handles, line]


def _negative(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(-rows["gamma_min"] > rows["gamma_max"] / 8)


def _half() -> float:
    """γR² at which the heavy one of n = LONG tokens has half of the weight: 1/(1 + (n−1) e^(−2γR²)) = 1/2."""
    return math.log(LONG - 1) / 2


# ---- the words


def gamma_words(model: str, rows: pd.DataFrame) -> str:
    """Say what is seen of a model in the rows that :func:`over_texts` gives."""
    name = readable(model)
    there = rows[rows["strength"].notna()]
    if there.empty:
        return f"{name}: no head has a real eigenvalue, so that γ has no meaning."
    strength = there["strength"].to_numpy(np.float64)
    enough, count = int((strength >= _half()).sum()), len(there)
    low, high = float(there["radius"].min()), float(there["radius"].max())
    radii = f"R is {low:.4g}"
    if f"{low:.3g}" != f"{high:.3g}":
        radii = f"R is from {low:.4g} to {high:.4g}, by layer"
    negative = int(_negative(there).sum())
    largest = there.iloc[int(strength.argmax())]
    words = (
        f"{name}: γR² is from {strength.min():.3g} to {strength.max():.3g} over its {count} heads, "
        f"{np.median(strength):.3g} in the median, and largest in layer {largest['layer']}, head "
        f"{largest['head']}; {radii}. γ is −γ_min in {negative} heads and γ_max/8 in {count - negative}. In "
        f"{enough} of {count} heads γR² is at least {decimal(_half(), 2)}: there the paper's two clusters, "
        f"at the norm of real tokens, still give the heavy token half of the weight at n = {LONG}."
    )
    without = len(rows) - count
    return words + (f" Without any real eigenvalue: {without} more." if without else "")


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    named = {
        "model": "model", "layer": "layer", "head": "head", "gamma_min": "γ_min", "gamma_max": "γ_max",
        "gamma": "γ", "radius": "R", "strength": "γR²", "strength_from": "with the smallest R",
        "strength_to": "with the largest R",
    }  # fmt: skip
    return table[list(named)].rename(columns=named)
