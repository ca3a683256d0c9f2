"""Appendix C.5: measure γR² of each head, whose constant can grow like √n up to about n = e^(2γR²)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.paper import plotting
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench, Values
from howsmooth.paper.model_with_texts import attention_of, models_of
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.results.drawing import literal
from howsmooth.words import decimal, readable

__all__ = ["measure", "over_texts", "result_sentences", "show"]

# γR² at which the heavy token among _LONG has half of the weight: 1/(1 + (n−1) e^(−2γR²)) = 1/2.
_LONG = 100
_HALF = math.log(_LONG - 1) / 2
_MOST_ACROSS = 3
_HEAD = ["model", "layer", "head"]
_GAMMAS = ["gamma_min", "gamma_max", "gamma"]
_NAMES = {
    "gamma_min": "γ_min", "gamma_max": "γ_max", "gamma": "γ", "radius": "R", "strength": "γR²",
    "strength_from": "with the smallest R", "strength_to": "with the largest R",
}  # fmt: skip


def measure(bench: Bench) -> pd.DataFrame:
    """Compute γ and the token norms of each head; return a row for each model, text, length and head."""
    units = []
    for model in models_of(bench, layers=lambda _: "all", fitting=bench.options.lengths is None):
        key = {"layers": model.plan.layers.text, "samples": model.plan.samples}
        units += [model.unit(*place, partial(_rows, model.label), key) for place in model.places()]
    return bench.kept(units)


def _rows(label: str, sites: list[Any]) -> Iterator[Values]:
    for site in sites:
        radius = site.radius_mean.numpy()
        of_layer = {
            "layer": site.layer,
            "radius": math.sqrt(float((radius**2).mean())),
            "radius_from": float(radius.min()),
            "radius_to": float(radius.max()),
        }
        for h, head in enumerate(parameters_of(attention_of(site, label, bilinear=True)).heads):
            real = [value for value, _ in head.real_eigenpairs]
            values: tuple[float | None, ...] = (None, None, None)
            if real:
                values = real[0], real[-1], max(-real[0], real[-1] / 8)
            yield {**of_layer, "head": h, **dict(zip(_GAMMAS, values, strict=True))}


def over_texts(rows: pd.DataFrame) -> pd.DataFrame:
    """Compute γR² of each head, where R is the root mean square norm of its tokens over texts and lengths.

    ``strength``, ``strength_from`` and ``strength_to`` are γR² for this R, and for the smallest and the
    largest one of a sequence; NaN if A has no real eigenvalue.
    """
    tokens = rows["n"] * rows["samples"]
    weighed = rows.assign(tokens=tokens, squares=tokens * rows["radius"] ** 2)
    heads = weighed.astype(dict.fromkeys(_GAMMAS, "float64")).groupby(_HEAD, sort=False)
    radii = {"squares": "sum", "tokens": "sum", "radius_from": "min", "radius_to": "max"}
    table = heads.agg(dict.fromkeys(_GAMMAS, "first") | radii).reset_index()
    table["radius"] = np.sqrt(table["squares"] / table["tokens"])
    for end in ("", "_from", "_to"):
        table[f"strength{end}"] = table["gamma"] * table[f"radius{end}"] ** 2
    return table


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw γR² of each head, at most three models a picture, and say how large it is."""
    table = over_texts(rows)
    families = [part for _, part in table.groupby("model", sort=False)]
    parts = plotting.sheets(families, _MOST_ACROSS)
    pictures = [_picture(part, folder, f"gamma-r2{end}") for end, part in parts]
    caption = "γR² of every head, R the root mean square norm of its tokens over all texts"
    shown = table[[*_HEAD, *_NAMES]].rename(columns=_NAMES)
    return Finding(pictures, [result_sentences(part) for part in families], [(caption, shown)])


def _picture(families: Sequence[pd.DataFrame], folder: Path, stem: str) -> plotting.Picture:
    values = pd.concat(families)[["strength_from", "strength_to"]]
    low, high = float(values.min().min()), float(values.max().max())
    wide = low > 0 and high > 20 * low
    panels = [_panel(part, "log" if wide else "linear") for part in families]
    canvas, axes = plotting.draw_panels([panels], 2.3, sharey=True)
    for axis in axes[0]:
        axis.axhline(_HALF, color=plotting.RED, linestyle=plotting.DASHED, label=rf"$\log({_LONG - 1})/2$")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    names = "; ".join(readable(str(part["model"].iloc[0])) for part in families)
    return plotting.write_picture(canvas, folder, stem, f"Appendix C.5: {names}")


def _panel(rows: pd.DataFrame, scale: str) -> Panel:
    across = rows["layer"] + 0.56 * (rows["head"] / max(int(rows["head"].max()), 1) - 0.5)
    spread, negative = (
        (rows["strength_from"], rows["strength_to"]),
        -rows["gamma_min"] > rows["gamma_max"] / 8,
    )
    ends = [rows["layer"].min() - 0.6, rows["layer"].max() + 0.6]
    curves = [
        Curve(across, rows["strength"].where(which), label, colour, mark, size=7, spread=spread)
        for which, label, colour, mark in (
            (negative, r"$\gamma = -\gamma_{\min}$", plotting.VIOLET, "o"),
            (~negative, r"$\gamma = \gamma_{\max}/8$", plotting.TEAL, "^"),
        )
    ]
    curves.append(Curve(ends, [_HALF, _HALF]))  # room for the line and the ends
    title = literal(readable(str(rows["model"].iloc[0]), 34))
    return Panel(curves, title, "layer", r"$\gamma R^2$", ("linear", scale))


def result_sentences(rows: pd.DataFrame) -> str:
    """Return sentences on γR² in one model, from its rows of :func:`over_texts`."""
    name, there = readable(str(rows["model"].iloc[0])), rows[rows["strength"].notna()]
    if there.empty:
        return f"{name}: no head has a real eigenvalue, so that γ has no meaning."
    strength, count, without = there["strength"], len(there), len(rows) - len(there)
    words = (
        f"{name}: γR² is from {strength.min():z.3g} to {strength.max():z.3g} over its {count} heads, "
        f"{strength.median():.3g} in the median. In {int((strength >= _HALF).sum())} of {count} heads γR² is "
        f"at least {decimal(_HALF, 2)}."
    )
    return words + (f" Without any real eigenvalue: {without} more." if without else "")
