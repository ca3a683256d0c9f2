"""Appendix E.2: measure the constants of the layers of an untrained GPT-2, and the norms of the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.paper import plotting
from howsmooth.paper.exponent_text import power_label
from howsmooth.paper.figure_definition import Figure, FigureContext, FigurePlan, Finding
from howsmooth.paper.figure_tasks import Key, SiteTask, Values
from howsmooth.paper.growth_with_length import Growth, growths
from howsmooth.paper.model_with_texts import PreparedModel, loaded
from howsmooth.paper.plotting import Curve, Panel, fitted
from howsmooth.results.drawing import literal
from howsmooth.study.plans import ModelSpec
from howsmooth.study.records import Failure, FigureRow
from howsmooth.study.study_preparation import layer_and_head_counts
from howsmooth.words import decimal, file_stem, readable

__all__ = ["GPT2_GROWTH", "plan", "show"]

_MODELS = (ModelSpec("gpt2", random_init=True),)
_LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SAMPLES = 4
_MOST_ACROSS = 4


def plan(context: FigureContext) -> FigurePlan:
    """Plan to measure the constants of the layers of each model, and the norms of the tokens that enter these
    layers.

    The result contains one pair for each model. Its first entry has, for each layer, a list of the
    measurements on each text. Its second entry is the reason why the norms are missing, or empty text if they
    were measured.
    """
    chosen: dict[str, Any] = {"lengths": context.options.lengths or _LENGTHS, "samples": _SAMPLES}
    models = [
        PreparedModel(context, spec, layers=_layers(context, spec), **chosen)
        for spec in context.options.models or _MODELS
    ]
    reads = []
    for model in models:
        yield from model.constants(published=context.options.as_published)
        reads.append((yield from context.units(list(_norm_tasks(model)), "norms of sequences")))
    return lambda: [_with_norms(model, read()) for model, read in zip(models, reads, strict=True)]


def _layers(context: FigureContext, spec: ModelSpec) -> str:
    """Return the indices of the first, the middle and the last layer of a model as text, such as "0,6,11"."""
    count, _ = layer_and_head_counts(loaded(context, spec), spec.label)
    return f"0,{count // 2},{count - 1}"


class _NormTask(SiteTask):
    """Computes the norms of the tokens that enter layers; the figure is drawn without them if it fails."""

    essential = False


def _norm_tasks(model: PreparedModel) -> Iterator[SiteTask]:
    for subject, n in model.places():
        starts = [subject.starts[n, sample] for sample in range(model.plan.samples)]
        key: Key = {"layers": model.plan.layers.text, "n": n, "starts": repr(starts)}
        yield model.task(subject, n, _entering, key, scope="block", kind=_NormTask)


def _entering(site: Any) -> list[Values]:
    """Return the norm of the tokens that enter a layer, before its norm layer, for each sequence."""
    return [
        {"layer": site.layer, "sample": sample, "radius": radius}
        for sample, radius in enumerate(site.radius_mean.tolist())
    ]


def _with_norms(model: PreparedModel, norms: pd.DataFrame) -> tuple[list[list[Growth]], str]:
    norms = norms.reindex(columns=["text", "layer", "n", "sample", "radius"])
    layers = [
        [
            replace(one, entering=norms[(norms["layer"] == one.layer) & (norms["text"] == one.text)])
            for one in layer
        ]
        for layer in growths(model)
    ]
    failures = model.context.store.rows(Failure, what=FigureRow.table, model=model.label)
    reason = "".join(
        f"{readable(model.label)}: the tokens that enter a layer are not shown. {failure.error}"
        for failure, _ in failures[:1]
    )
    return layers, reason


def show(models: list[tuple[list[list[Growth]], str]], folder: Path) -> Finding:
    """Draw the constants and the token norms against n, with at most four layers in a picture, and describe
    the results.
    """
    pictures, seen = [], list[str]()
    for layers, reason in models:
        pictures += [_picture(some, folder) for _, some in plotting.sheets(layers, _MOST_ACROSS)]
        seen += [
            *(one.result_sentences() for layer in layers for one in layer),
            *([reason] if reason else []),
        ]
    table = pd.DataFrame([one.columns() for layers, _ in models for layer in layers for one in layer])
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
    plan=plan,
    show=show,
)
