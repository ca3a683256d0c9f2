"""Appendix E.2: an untrained GPT-2 of full size, its constant and the norm of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.errors import CaptureError
from howsmooth.paper import drawing
from howsmooth.paper.figure import Bench, Figure, Finding
from howsmooth.paper.growth import Growth, growths, is_steady
from howsmooth.paper.setting import Setting, loaded
from howsmooth.paper.words import power, power_label
from howsmooth.study.exponents import LEVEL
from howsmooth.study.figures.style import literal, set_axis
from howsmooth.study.names import decimal, encodable, file_stem, readable
from howsmooth.study.plan import ModelSpec
from howsmooth.study.radius import Correlation, radius_correlation
from howsmooth.study.ranges import Ranges
from howsmooth.study.sequences import Sequences
from howsmooth.study.subjects import Subject, counted

__all__ = ["GPT2_GROWTH", "Entering", "measure", "show"]

_MODELS = (ModelSpec("gpt2", random_init=True),)
_LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SAMPLES = 4
_MOST_ACROSS = 4
# Of all time: the norms of the layers' inputs need no more than forward passes.
_MEASURED, _NORMS = 9.0, 1.0


@dataclass(frozen=True, eq=False)
class Entering(Growth):
    """A layer on a text, with the tokens that enter it.

    Attributes
    ----------
    entering
        Norms of the tokens that enter the layer, with columns ``n`` and ``radius``; empty if they could not
        be captured.

    """

    entering: pd.DataFrame

    @cached_property
    def attended_correlation(self) -> Correlation:
        """Correlation of log norm and log n, for the tokens that attention is given."""
        return radius_correlation(self.rows["n"].to_numpy(), self.rows["radius_mean"].to_numpy(), LEVEL)

    @cached_property
    def entering_correlation(self) -> Correlation:
        """Correlation of log norm and log n, for the tokens that enter the layer."""
        return radius_correlation(self.entering["n"].to_numpy(), self.entering["radius"].to_numpy(), LEVEL)


@dataclass(frozen=True, eq=False)
class _Of:
    """What was measured of one model, and why the tokens that enter its layers are not shown, if so."""

    model: str
    series: list[Entering]
    reason: str


def measure(bench: Bench) -> list[_Of]:
    """Measure each model as a study, and take the norms of what enters its layers at the same sequences."""
    specs = bench.request.models or _MODELS
    found = []
    for spec, part in bench.each(specs):
        studying, norming = part.parts((_MEASURED, _NORMS))
        here = Setting(
            bench,
            spec,
            lengths=bench.request.lengths or _LENGTHS,
            samples=bench.request.samples or _SAMPLES,
            layers=bench.request.layers or _layers(bench, spec),
        )
        studied = here.study(
            f"studies/{file_stem(spec.label)}", studying, published=bench.request.as_published
        )
        norms, reason = _norms(here, studied.held, norming)
        series = []
        for one in growths(here, studied):
            entering = norms[(norms["layer"] == one.layer) & (norms["text"] == one.text)]
            series.append(Entering(one.model, one.layer, one.text, one.rows, one.published, entering))
        found.append(_Of(spec.label, series, reason))
    return found


def _layers(bench: Bench, spec: ModelSpec) -> Ranges:
    """Choose the first, the middle and the last layer."""
    count, _ = counted(loaded(bench, spec), spec.label)
    return Ranges.parse(f"0,{count // 2},{count - 1}", "layers")


def _norms(here: Setting, held: dict[str, Sequences], bench: Bench) -> tuple[pd.DataFrame, str]:
    """Take the norms of the tokens that enter the layers; and the reason if they cannot be captured."""
    rows, reason = [], ""
    for subject in here.subjects:
        bench.say(f"{subject.model.label}, {subject.text.name}")
        places = held[subject.text.name]
        key = here.key(
            subject,
            layers=here.plan.layers.text,
            lengths=",".join(str(n) for n in here.plan.lengths),
            samples=here.plan.samples,
            sequences=repr(sorted(places.items())),
        )
        try:
            rows += bench.rows(key, partial(_entering, here, subject, places))
        except CaptureError as error:
            reason = encodable(str(error))
    return pd.DataFrame(rows, columns=["text", "layer", "n", "sample", "radius"]), reason


def _entering(here: Setting, subject: Subject, held: Sequences) -> list[dict[str, Any]]:
    """Take the norm of the tokens that enter each layer, before its norm layer, at the study's sequences."""
    return [
        {"layer": site.layer, "n": n, "sample": sample, "radius": radius}
        for n, tokens in here.sequences(subject, held)
        for site in here.sites(subject, tokens, "block")
        for sample, radius in enumerate(site.radius_mean.tolist())
    ]


def show(models: list[_Of], folder: Path) -> Finding:
    """Draw four layers a picture, and say what is seen in each layer on each text."""
    pictures: list[drawing.Picture] = []
    seen: list[str] = []
    for one in models:
        layers = list(dict.fromkeys(each.layer for each in one.series))
        for _, some in drawing.sheets(layers, _MOST_ACROSS):
            pictures.append(_picture([each for each in one.series if each.layer in some], folder))
        seen += [_words(each) for each in one.series]
        if one.reason:
            seen.append(f"{readable(one.model)}: the tokens that enter a layer are not shown. {one.reason}")
    table = pd.DataFrame([_row(each) for one in models for each in one.series])
    return Finding(pictures, seen, [("Exponents, and correlations of norm and length", table)])


def _row(each: Entering) -> dict[str, Any]:
    attended, entering = each.attended_correlation, each.entering_correlation
    return each.columns() | {
        "correlation, given to attention": attended.value,
        "its low": attended.low,
        "its high": attended.high,
        "correlation, entering the layer": entering.value,
        "from": entering.low,
        "to": entering.high,
    }


# ---- the pictures


def _picture(series: Sequence[Entering], folder: Path) -> drawing.Picture:
    layers = list(dict.fromkeys(each.layer for each in series))
    texts = list(dict.fromkeys(each.text for each in series))
    figure = drawing.canvas(drawing.WIDTH if len(layers) > 1 else 0.5 * drawing.WIDTH, 4.3)
    axes = figure.subplots(2, len(layers), squeeze=False, sharex="col", sharey="row")
    for (above, below), layer in zip(axes.T, layers, strict=True):
        here = [each for each in series if each.layer == layer]
        for each in here:
            look = drawing.LOOKS[texts.index(each.text) % len(drawing.LOOKS)]
            rows, theirs, entering = each.rows, each.published, each.entering
            good, values = rows["converged"], rows["lipschitz"]
            drawing.dots(above, rows["n"], values.where(values > 0), look, _short(each.text), filled=good)
            drawing.dots(above, theirs["n"], theirs["lipschitz"], (look[0], "+"), "as published")
            drawing.power_line(above, each.fit, look[0])
            drawing.power_line(above, each.published_fit, look[0], dashes=drawing.DOTTED)
            drawing.dots(below, rows["n"], rows["radius_mean"], look)
            drawing.dots(below, entering["n"], entering["radius"], look, "entering the layer", filled=False)
        fits = [f"{_short(each.text)}: {power_label(each.fit)}" for each in here if not each.fit.note]
        above.set_title("\n".join([f"layer {layer}", *fits]))
        below.set_title("\n".join(_correlated(each) for each in here))
        below.set_xlabel("sequence length $n$")
        set_axis(below, "x", pd.concat([each.rows["n"] for each in here]), whole=True)
    constants = [table["lipschitz"] for each in series for table in (each.rows, each.published)]
    norms = [norm for each in series for norm in (each.rows["radius_mean"], each.entering["radius"])]
    set_axis(axes[0, 0], "y", pd.concat(constants))
    set_axis(axes[1, 0], "y", pd.concat(norms))
    axes[0, 0].set_ylabel("local Lipschitz constant")
    axes[1, 0].set_ylabel("norm of the tokens")
    drawing.legend(figure, 5)
    name = readable(series[0].model)
    figure.suptitle(literal(name))
    stem = file_stem("gpt2", series[0].model, *(f"layer-{layer:02d}" for layer in layers))
    alt = (
        f"{name}: constants above and norms of the tokens below, against the length on log axes. "
        + " ".join(f"Layer {each.layer}, {readable(each.text)}: {power(each.fit)}." for each in series)
    )
    caption = (
        f"{name}. Above, the local Lipschitz constant of attention, with the fitted exponent and its 95 % "
        "interval. Below, the root mean square norm of a sequence's tokens, filled for those that attention "
        "is given and hollow for those that enter the layer, and the correlation of the latter's logarithm "
        "with that of n."
        + (" Dotted and with crosses, as published." if any(len(each.published) for each in series) else "")
    )
    return drawing.picture(figure, folder, stem, f"Appendix E.2: {name}", alt, caption)


def _short(text: str) -> str:
    return literal(readable(text, 24))


def _correlated(each: Entering) -> str:
    found = each.entering_correlation
    if math.isnan(found.value):
        return f"{_short(each.text)}: no correlation"
    low, high = decimal(found.low, 2), decimal(found.high, 2)
    return f"{_short(each.text)}: $r = {decimal(found.value, 2)}$ [{low}, {high}]"


# ---- the words


def _words(each: Entering) -> str:
    where = f"{each.name}, on {readable(each.text)}: "
    words = f"{where}the constant grows like {power(each.fit)}"
    if each.fit.note:
        words = f"{where}there is no exponent, {each.fit.note}"
    words += f", from {each.fit.n_points} sequences of {each.fit.n_min} to {each.fit.n_max} tokens."
    attended = _norm_words(each.rows["radius_mean"].to_numpy(np.float64), each.attended_correlation)
    words += f" The norm of the tokens that attention is given {attended}."
    if len(each.entering):
        entering = _norm_words(each.entering["radius"].to_numpy(np.float64), each.entering_correlation)
        words += f" That of the tokens that enter the layer {entering}."
    if each.fit.left_out:
        words += f" {each.fit.left_out} measurements are left out, as they did not converge or are zero."
    return words + each.published_words()


def _norm_words(radius: np.ndarray, found: Correlation) -> str:
    if not len(radius):
        return "was not measured"
    if is_steady(radius):
        return f"is {radius.mean():.4g} for all, to within 0.1 %, so that it cannot make the constant grow"
    words = f"goes from {radius.min():.3g} to {radius.max():.3g}"
    if math.isnan(found.value):
        return words
    return (
        f"{words}, and the correlation of its logarithm with that of n is {decimal(found.value, 2)} "
        f"({LEVEL * 100:.0f} % interval {decimal(found.low, 2)} to {decimal(found.high, 2)})"
    )


GPT2_GROWTH = Figure(
    name="gpt2",
    title="The constant and the norm of the tokens, against the length",
    paper="Appendix E.2",
    about=(
        "By default of a GPT-2 of full size with untrained weights. Above, the local Lipschitz constant of "
        "attention, all heads and the output projection, without residual and norm, against the length. "
        "Below, the root mean square norm of the tokens: of those that attention is given, behind the norm "
        "layer, and of those that enter the layer, before it. Where norm and length go together, an exponent "
        "in the length holds a part that belongs to the norm. As published, dropout stays on in an untrained "
        "model, and the output is taken for the tangent."
    ),
    measure=measure,
    show=show,
)
