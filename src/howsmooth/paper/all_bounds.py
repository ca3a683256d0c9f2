"""Compare all bounds of the paper and of this library with the constants measured at real tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds import norm_radius, table
from howsmooth.paper import plotting
from howsmooth.paper.bound_ratios import AS_CODED, KINDS, bound_table, bound_words, display_name, logs_of
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench, Values
from howsmooth.paper.model_with_texts import models_of, other_scores
from howsmooth.paper.plotting import Curve, Panel, exponentials
from howsmooth.paper.published_code import c_3_as_coded
from howsmooth.results.drawing import literal
from howsmooth.words import readable

__all__ = ["WIDE", "measure", "show"]

WIDE = 512
"""From this token dimension on, bounds on all heads together are computed only at the shortest length of one
text, because their certificate takes minutes for each sequence."""

_LOCAL = "‖D_X f‖"
_OF_A_BOUND = ["name", "side", "quantity", "log_value", "holds", "source"]
_NOT_PUBLISHED = "the code published with the paper; no bound, because it omits Aᵀx and the query bias"
_COLUMNS = [
    "model", "layer", "head", "scope", "masking", "text", "n", "radius", "measured lower", "measured upper",
    "name", "side", "quantity", "value", "log_value", "log_ratio", "holds", "source",
]  # fmt: skip
_MOST_DECADES = 6.0
_SCOPES = {"head": "one head", "attention": "all heads and the output projection"}


def measure(bench: Bench) -> pd.DataFrame:
    """Tabulate all bounds and constants at sequences of text, with a row for each bound, sequence and head.

    ``kind`` is a key of :data:`~howsmooth.paper.bound_ratios.KINDS`, and ``log_ratio`` the logarithm of
    bound / measured constant. The published code's formula is left out unless ``as_published`` is set.
    """
    units = []
    for model in models_of(bench, scopes=tuple(_SCOPES)):
        first = (model.subjects[0], min(model.plan.lengths))
        wide = model.first_site().x.shape[-1] >= WIDE
        for layer, place, scope in product(model.layers, model.places(), _SCOPES):
            if scope == "head" or not wide or place == first:
                compute, key = partial(_rows, scope, bench.options.seed), {"layer": layer, "scope": scope}
                units.append(model.unit(*place, compute, key, scope=scope, layers=[layer]))
    rows = bench.kept(units)
    rows = rows if bench.options.as_published else rows[rows["name"] != AS_CODED]
    where = np.where(rows["quantity"] == _LOCAL, "local ", "ball ")
    measured = (logs_of(rows["lower"]) + logs_of(rows["upper"])) / 2
    ratio = rows["log_value"].astype(float) - measured.where(measured > -math.inf)
    return rows.assign(kind=where + rows["side"], log_ratio=ratio)


def _rows(scope: str, seed: int, sites: list[Any]) -> Iterator[Values]:
    for site in sites:
        x = site.x[0].detach().cpu()
        longest = float(torch.linalg.vector_norm(x.double(), dim=-1).max())
        norm = getattr(site, "norm", None)
        # The radius of the norm layer can be smaller than a token's norm by a rounding error.
        radius = longest if norm is None else max(norm_radius(norm), longest)
        found = table(site.map, x, radius=radius, seed=seed)
        found = found.reset_index().assign(log_value=found.attrs["log_values"])
        ends = found[found["name"] == "measured"].set_index("side")["value"]
        beside = {
            "head": site.head,
            "masking": site.masking,
            "radius": radius,
            "radius_from": "the longest of the tokens" if norm is None else f"the {type(norm).__name__}",
            "lower": float(ends["lower"]),
            "upper": float(ends["upper"]),
        }
        for one in found.loc[found["name"] != "measured", _OF_A_BOUND].itertuples(index=False, name=None):
            yield beside | dict(zip(_OF_A_BOUND, one, strict=True))
        # The formula has the matrix A of the scores ⟨A x_i + b, x_j⟩, which other scores do not have.
        if scope == "head" and isinstance(site.map, SelfAttention) and not other_scores(site.map):
            coded = c_3_as_coded(site.map, x)
            log = math.log(coded) if coded > 0 else -math.inf
            one = (AS_CODED, "upper", _LOCAL, log, False, _NOT_PUBLISHED)
            yield beside | dict(zip(_OF_A_BOUND, one, strict=True))


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw each bound divided by the measured constant, for single heads and for whole layers."""
    scopes = rows.groupby("scope", sort=False)
    pictures = [_picture(part, folder, str(scope)) for scope, part in scopes if part["holds"].any()]
    named = {"lower": "measured lower", "upper": "measured upper"}
    every = rows.assign(value=exponentials(rows["log_value"])).astype({"head": "Int64"}).rename(columns=named)
    ratios = ("Bounds over the measured constant", bound_table(rows))
    return Finding(pictures, bound_words(rows), [ratios, ("Every bound at every sequence", every[_COLUMNS])])


def _picture(rows: pd.DataFrame, folder: Path, scope: str) -> plotting.Picture:
    """Draw a row of dots for each bound, its ratios to measured constants; sort rows by kind and median."""
    drawn = rows[(rows["holds"] | (rows["name"] == AS_CODED)) & np.isfinite(rows["log_ratio"])]
    drawn = drawn.assign(decades=drawn["log_ratio"] / math.log(10)).set_index(["kind", "name"])
    middle = drawn.groupby(level=["kind", "name"])["decades"].median().sort_values(kind="stable")
    names, lines = list[str](), dict[Any, int]()
    for kind, title in KINDS.items():
        own = [key for key in middle.index if key[0] == kind]
        lines |= {key: len(names) + 1 + place for place, key in enumerate(own)}
        names += [title, *(f"    {display_name(name)}" for _, name in own)] if own else []
    curves = []
    families = drawn.groupby(["model", "layer"], sort=False)
    looks = zip(families, cycle(plotting.LOOKS), strict=False)
    for index, (((model, layer), part), (colour, mark)) in enumerate(looks):
        shift = 0.5 * ((index + 0.5) / len(families) - 0.5)
        medians = part.groupby(level=["kind", "name"])["decades"].median()
        label = literal(f"{readable(str(model), 40)}, layer {layer}")
        for decades, name, size, alpha in ((part["decades"], "", 4, 0.3), (medians, label, 14, None)):
            places = [lines[key] + shift for key in decades.index]
            shown = decades.clip(upper=_MOST_DECADES)
            curves.append(Curve(shown, places, name, colour, mark, size=size, alpha=alpha))
    least, most = float(drawn["decades"].min()), float(drawn["decades"].max())
    title = f"All bounds over the measured constant: {_SCOPES.get(scope, scope)}"
    beyond = f" (dots at $10^{_MOST_DECADES:.0f}$ lie beyond)" if most > _MOST_DECADES else ""
    limits = (min(0.0, least) - 0.1, min(_MOST_DECADES, math.ceil(most)) + 0.1, len(names) - 0.4, -0.6)
    panel = Panel(curves, title, f"bound / measured constant{beyond}", "", ("decades", "linear"), limits)
    canvas, axes = plotting.draw_panels([[panel]], 1.1 + 0.165 * len(names), wide=True)
    # Label each row with its bound, the kinds in bold, and draw a line at the ratio one.
    axis = axes[0, 0]
    axis.axvline(0.0, color="black", linewidth=0.8, zorder=1)
    axis.set_yticks(range(len(names)), names)
    for text, words in zip(axis.get_yticklabels(), names, strict=True):
        text.set_horizontalalignment("left")
        text.set_fontweight("normal" if words.startswith(" ") else "bold")
    axis.tick_params(axis="y", length=0, pad=4.1 * max(map(len, names)))
    axis.spines["left"].set_visible(False)
    return plotting.write_picture(canvas, folder, f"bounds-{scope}", title, legend=3)
