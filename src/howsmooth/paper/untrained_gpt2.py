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
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench, Values
from howsmooth.paper.growth_with_length import LengthGrowth, growths
from howsmooth.paper.model_with_texts import ModelWithTexts, models_of
from howsmooth.paper.plotting import Curve, Panel, correlation_label, fitted, power_label
from howsmooth.results.drawing import literal
from howsmooth.words import file_stem, readable

__all__ = ["measure", "show"]

_MOST_ACROSS = 4


def measure(bench: Bench) -> tuple[list[list[LengthGrowth]], list[str]]:
    """Measure the constants of the layers of each model, and the norms of the tokens that enter them.

    There is a list of growths for each layer, one a text, and the reasons why norms are missing.
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
    found = []
    for layer in layers:
        at = [norms[(norms[place] == [one.model, one.layer, one.text]).all(axis=1)] for one in layer]
        found.append([replace(one, entering=rows) for one, rows in zip(layer, at, strict=True)])
    return found, reasons


def _norms(model: ModelWithTexts) -> pd.DataFrame:
    """Return for each sequence the norms of the tokens that enter each layer, before its norm layer."""
    units = []
    for subject, n in model.places():
        starts = [subject.starts[n, sample] for sample in range(model.plan.samples)]
        key = {"layers": model.plan.layers.text, "starts": repr(starts)}
        units.append(model.unit(subject, n, _entering, key, scope="block"))
    return model.bench.kept(units)


def _entering(sites: list[Any]) -> list[Values]:
    return [
        {"layer": site.layer, "sample": sample, "radius": radius}
        for site in sites
        for sample, radius in enumerate(site.radius_mean.tolist())
    ]


def show(found: tuple[list[list[LengthGrowth]], list[str]], folder: Path) -> Finding:
    """Draw the constants of each layer against the length, and below them the norms of its tokens, with at
    most four layers in a picture. Describe both.
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


def _picture(layers: Sequence[list[LengthGrowth]], folder: Path) -> plotting.Picture:
    panels = list(zip(*map(_panels, layers), strict=True))
    canvas, _ = plotting.draw_panels(panels, 4.3, sharex=True, sharey=True)
    name = readable(layers[0][0].model)
    canvas.suptitle(literal(name))
    numbers = [each[0].layer for each in layers]
    stem = file_stem("gpt2", layers[0][0].model, *(f"layer-{layer:02d}" for layer in numbers))
    title = f"Appendix E.2: {name}, layers {', '.join(map(str, numbers))}"
    return plotting.write_picture(canvas, folder, stem, title, legend=5)


def _panels(layer: Sequence[LengthGrowth]) -> tuple[Panel, Panel]:
    """Return two panels of one layer against n: its constants and its token norms. Each text has a colour."""
    constants, norms, above, below = list[Curve](), list[Curve](), [f"layer {layer[0].layer}"], list[str]()
    for each, (colour, mark) in zip(layer, cycle(plotting.LOOKS), strict=False):
        rows, theirs, text = each.rows, each.published, literal(readable(each.text, 24))
        values = rows["lipschitz"].where(rows["lipschitz"] > 0)
        constants += [
            Curve(rows["n"], values, text, colour, mark, filled=rows["converged"]),
            Curve(theirs["n"], theirs["lipschitz"], "as published", colour, "+"),
            *fitted(each.fit, colour),
            *fitted(each.published_fit, colour, dashes=plotting.DOTTED),
        ]
        norms.append(Curve(rows["n"], rows["radius_mean"], "", colour, mark))
        if each.entering is not None:
            places = each.entering["n"], each.entering["radius"]
            norms.append(Curve(*places, "entering the layer", colour, mark, filled=False))
        above.append(f"{text}: {power_label(each.fit)}")
        below.append(f"{text}: {correlation_label(each.entering_correlation)}")
    return Panel(constants, "\n".join(above)), Panel(norms, "\n".join(below), y="norm of the tokens")
