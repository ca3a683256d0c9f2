"""Compute all bounds of the paper and of this library at real tokens of each model, and compare the bounds
with the measured constants.
"""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes

from howsmooth.attention import SelfAttention
from howsmooth.bounds import norm_radius, table
from howsmooth.paper import plotting
from howsmooth.paper.exponent_text import exp
from howsmooth.paper.figure_definition import Figure, FigureContext, FigurePlan, Finding
from howsmooth.paper.figure_tasks import Key, Values
from howsmooth.paper.model_with_texts import other_scores, prepared_models
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.paper.published_code import c_3_as_coded
from howsmooth.results.drawing import literal
from howsmooth.words import readable

__all__ = [
    "ALL_BOUNDS",
    "AS_CODED",
    "KINDS",
    "WIDE",
    "bound_table",
    "bound_words",
    "display_name",
    "plan",
    "show",
]

_LENGTHS = (8, 32, 96)

WIDE = 512
"""From this token dimension on, bounds on all heads together are computed only at the shortest length of one
text, because their certificate takes minutes for each sequence."""

AS_CODED = "theorem_c_3_as_coded"
"""The name of the formula in the published code, which is not a bound."""

LOCAL = "‖D_X f‖"

_AS_CODED: Values = {
    "name": AS_CODED,
    "side": "upper",
    "quantity": LOCAL,
    "holds": False,
    "source": "the code published with the paper; no bound, because it omits Aᵀx and the query bias",
}

KINDS = {
    "local upper": "upper bounds at the tokens",
    "ball upper": "upper bounds over the ball",
    "ball lower": "lower bounds over the ball",
    "local lower": "lower bounds at the tokens",
}
"""The kinds of bounds with their titles, in the order of the picture."""

_OF_A_BOUND = ["name", "side", "quantity", "log_value", "holds", "source"]
_COLUMNS = [
    "model",
    "layer",
    "head",
    "scope",
    "masking",
    "text",
    "n",
    "radius",
    "measured lower",
    "measured upper",
    "name",
    "side",
    "quantity",
    "value",
    "log_value",
    "log_ratio",
    "holds",
    "source",
]
# Tolerance, in logarithms, before a bound counts as violated: rounding errors of a bound and an interval.
_ROUNDING = 1e-9
_NEEDS = re.compile(r"\(needs: (.*)\)$")
_SPOKEN = {
    "ball_upper_bound": "Theorem A",
    "causal_ball_upper_bound": "masked Theorem A",
    "masked_ball_upper_bound": "Theorem A for any mask",
    AS_CODED: "Theorem C.3 as coded (no bound)",
    "yudin_theorem_3": "Yudin et al. 2025",
}
_RATIOS = {"least": "min", "median": "median", "largest": "max"}
_MOST_DECADES = 6.0
_SCOPES = {"head": "one head", "attention": "all heads and the output projection"}


def plan(context: FigureContext) -> FigurePlan:
    """Plan to compute all bounds on each layer at sequences of real text, and to measure the local Lipschitz
    constants at these sequences. The table has one row for each bound, sequence and head.
    """
    tasks, lengths = [], context.options.lengths or _LENGTHS
    for model in prepared_models(context, lengths=lengths, samples=1, scopes=tuple(_SCOPES)):
        first = (model.subjects[0], min(lengths))
        wide = model.first_site.x.shape[-1] >= WIDE
        for layer, (subject, n), scope in product(model.layers, model.places(), _SCOPES):
            if scope == "head" or not wide or (subject, n) == first:
                measure = partial(_rows, scope, context.options.seed)
                key: Key = {"layer": layer, "n": n, "scope": scope}
                tasks.append(model.task(subject, n, measure, key, scope=scope, layers=[layer]))
    read = yield from context.units(tasks, "layers' bounds")
    return lambda: _over_measured(read(), context.options.as_published)


def _over_measured(rows: pd.DataFrame, as_published: bool) -> pd.DataFrame:
    """Add two columns to a table of bounds: ``kind``, a key of :data:`KINDS`, and ``log_ratio``, the
    logarithm of bound / measured constant. Remove the rows of the published code's formula, unless
    ``as_published`` is true.
    """
    rows = rows if as_published else rows[rows["name"] != AS_CODED]
    where = np.where(rows["quantity"] == LOCAL, "local ", "ball ")
    measured = (_logs(rows["lower"]) + _logs(rows["upper"])) / 2
    return rows.assign(
        kind=where + rows["side"],
        log_ratio=rows["log_value"].astype(float) - measured.where(measured > -math.inf),
    )


def _rows(scope: str, seed: int, site: Any) -> list[Values]:
    """Compute all bounds on one head or layer at the tokens of a sequence, and measure the constant there."""
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
    bounds = found.loc[found["name"] != "measured", _OF_A_BOUND]
    rows = [beside | {str(key): value for key, value in one.items()} for one in bounds.to_dict("records")]
    # The formula contains the matrix A of the scores ⟨A x_i + b, x_j⟩, which other scores do not have.
    if scope == "head" and isinstance(site.map, SelfAttention) and not other_scores(site.map):
        coded = c_3_as_coded(site.map, x)
        log = math.log(coded) if coded > 0 else -math.inf
        rows.append(beside | _AS_CODED | {"log_value": log})
    return rows


def _logs(values: pd.Series) -> pd.Series:
    """Return the logarithms of a column of numbers, −inf for zero, without a warning."""
    numbers = values.to_numpy(dtype=float)
    return pd.Series(np.log(numbers, where=numbers > 0, out=np.full(len(numbers), -math.inf)), values.index)


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the ratio of each bound to the measured constant, for single heads and for whole attention layers,
    and say which bounds are tightest.
    """
    pictures = [
        _picture(part, folder, str(scope))
        for scope, part in rows.groupby("scope", sort=False)
        if part["holds"].any()
    ]
    named = {"lower": "measured lower", "upper": "measured upper"}
    every = rows.assign(value=exp(rows["log_value"])).astype({"head": "Int64"}).rename(columns=named)
    tables = [
        ("Bounds over the measured constant", bound_table(rows)),
        ("Every bound at every sequence", every[_COLUMNS]),
    ]
    return Finding(pictures, bound_words(rows), tables)


def display_name(name: str) -> str:
    """Return a readable name of a bound, such as "Theorem C.3, sharp", given the name of its
    Python function.
    """
    found = re.search(r"(theorem|lemma|proposition)_([^_]+)_([^_]+)_?(.*)", name)
    if name in _SPOKEN or not found:
        return _SPOKEN.get(name, name.replace("_", " "))
    kind, chapter, place, rest = found.groups()
    return f"{kind.capitalize()} {chapter.upper()}.{place}" + (f", {rest.replace('_', ' ')}" if rest else "")


def _picture(rows: pd.DataFrame, folder: Path, scope: str) -> plotting.Picture:
    """Draw a row of dots for each bound, its ratios to the measured constants, by kind and median ratio."""
    drawn = rows[(rows["holds"] | (rows["name"] == AS_CODED)) & np.isfinite(rows["log_ratio"])]
    drawn = drawn.assign(decades=drawn["log_ratio"] / math.log(10))
    middle = drawn.groupby(["kind", "name"])["decades"].median().sort_values(kind="stable")
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
        medians = part.groupby(["kind", "name"])["decades"].median()
        for decades, label, size, alpha in (
            (part.set_index(["kind", "name"])["decades"], "", 4, 0.3),
            (medians, literal(f"{readable(str(model), 40)}, layer {layer}"), 14, None),
        ):
            places = [lines[key] + shift for key in decades.index]
            shown = decades.clip(upper=_MOST_DECADES)
            curves.append(Curve(shown, places, label, colour, mark, size=size, alpha=alpha))
    low = min(0.0, float(drawn["decades"].min()))
    high = min(_MOST_DECADES, math.ceil(float(drawn["decades"].max())))
    title = f"All bounds over the measured constant: {_SCOPES.get(scope, scope)}"
    beyond = f" (dots at $10^{_MOST_DECADES:.0f}$ lie beyond)"
    label = "bound / measured constant" + (beyond if drawn["decades"].max() > _MOST_DECADES else "")
    panel = Panel(
        curves,
        title,
        label,
        "",
        ("decades", "linear"),
        (low - 0.1, high + 0.1, len(names) - 0.4, -0.6),
    )
    canvas, axes = plotting.draw([[panel]], 1.1 + 0.165 * len(names), wide=True)
    _name_lines(axes[0, 0], names)
    return plotting.picture(canvas, folder, f"bounds-{scope}", title, legend=3)


def _name_lines(axis: Axes, names: list[str]) -> None:
    """Label each row with its bound, the kinds in bold, and draw a line at the ratio one."""
    axis.axvline(0.0, color="black", linewidth=0.8, zorder=1)
    axis.set_yticks(range(len(names)), names)
    for label, words in zip(axis.get_yticklabels(), names, strict=True):
        label.set_horizontalalignment("left")
        label.set_fontweight("normal" if words.startswith(" ") else "bold")
    axis.tick_params(axis="y", length=0, pad=4.1 * max(map(len, names)))
    axis.spines["left"].set_visible(False)


def bound_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the ratios of the bounds to the measured constants, and in how many cases the hypotheses of
    each bound hold.

    There is one row for each layer, scope and bound, ordered by layer, then by kind, then by median ratio.
    """
    layer = ["model", "layer", "scope"]
    ratios = rows.assign(ratio=rows["log_ratio"].where(rows["holds"]))
    table = (
        ratios.groupby([*layer, "name", "side"], sort=False)
        .agg(
            of=("kind", "first"),
            cases=("name", "size"),
            **{"holds in": ("holds", "sum")},
            **{f"{end} ratio": ("ratio", way) for end, way in _RATIOS.items()},
        )
        .reset_index()
    )
    table = table.assign(
        place=table.groupby(layer, sort=False).ngroup(),
        of=pd.Categorical(table["of"], list(KINDS), ordered=True).rename_categories(KINDS),
        bound=table["name"].map(display_name),
        **{f"{end} ratio": exp(table[f"{end} ratio"]) for end in _RATIOS},
    )
    table = table.sort_values(["place", "of", "median ratio"], kind="stable", ignore_index=True)
    names = [*layer, "bound", "of", "cases", "holds in", *(f"{end} ratio" for end in _RATIOS)]
    return table.astype({"of": str})[names]


def bound_words(rows: pd.DataFrame) -> list[str]:
    """Return sentences that say whether a bound is violated, and which bounds are the tightest in
    each layer.
    """
    uppers = rows[rows["holds"] & (rows["side"] == "upper")]
    lowers = rows[rows["holds"] & (rows["kind"] == "local lower")]
    violated = int((uppers["log_value"] < _logs(uppers["lower"]) - _ROUNDING).sum())
    violated += int((lowers["log_value"] > _logs(lowers["upper"]) + _ROUNDING).sum())
    seen = [
        f"{len(uppers) + len(lowers)} bounds whose hypotheses hold were compared with measurements: "
        f"{violated or 'none'} of them {'were' if violated > 1 else 'was'} violated."
    ]
    seen += [
        _family_words(str(model), str(layer), str(scope), part)
        for (model, layer, scope), part in rows.groupby(["model", "layer", "scope"], sort=False)
    ]
    never = _inapplicable(rows[rows["name"] != AS_CODED])
    if never:
        seen.append(f"The hypotheses of these bounds are met in no case: {'; '.join(never)}.")
    coded = rows[rows["name"] == AS_CODED]
    if len(coded):
        below = int((coded["log_value"] < _logs(coded["lower"])).sum())
        seen.append(
            f"The formula of the published code for Theorem C.3 is not a bound. Here it lies below the "
            f"measured constant in {below} of {len(coded)} cases, and its median ratio to the constant is "
            f"{_factor_text(float(coded['log_ratio'].median()))}."
        )
    return seen


def _inapplicable(rows: pd.DataFrame) -> list[str]:
    """Return the names of the bounds whose hypotheses hold in no case, each with the hypotheses that fail."""
    found = []
    for (name, side), part in rows.groupby(["name", "side"], sort=True):
        if not part["holds"].any():
            needs = {match[1] for words in part["source"] if (match := _NEEDS.search(str(words)))}
            upper = " as an upper bound" if side == "upper" else " as a lower bound"
            both = rows.loc[rows["name"] == name, "side"].nunique() > 1
            found.append(
                f"{display_name(str(name))}{upper if both else ''} (needs {' or '.join(sorted(needs))})"
            )
    return found


def _family_words(model: str, layer: str, scope: str, rows: pd.DataFrame) -> str:
    what = "each head" if scope == "head" else "all heads together"
    cases = len(rows[["text", "n", "head"]].drop_duplicates())
    words = [f"{readable(model)}, layer {layer}, {what} ({cases} cases)"]
    for kind, article in (
        ("local upper", "the tightest upper bound at the tokens"),
        ("ball upper", "the tightest over the ball"),
        ("ball lower", "the largest lower bound over the ball"),
    ):
        here = rows[rows["holds"] & (rows["kind"] == kind) & np.isfinite(rows["log_ratio"])]
        if here.empty:
            continue
        medians = here.groupby("name")["log_ratio"].median()
        name = str(medians.idxmax() if kind == "ball lower" else medians.idxmin())
        logs = here.loc[here["name"] == name, "log_ratio"]
        words.append(
            f"{article} is {display_name(name)}, in the median "
            f"{_factor_text(float(logs.median()))} times the measured constant "
            f"({_factor_text(float(logs.min()))} to {_factor_text(float(logs.max()))})"
        )
    return f"{words[0]}: {'; '.join(words[1:]) or 'no bound holds'}."


def _factor_text(log: float) -> str:
    return f"{math.exp(log):.3g}" if abs(log) < 600 else f"e to the power {log:.3g}"


ALL_BOUNDS = Figure(
    name="bounds",
    title="All bounds against measurements, at real tokens",
    paper="Theorems 3.3 to C.3",
    about=(
        "For the layers of Figure 1, at one sequence of each text and length: every bound of the paper and "
        "of this library that applies to the layer, divided by the constant measured there, for each head "
        "alone and for all heads with the output projection. Bounds at the tokens hold for this sequence. "
        "Bounds over the ball hold for all sequences whose tokens have at most the largest norm that the "
        "norm layer before the attention can produce. Upper bounds must lie above the measured constant. "
        "Lower bounds over the ball concern the worst tokens in it, and may lie above or below the measured "
        "constant. A dot is a head at a sequence, a larger mark is the median, and dots at the right end lie "
        f"beyond it. For models with tokens of dimension {WIDE} or more, all heads together are bounded only "
        "at the shortest length of the first text, because this takes minutes."
    ),
    plan=plan,
    show=show,
)
