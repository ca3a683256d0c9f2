"""Appendix C.5: γR² of every head, which decides how long the worst inputs go on growing like √n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from howsmooth.paper import drawing
from howsmooth.paper.figure import Bench, Figure, Finding
from howsmooth.paper.setting import MODELS, Setting, bilinear, usual_length
from howsmooth.paper.units import Row
from howsmooth.study.figures.style import literal, set_axis
from howsmooth.study.names import decimal, readable
from howsmooth.study.ranges import Ranges
from howsmooth.study.strengths import strengths
from howsmooth.study.subjects import Subject
from howsmooth.study.ticks import number

__all__ = ["GAMMA_RADIUS", "gamma_words", "measure", "over_texts", "show"]

_SAMPLES = 8
# The length at which the growth of the worst inputs is asked about; and γR² at which the heavy one of as many
# tokens has half of the weight: 1/(1 + (n−1) e^(−2γR²)) = 1/2.
_LONG = 100
_HALF = math.log(_LONG - 1) / 2
_MOST_ACROSS = 3
_NAMES = {
    "model": "model", "layer": "layer", "head": "head", "gamma_min": "γ_min", "gamma_max": "γ_max",
    "gamma": "γ", "radius": "R", "strength": "γR²", "strength_from": "with the smallest R",
    "strength_to": "with the largest R",
}  # fmt: skip


def measure(bench: Bench) -> pd.DataFrame:
    """Measure every model; return a row a model, text, length, layer and head."""
    request = bench.request
    specs = request.models or MODELS
    rows: list[Row] = []
    for spec, part in bench.each(specs):
        part.say(spec.label)
        here = Setting(
            bench,
            spec,
            lengths=request.lengths or (usual_length(bench, spec),),
            samples=request.samples or _SAMPLES,
            layers=request.layers or Ranges.parse("all", "layers"),
        )
        for subject in here.subjects:
            for n, tokens in here.sequences(subject):
                key = here.key(subject, layers=here.plan.layers.text, n=n, samples=here.plan.samples)
                rows += part.rows(key, partial(_rows, here, subject, tokens))
    return pd.DataFrame(rows)


def _rows(here: Setting, subject: Subject, tokens: torch.Tensor) -> list[Row]:
    """Take the radius of every layer at the sequences, and the eigenvalues of its heads."""
    rows: list[Row] = []
    for site in here.sites(subject, tokens):
        radius = site.radius_mean.numpy()
        of_layer = {
            "layer": site.layer,
            "radius": math.sqrt(float((radius**2).mean())),
            "radius_from": float(radius.min()),
            "radius_to": float(radius.max()),
        }
        for head, strength in enumerate(strengths(bilinear(site, subject.model.label))):
            rows.append({**of_layer, "head": head, **asdict(strength)})
    return rows


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


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw every head, three models a picture, and say in how many γR² is large."""
    table = over_texts(rows)
    families = [(str(model), part) for model, part in table.groupby("model", sort=False)]
    pictures = [
        _picture(part, folder, f"gamma-r2{end}") for end, part in drawing.sheets(families, _MOST_ACROSS)
    ]
    caption = "γR² of every head, R the root mean square norm of its tokens over all texts"
    shown = table[list(_NAMES)].rename(columns=_NAMES)
    return Finding(pictures, [gamma_words(*one) for one in families], [(caption, shown)])


def _negative(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(-rows["gamma_min"] > rows["gamma_max"] / 8)


# ---- the picture


def _picture(families: Sequence[tuple[str, pd.DataFrame]], folder: Path, stem: str) -> drawing.Picture:
    figure = drawing.canvas(drawing.WIDTH if len(families) > 1 else drawing.COLUMN, 2.3)
    axes = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    everything = pd.concat([part for _, part in families])
    for axis, (model, part) in zip(axes, families, strict=True):
        _panel(axis, part)
        axis.set_title(literal(readable(model, 34)))
        axis.set_xlabel("layer")
    values = pd.concat([everything[name] for name in ("strength", "strength_from", "strength_to")]).dropna()
    if (values > 0).all() and len(values) and values.max() > 20 * values.min():
        for axis in axes:
            set_axis(axis, "y", pd.concat([values, pd.Series([_HALF])]))
    else:
        axes[0].set_ylim(min(0.0, 1.05 * float(values.min())), 1.08 * max(float(values.max()), _HALF))
        axes[0].yaxis.set_major_formatter(FuncFormatter(number))
    axes[0].set_ylabel(r"$\gamma R^2$")
    drawing.legend(figure)
    names = "; ".join(readable(model) for model, _ in families)
    spans = [
        f"{readable(model)}: from {part['strength'].min():.3g} to {part['strength'].max():.3g}"
        for model, part in families
        if part["strength"].notna().any()
    ]
    alt = f"Dots, one a head, gamma R squared against the layer. {'; '.join(spans)}."
    caption = (
        "γR² of every head, with γ = max(−γ_min, γ_max/8) and R the root mean square norm of the tokens "
        "that text gives the layer; bars from the smallest to the largest of a sequence. Above the dashed "
        f"line, log({_LONG - 1})/2, the heavy one of the paper's two clusters has at least half of the "
        f"weight at n = {_LONG}."
    )
    return drawing.picture(figure, folder, stem, f"Appendix C.5: {names}", alt, caption)


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    there = rows[rows["strength"].notna()]
    most = max(int(rows["head"].max()), 1)
    across = there["layer"] + 0.56 * (there["head"] / most - 0.5)
    axis.vlines(
        across, there["strength_from"], there["strength_to"], color=drawing.GREY, linewidth=0.5, zorder=2
    )
    negative, strength = _negative(there), there["strength"]
    drawing.dots(
        axis, across, strength.where(negative), (drawing.VIOLET, "o"), r"$\gamma = -\gamma_{\min}$", size=7
    )
    drawing.dots(
        axis, across, strength.where(~negative), (drawing.TEAL, "^"), r"$\gamma = \gamma_{\max}/8$", size=7
    )
    axis.axhline(
        _HALF, color=drawing.FIT_COLOUR, linestyle=drawing.DASHED, label=rf"$\log({_LONG - 1})/2$", zorder=1
    )
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, color="0.88", zorder=0)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axis.set_xlim(rows["layer"].min() - 0.6, rows["layer"].max() + 0.6)


# ---- the words


def gamma_words(model: str, rows: pd.DataFrame) -> str:
    """Say what is seen of a model in the rows that :func:`over_texts` gives."""
    name = readable(model)
    there = rows[rows["strength"].notna()]
    if there.empty:
        return f"{name}: no head has a real eigenvalue, so that γ has no meaning."
    strength = there["strength"].to_numpy(np.float64)
    enough, count = int((strength >= _HALF).sum()), len(there)
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
        f"{enough} of {count} heads γR² is at least {decimal(_HALF, 2)}: there the paper's two clusters, "
        f"at the norm of real tokens, still give the heavy token half of the weight at n = {_LONG}."
    )
    without = len(rows) - count
    return words + (f" Without any real eigenvalue: {without} more." if without else "")


GAMMA_RADIUS = Figure(
    name="gamma-r2",
    title="How strong the scores of each head are on real text: γR²",
    paper="Appendix C.5",
    about=(
        "γ = max(−γ_min, γ_max/8), with the smallest and the largest real eigenvalue of A = KᵀQ/√k, for "
        "every head of every layer; R is the root mean square norm of the tokens that real text gives the "
        "layer. The lower bound of Proposition 3.4, √(n−1)/(1 + (n−1)e^(−2γR²)), grows like √n only while n "
        "is well below e^(2γR²)."
    ),
    measure=measure,
    show=show,
)
