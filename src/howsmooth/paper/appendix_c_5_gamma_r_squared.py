"""Appendix C.5: compute, for each head of a model, up to which number n of tokens the constant of the head
can grow like √n.

This number is about e^(2γR²), so γR² is computed. R is the norm of the tokens that the head receives. The
scores of the head are ⟨A x_i + b, x_j⟩, and γ is max(−γ_min, γ_max/8), where γ_min and γ_max are the smallest
and the largest real eigenvalue of A.
"""

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
from howsmooth.paper.bench import Bench, Values
from howsmooth.paper.exponent_text import between
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.model_with_texts import bilinear, models_of
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.results.drawing import literal
from howsmooth.words import decimal, readable

__all__ = ["measure", "over_texts", "result_sentences", "show"]

# The length n for which γR² is compared, and the γR² at which the heavy token among n tokens has half of the
# attention weight: 1/(1 + (n−1) e^(−2γR²)) = 1/2.
_LONG = 100
_HALF = math.log(_LONG - 1) / 2
_MOST_ACROSS = 3
_NAMES = {
    "model": "model",
    "layer": "layer",
    "head": "head",
    "gamma_min": "γ_min",
    "gamma_max": "γ_max",
    "gamma": "γ",
    "radius": "R",
    "strength": "γR²",
    "strength_from": "with the smallest R",
    "strength_to": "with the largest R",
}


def measure(bench: Bench) -> pd.DataFrame:
    """Compute the eigenvalues of the score matrix of each head, and the norms of the tokens that the head
    receives. The table has one row for each model, text, length, layer and head.
    """
    units = []
    for model in models_of(bench, layers=lambda _: "all", fitting=bench.options.lengths is None):
        key = {"layers": model.plan.layers.text, "samples": model.plan.samples}
        units += [model.unit(*place, partial(_rows, model.label), key) for place in model.places()]
    return bench.kept("lengths of texts", units)


def _rows(label: str, sites: list[Any]) -> Iterator[Values]:
    """Yield a row for each head, with the ends of its real eigenvalues and its tokens' norms."""
    for site in sites:
        radius = site.radius_mean.numpy()
        of_layer = {
            "layer": site.layer,
            "radius": math.sqrt(float((radius**2).mean())),
            "radius_from": float(radius.min()),
            "radius_to": float(radius.max()),
        }
        for h, head in enumerate(parameters_of(bilinear(site, label)).heads):
            real = [value for value, _ in head.real_eigenpairs]
            yield {**of_layer, "head": h, **_gamma(real)}


def _gamma(real: Sequence[float]) -> Values:
    """Return γ = max(−λ_min, λ_max / 8) with the ends of the real eigenvalues; three None without any."""
    if not real:
        return dict.fromkeys(("gamma_min", "gamma_max", "gamma"))
    return {"gamma_min": real[0], "gamma_max": real[-1], "gamma": max(-real[0], real[-1] / 8)}


def over_texts(rows: pd.DataFrame) -> pd.DataFrame:
    """Compute γR² for each head from the rows of :func:`measure`, R the root mean square norm of its tokens
    over all texts and lengths.

    ``strength``, ``strength_from`` and ``strength_to`` are γR² for this R, and for the smallest and the
    largest one of a sequence; NaN if A has no real eigenvalue.
    """
    tokens, gammas = rows["n"] * rows["samples"], ["gamma_min", "gamma_max", "gamma"]
    weighed = rows.assign(tokens=tokens, squares=tokens * rows["radius"] ** 2)
    of_head = weighed.astype(dict.fromkeys(gammas, "float64")).groupby(["model", "layer", "head"], sort=False)
    sums = of_head[["squares", "tokens"]].sum()
    radii: dict[str, Any] = {
        "": np.sqrt(sums["squares"] / sums["tokens"]),
        "_from": of_head["radius_from"].min(),
        "_to": of_head["radius_to"].max(),
    }
    table = of_head[gammas].first().assign(**{f"radius{end}": radius for end, radius in radii.items()})
    strengths = {f"strength{end}": table["gamma"] * radius**2 for end, radius in radii.items()}
    return table.assign(**strengths).reset_index()


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw γR² of each head, with at most three models in a picture, and say how large it is."""
    table = over_texts(rows)
    families = [part for _, part in table.groupby("model", sort=False)]
    pictures = [
        _picture(part, folder, f"gamma-r2{end}") for end, part in plotting.sheets(families, _MOST_ACROSS)
    ]
    caption = "γR² of every head, R the root mean square norm of its tokens over all texts"
    shown = table[list(_NAMES)].rename(columns=_NAMES)
    return Finding(pictures, [result_sentences(part) for part in families], [(caption, shown)])


def _negative(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(-rows["gamma_min"] > rows["gamma_max"] / 8)


def _picture(families: Sequence[pd.DataFrame], folder: Path, stem: str) -> plotting.Picture:
    values = pd.concat(families)[["strength_from", "strength_to"]]
    low, high = float(values.min().min()), float(values.max().max())
    wide = low > 0 and high > 20 * low
    panels = [_panel(part, "log" if wide else "linear") for part in families]
    canvas, axes = plotting.draw([panels], 2.3, sharey=True)
    for axis in axes[0]:
        axis.axhline(_HALF, color=plotting.RED, linestyle=plotting.DASHED, label=rf"$\log({_LONG - 1})/2$")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if not wide:
        axes[0, 0].set_ylim(min(0.0, 1.05 * low), 1.08 * max(_HALF, high))
    names = "; ".join(readable(str(part["model"].iloc[0])) for part in families)
    return plotting.picture(canvas, folder, stem, f"Appendix C.5: {names}")


def _panel(rows: pd.DataFrame, scale: str) -> Panel:
    across = rows["layer"] + 0.56 * (rows["head"] / max(int(rows["head"].max()), 1) - 0.5)
    spread, negative = (rows["strength_from"], rows["strength_to"]), _negative(rows)
    ends = [rows["layer"].min() - 0.6, rows["layer"].max() + 0.6]
    curves = [
        Curve(across, rows["strength"].where(which), label, colour, mark, size=7, spread=spread)
        for which, label, colour, mark in (
            (negative, r"$\gamma = -\gamma_{\min}$", plotting.VIOLET, "o"),
            (~negative, r"$\gamma = \gamma_{\max}/8$", plotting.TEAL, "^"),
        )
    ]
    return Panel(
        [*curves, Curve(ends, [_HALF, _HALF])],
        literal(readable(str(rows["model"].iloc[0]), 34)),
        "layer",
        r"$\gamma R^2$",
        ("linear", scale),
    )


def result_sentences(rows: pd.DataFrame) -> str:
    """Return sentences on the values of γR² in one model, given the rows of this model from
    :func:`over_texts`.
    """
    name = readable(str(rows["model"].iloc[0]))
    there = rows[rows["strength"].notna()]
    if there.empty:
        return f"{name}: no head has a real eigenvalue, so that γ has no meaning."
    strength, count = there["strength"], len(there)
    negative, enough = int(_negative(there).sum()), int((strength >= _HALF).sum())
    largest = there.iloc[int(strength.argmax())]
    words = (
        f"{name}: γR² is from {strength.min():z.3g} to {strength.max():z.3g} over its {count} heads, "
        f"{strength.median():.3g} in the median, and largest in layer {largest['layer']}, head "
        f"{largest['head']}; R is {between(there['radius'], '{:.4g}')}, by layer. γ is −γ_min in {negative} "
        f"heads and γ_max/8 in {count - negative}. In {enough} of {count} heads γR² is at least "
        f"{decimal(_HALF, 2)}: there the paper's two clusters, at the norm of real tokens, still give the "
        f"heavy token half of the weight at n = {_LONG}."
    )
    without = len(rows) - count
    return words + (f" Without any real eigenvalue: {without} more." if without else "")
