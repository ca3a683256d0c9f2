"""Appendix E.2: measure the constants of an untrained GPT-2 of full size, and the norms of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, groupby
from operator import attrgetter
from pathlib import Path

import pandas as pd

from howsmooth.errors import CaptureError
from howsmooth.paper import plotting
from howsmooth.paper.exponent_text import power_label
from howsmooth.paper.figure import Figure, FigureContext, Finding
from howsmooth.paper.growth import Growth, growths
from howsmooth.paper.plotting import Curve, Panel, fitted
from howsmooth.paper.prepared_model import PreparedModel, loaded
from howsmooth.paper.row_cache import Row
from howsmooth.study.figures.style import literal
from howsmooth.study.measured_models import Subject, layer_and_head_counts
from howsmooth.study.plans import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.study.text_formatting import decimal, encodable, file_stem, readable
from howsmooth.study.text_windows import Sequences

__all__ = ["GPT2_GROWTH", "measure", "show"]

_MODELS = (ModelSpec("gpt2", random_init=True),)
_LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SAMPLES = 4
_MOST_ACROSS = 4
# Shares of the time: the norms of the layers' inputs need only forward passes.
_MEASURED, _NORMS = 9.0, 1.0


def measure(context: FigureContext) -> list[tuple[list[Growth], str]]:
    """Measure the constants of each model's layers, and the norms of the tokens that enter these layers.

    For each model there are its layers on its texts, and the reason if norms of entering tokens are missing.
    """
    found = []
    for spec, part in context.each(context.options.models or _MODELS):
        studying, norming = part.parts((_MEASURED, _NORMS))
        here = PreparedModel(
            context,
            spec,
            lengths=context.options.lengths or _LENGTHS,
            samples=context.options.samples or _SAMPLES,
            layers=context.options.layers or _layers(context, spec),
        )
        folder = f"studies/{file_stem(spec.label)}"
        studied = here.study(folder, studying, published=context.options.as_published)
        norms, reason = _norms(here, studied.held, norming)
        of_model = [
            replace(one, entering=norms[(norms["layer"] == one.layer) & (norms["text"] == one.text)])
            for one in growths(here, studied)
        ]
        found.append((of_model, reason))
    return found


def _layers(context: FigureContext, spec: ModelSpec) -> Ranges:
    """Return the first, the middle and the last layer of a model."""
    count, _ = layer_and_head_counts(loaded(context, spec), spec.label)
    return Ranges.parse(f"0,{count // 2},{count - 1}", "layers")


def _norms(
    here: PreparedModel, held: dict[str, Sequences], context: FigureContext
) -> tuple[pd.DataFrame, str]:
    """Return a table of the norms of the tokens that enter each layer, or why they cannot be captured."""
    rows, reason = [], ""
    for subject in here.subjects:
        context.say(f"{subject.model.label}, {subject.text.name}")
        places = held[subject.text.name]
        key = here.key(
            subject,
            layers=here.plan.layers.text,
            lengths=",".join(str(n) for n in here.plan.lengths),
            samples=here.plan.samples,
            sequences=repr(sorted(places.items())),
        )
        try:
            rows += context.rows(key, partial(_entering, here, subject, places))
        except CaptureError as error:
            reason = f"{readable(here.label)}: the tokens that enter a layer are not shown. {error}"
    return pd.DataFrame(rows, columns=["text", "layer", "n", "sample", "radius"]), encodable(reason)


def _entering(here: PreparedModel, subject: Subject, held: Sequences) -> list[Row]:
    """Return the norms of the tokens that enter each layer, before its norm layer."""
    return [
        {"layer": site.layer, "n": n, "sample": sample, "radius": radius}
        for n, tokens in here.sequences(subject, held)
        for site in here.sites(subject, tokens, "block")
        for sample, radius in enumerate(site.radius_mean.tolist())
    ]


def show(models: list[tuple[list[Growth], str]], folder: Path) -> Finding:
    """Draw constants and token norms against n, four layers in a picture, and describe the results."""
    pictures, seen = [], list[str]()
    for series, reason in models:
        layers = [list(own) for _, own in groupby(series, key=attrgetter("layer"))]
        pictures += [_picture(some, folder) for _, some in plotting.sheets(layers, _MOST_ACROSS)]
        seen += [*(each.result_sentences() for each in series), *([reason] if reason else [])]
    table = pd.DataFrame([each.columns() for series, _ in models for each in series])
    return Finding(pictures, seen, [("Exponents, and correlations of norm and length", table)])


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
    """Return the panel of a layer's constants against n, with a colour for each text."""
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
    """Return the panel of the norms of a layer's tokens against n, with a colour for each text."""
    curves, titles = [], []
    for each, (colour, mark) in zip(series, cycle(plotting.LOOKS), strict=False):
        curves.append(Curve(each.rows["n"], each.rows["radius_mean"], "", colour, mark))
        if each.entering is not None:
            places = each.entering["n"], each.entering["radius"]
            curves.append(Curve(*places, "entering the layer", colour, mark, filled=False))
        found = each.entering_correlation
        value, low, high = (decimal(one, 2) for one in (found.value, found.low, found.high))
        words = "no correlation" if math.isnan(found.value) else f"$r = {value}$ [{low}, {high}]"
        titles.append(f"{_short(each.text)}: {words}")
    return Panel(curves, "\n".join(titles), y="norm of the tokens")


def _short(text: str) -> str:
    return literal(readable(text, 24))


GPT2_GROWTH = Figure(
    name="gpt2",
    title="The constant and the norm of the tokens, against the length",
    paper="Appendix E.2",
    about=(
        "By default, a GPT-2 of full size with untrained weights is measured. Above: the local Lipschitz "
        "constant of attention, with all heads and the output projection, without residual and norm, "
        "against the length, with the fitted exponent and its 95 % interval. Below: the root mean square "
        "norm of a sequence's tokens. Filled dots are the tokens that attention receives, after the norm "
        "layer; hollow dots are the tokens that enter the layer, before the norm layer, with the correlation "
        "of log norm and log n. Where the norm grows with the length, the exponent in the length includes an "
        "effect of the norm. As published, dropout stays on in an untrained model, and the output is used in "
        "place of the tangent."
    ),
    measure=measure,
    show=show,
)
