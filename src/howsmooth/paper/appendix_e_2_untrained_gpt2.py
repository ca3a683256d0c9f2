"""Appendix E.2: measure the constants of the layers of an untrained GPT-2, and the norms of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import HowsmoothError
from howsmooth.paper import plotting
from howsmooth.paper.bench import Bench, Values
from howsmooth.paper.exponent_text import power_label
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.growth_with_length import Growth, correlation_label, growths
from howsmooth.paper.model_with_texts import ModelWithTexts, models_of
from howsmooth.paper.plotting import Curve, Panel, fitted
from howsmooth.results.drawing import literal
from howsmooth.words import file_stem, readable

__all__ = ["measure", "show"]

_MOST_ACROSS = 4


def measure(bench: Bench) -> tuple[list[list[Growth]], list[str]]:
    """Measure the constants of the layers of each model, and the norms of the tokens that enter these layers.

    The first result contains for each layer a list of the measurements on each text. The second contains the
    reasons why norms are missing.
    """
    models = models_of(bench, layers=lambda count: f"0,{count // 2},{count - 1}")
    layers, reasons = growths(models), []
    norms = pd.DataFrame(columns=["model", "text", "layer", "n", "radius"])
    for model in models:
        try:
            norms = pd.concat([norms, _norms(model)])
        except HowsmoothError as error:
            words = " ".join(str(error).split())
            reasons.append(f"{readable(model.label)}: the tokens that enter a layer are not shown. {words}")
    place = ["model", "layer", "text"]

    def entering(one: Growth) -> pd.DataFrame:
        return norms[(norms[place] == [one.model, one.layer, one.text]).all(axis=1)]

    return [[replace(one, entering=entering(one)) for one in layer] for layer in layers], reasons


def _norms(model: ModelWithTexts) -> pd.DataFrame:
    """Return the norms of the tokens that enter the layers, before their norm layers, for each sequence."""
    units = []
    for subject, n in model.places():
        starts = [subject.starts[n, sample] for sample in range(model.plan.samples)]
        key = {"layers": model.plan.layers.text, "starts": repr(starts)}
        units.append(model.unit(subject, n, _entering, key, scope="block"))
    return model.bench.kept("norms of sequences", units)


def _entering(sites: list[Any]) -> list[Values]:
    return [
        {"layer": site.layer, "sample": sample, "radius": radius}
        for site in sites
        for sample, radius in enumerate(site.radius_mean.tolist())
    ]


def show(found: tuple[list[list[Growth]], list[str]], folder: Path) -> Finding:
    """Draw the constants and the token norms against n, with at most four layers in a picture, and describe
    the results.
    """
    layers, reasons = found
    pictures = []
    for model in dict.fromkeys(layer[0].model for layer in layers):
        own = [layer for layer in layers if layer[0].model == model]
        pictures += [_picture(some, folder) for _, some in plotting.sheets(own, _MOST_ACROSS)]
    every = [one for layer in layers for one in layer]
    table = pd.DataFrame([one.columns() for one in every])
    seen = [one.result_sentences() for one in every]
    return Finding(pictures, seen + reasons, [("Exponents, and correlations of norm and length", table)])


def _picture(layers: Sequence[list[Growth]], folder: Path) -> plotting.Picture:
    panels = list(map(_constants, layers)), list(map(_radii, layers))
    canvas, _ = plotting.draw(panels, 4.3, sharex=True, sharey=True)
    name = readable(layers[0][0].model)
    canvas.suptitle(literal(name))
    numbers = [each[0].layer for each in layers]
    stem = file_stem("gpt2", layers[0][0].model, *(f"layer-{layer:02d}" for layer in numbers))
    title = f"Appendix E.2: {name}, layers {', '.join(map(str, numbers))}"
    return plotting.picture(canvas, folder, stem, title, legend=5)


def _constants(series: Sequence[Growth]) -> Panel:
    """Return a panel with the constants of one layer against n; each text has a colour."""
    curves, titles = [], [f"layer {series[0].layer}"]
    for each, (colour, mark) in zip(series, cycle(plotting.LOOKS), strict=False):
        rows, theirs, text = each.rows, each.published, _short(each.text)
        values = rows["lipschitz"].where(rows["lipschitz"] > 0)
        curves += [
            Curve(rows["n"], values, text, colour, mark, filled=rows["converged"]),
            Curve(theirs["n"], theirs["lipschitz"], "as published", colour, "+"),
            *fitted(each.fit, colour),
            *fitted(each.published_fit, colour, dashes=plotting.DOTTED),
        ]
        titles.append(f"{text}: {power_label(each.fit)}")
    return Panel(curves, "\n".join(titles))


def _radii(series: Sequence[Growth]) -> Panel:
    """Return a panel with the norms of the tokens of one layer against n; each text has a colour."""
    curves, titles = [], []
    for each, (colour, mark) in zip(series, cycle(plotting.LOOKS), strict=False):
        curves.append(Curve(each.rows["n"], each.rows["radius_mean"], "", colour, mark))
        if each.entering is not None:
            places = each.entering["n"], each.entering["radius"]
            curves.append(Curve(*places, "entering the layer", colour, mark, filled=False))
        titles.append(f"{_short(each.text)}: {correlation_label(each.entering_correlation)}")
    return Panel(curves, "\n".join(titles), y="norm of the tokens")


def _short(text: str) -> str:
    return literal(readable(text, 24))
