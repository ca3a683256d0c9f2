"""Section 5.2: compare the constants at the paper's worst inputs with the constants at inputs found by a
search, and with the constants on text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from howsmooth import lipschitz
from howsmooth.adversarial import ascend, two_cluster
from howsmooth.attention import SelfAttention
from howsmooth.bounds import best, theorem_3_3, theorem_4_3, theorem_e_3
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.worst_case_tokens import real_eigenpairs
from howsmooth.errors import ArgumentError
from howsmooth.paper import plotting
from howsmooth.paper.exponent_text import between, exp, power, power_label
from howsmooth.paper.figure_definition import Figure, FigureContext, FigurePlan, Finding
from howsmooth.paper.figure_tasks import Key, UnitTask, Values
from howsmooth.paper.model_with_texts import MODELS, PreparedModel, attention_of, loaded, other_scores
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.paper.published_code import has_fused_weight, power_iteration, wrong_slices
from howsmooth.results.drawing import literal
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.words import file_stem, readable

__all__ = ["RADII", "WORST_INPUTS", "plan", "show", "side_by_side"]

RADII = (15.5, 21.5, 100.0)
"""The paper's radii. For each layer, the norm of its longest real token is added."""

_LENGTHS = (12, 24, 64, 160, 392)
_SAMPLES = 4
_HEAD = 0
_RTOL = 1e-4
# A short search, which starts from all constructions: longer ones improve the best by less than 1 % here.
_STEPS, _RESTARTS, _ATOM_STEPS = 1, 8, 40
# For scores that the paper does not treat, constructions are poor and only the ascent itself searches.
_OTHER_STEPS, _OTHER_STARTS = 30, 2
_THEOREMS = {"theorem_3_3": "Theorem 3.3", "theorem_e_3": "Theorem E.3", "theorem_4_3": "Theorem 4.3"}
_NAMES = {
    "model": "model",
    "layer": "layer",
    "head": "head",
    "R": "R",
    "n": "n",
    "text median": "text, median",
    "paper": "paper's tokens",
    "paper median": "paper's tokens, median",
    "found": "largest found",
    "found by": "found by",
    "upper": "at most",
    "wrong slices": "published tokens",
}


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of one model, with the data that are needed to measure it on text and at the worst tokens in
    balls.

    ``attention`` is the attention of all heads with the output projection. If the scores differ from the
    paper's, for example by rotary positions, ``heads`` contains the attacked head for each length that the
    model can read; otherwise ``heads`` is empty. ``fused`` says whether the weights of queries, keys and
    values are one transposed matrix. ``longest`` is the largest norm of a token that was captured. The worst
    tokens are sequences whose numbers of tokens are ``lengths``.
    """

    model: PreparedModel
    layer: int
    attention: SelfAttention
    heads: dict[int, SelfAttention]
    fused: bool
    longest: float
    lengths: list[int]

    @property
    def text(self) -> pd.DataFrame:
        """The table of the measurements of all heads of the layer on text."""
        rows = self.model.measured()
        return rows[rows["layer"] == self.layer]

    @property
    def radius(self) -> float:
        """The largest norm of a token in the measurements on text, or before these, of a captured one."""
        radii = self.text["radius_max"]
        return float(radii.max()) if len(radii) else self.longest

    def tasks(self) -> list[UnitTask]:
        """Return the tasks that measure constants and bounds, for each ball and each number of tokens."""
        label = self.model.label
        steps, starts = (_OTHER_STEPS, _OTHER_STARTS) if self.heads else (_STEPS, 0)
        effort = {
            "steps": steps,
            "random_starts": starts,
            "atom_restarts": _RESTARTS,
            "atom_steps": _ATOM_STEPS,
        }
        search = ",".join(map(str, effort.values()))
        tasks = []
        for radius, n in product(dict.fromkeys((*RADII, self.radius)), self.lengths):
            kinds = [partial(_rows, self.attention, self.heads.get(n), effort)]
            if self.model.context.options.as_published and not self.heads:
                kinds.append(partial(_published_rows, self.attention, self.fused))
            for published, measure in enumerate(kinds):
                place: Key = {"layer": self.layer, "ball": repr(radius), "n": n}
                key = self.model.key(published=published, search=search, **place)
                seed = derive_seed(purpose="adversarial", **key)
                words = f"{label}, layer {self.layer}, R = {radius:.4g}, n = {n}"
                alike = (label, self.layer, published)
                tasks.append(UnitTask(key, partial(measure, radius, n, seed), words, alike, n))
        return tasks


def plan(context: FigureContext) -> FigurePlan:
    """Plan to measure the heads of each layer on text, and at the worst tokens in balls of several radii. The
    table has one row for each model, layer, radius (column ``R``) and length.

    The table has the columns of :func:`side_by_side`. ``real`` says whether the radius is the largest norm of
    a token of the texts, and ``fused`` whether the weights of queries, keys and values are one transposed
    matrix.
    """
    asked = context.options.lengths or _LENGTHS
    lengths = [n for n in asked if n >= 2]
    if not lengths:
        raise ArgumentError("lengths", expected="some of at least 2, for two clusters", got="1")
    models, layers = list[PreparedModel](), list[_Layer]()
    for spec in context.options.models or MODELS:
        longest = loaded(context, spec).max_length
        on_text = tuple(n for n in asked if longest is None or n <= longest)
        models.append(PreparedModel(context, spec, lengths=on_text, samples=_SAMPLES, scopes=("head",)))
        layers += _layers(models[-1], lengths)
    for model in models:
        yield from model.constants()
    # One ball is as large as the text's tokens, so the searches are planned after the constants on text.
    tasks = [task for layer in layers for task in layer.tasks()]
    read = yield from context.units(tasks, "searches for worst inputs")
    return lambda: _table(layers, read())


def _table(layers: Sequence[_Layer], rows: pd.DataFrame) -> pd.DataFrame:
    found = []
    for layer in layers:
        name, text, radius = layer.model.label, layer.text[layer.text["converged"]], layer.radius
        own = rows[(rows["model"] == name) & (rows["layer"] == layer.layer)]
        for (ball, n), part in own.groupby(["ball", "n"], sort=False):
            what = {"model": name, "layer": layer.layer, "head": _HEAD, "R": float(str(ball))}
            beside = {"real": float(str(ball)) == radius, "fused": layer.fused}
            found.append(what | beside | side_by_side(part, text[text["n"] == n], _HEAD))
    return pd.DataFrame(found)


def _layers(model: PreparedModel, lengths: list[int]) -> Iterator[_Layer]:
    """Capture the layers of a model at one sequence of each length of the first text, and yield them."""
    subject = model.subjects[0]
    captured = {n: model.sites(subject, n, samples=1) for n in model.plan.lengths}
    inner = getattr(model.context.models.load_for(subject), "model", None)
    for place, layer in enumerate(model.layers):
        sites = {n: found[place] for n, found in captured.items()}
        site = sites[max(sites)]  # a window is seen in long sequences only
        attention, heads, possible = attention_of(site, model.label), {}, lengths
        if other_scores(attention):
            heads = {n: attention_of(one, model.label).head(_HEAD) for n, one in sites.items()}
            possible = [n for n in lengths if n in heads]
        if not possible:
            most = f"lengths of at most {max(heads)}, which {model.label} can read"
            raise ArgumentError("lengths", expected=most, got=str(min(lengths)))
        fused = inner is not None and has_fused_weight(inner.get_submodule(site.name))
        longest = max(float(one.radius_max.max()) for one in sites.values())
        yield _Layer(model, layer, attention, heads, fused, longest, possible)


def _rows(
    f: SelfAttention, other: SelfAttention | None, effort: dict[str, Any], radius: float, n: int, seed: int
) -> Iterator[Values]:
    """Yield rows with the constants of the heads of a layer at the worst tokens in a ball, and with upper
    bounds on the constant in this ball.

    Every head is measured at the paper's two-cluster tokens. One head is also measured at the worst tokens
    that a search finds, and has two upper bounds: the best one of this library, and the paper's. If the paper
    does not treat the scores of the layer, ``other`` is the attacked head, and the rows contain only the
    search and the best bound of this library.
    """
    for h in _real(f) if other is None else ():
        x = two_cluster(f.head(h), n, radius).x
        yield {"kind": "paper", "name": "two_cluster", "head": h, **_measured(f.head(h), x, seed)}
    head = f.head(_HEAD) if other is None else other
    found = ascend(head, n, radius, seed=seed, **effort)
    yield {"kind": "search", "name": found.start, "head": _HEAD, **_measured(head, found.x, seed)}
    uppers = {"upper": best(head, length=n, radius=radius)}
    if other is None:
        biased = f.query_bias is not None
        theorem = theorem_4_3 if f.causal else theorem_e_3 if biased else theorem_3_3
        uppers["theirs"] = theorem(head, n, radius)
    for kind, bound in uppers.items():
        yield {"kind": kind, "name": bound.name, "head": _HEAD, "log_value": bound.log_value}


def _published_rows(f: SelfAttention, fused: bool, radius: float, n: int, seed: int) -> Iterator[Values]:
    """Yield the constants of each head at the two-cluster tokens that the published code constructs.

    The constants are measured with the method of the published code. The tokens are those of the paper,
    unless the weights of queries, keys and values are one transposed matrix, which the published code slices
    along the wrong axis. In this case the constants at the wrong tokens are also measured correctly.
    """
    sliced = wrong_slices(f) if fused else f
    for h in _real(sliced):
        x = two_cluster(sliced.head(h), n, radius).x
        what = {"name": "two_cluster", "head": h}
        if fused:
            yield {"kind": "wrong slices", **what, **_measured(f.head(h), x, seed)}
        theirs = power_iteration(f.head(h), x, output=True, absolute=True, seed=seed)
        yield {"kind": "as published", **what, "value": theirs.value, "converged": theirs.settled}


def _real(f: SelfAttention) -> list[int]:
    """Return the heads whose A has a real eigenvalue: the paper's tokens exist only for these."""
    return [h for h, head in enumerate(parameters_of(f).heads) if real_eigenpairs(head)]


def _measured(head: SelfAttention, x: Tensor, seed: int) -> Values:
    found = lipschitz.local_lipschitz(head, x, rtol=_RTOL, seed=seed)
    return {"value": float(found.value), "converged": bool(found.converged)}


def side_by_side(rows: pd.DataFrame, text: pd.DataFrame, head: int) -> Values:
    """Combine all constants and bounds for one ball and one sequence length into a single row.

    Parameters
    ----------
    rows
        The rows of this ball and length, with the columns ``n, kind, name, head``. A constant also has the
        columns ``value`` and ``converged``, and a bound has ``log_value``.
    text
        The converged measurements on text at this length, with the columns ``head, lipschitz``.
    head
        The index of the attacked head.

    Returns
    -------
    dict
        The constants of the attacked head: ``paper`` at the paper's tokens, ``found`` at the worst tokens
        found (``found by`` names the construction or search that found them), ``wrong slices`` at the tokens
        of the published code, ``as published`` as the published code computes the constant. The logarithms of
        two upper bounds: ``upper`` of this library and ``theirs`` of the paper, whose theorem is ``theorem``.
        The median, minimum and maximum over all heads: ``paper median``, ``paper low`` and ``paper high`` at
        the paper's tokens; ``text median``, ``text low`` and ``text high`` on text. ``text own`` is the
        median of the attacked head on text. ``unsettled`` is the number of values that did not converge; they
        are left out. Missing values are NaN, and a missing theorem is None.

    """
    values = rows[rows["converged"] == True]  # noqa: E712
    own = values[values["head"] == head]
    bounds = rows.drop_duplicates("kind").set_index("kind").reindex(["upper", "theirs"])
    by_kind = own.groupby("kind")["value"].first()
    worst = own[own["kind"].isin(["paper", "search"])].sort_values("value").tail(1)
    return (
        {"n": rows["n"].iloc[0], "text own": text[text["head"] == head]["lipschitz"].median()}
        | _span("text", text["lipschitz"])
        | _span("paper", values[values["kind"] == "paper"]["value"])
        | {kind: by_kind.get(kind, math.nan) for kind in ("paper", "wrong slices", "as published")}
        | {
            "found": worst["value"].max(),
            "found by": "".join(worst["name"]),
            "upper": bounds.loc["upper", "log_value"],
            "theirs": bounds.loc["theirs", "log_value"],
            "theorem": _THEOREMS.get(str(bounds.loc["theirs", "name"])),
            "unsettled": int((rows["converged"] == False).sum()),  # noqa: E712
        }
    )


def _span(name: str, values: pd.Series) -> Values:
    return {f"{name} median": values.median(), f"{name} low": values.min(), f"{name} high": values.max()}


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the largest known constants of each layer against n, with one panel for each ball, and return
    the figures with a table and sentences on the results.
    """
    layers = [part for _, part in rows.groupby(["model", "layer"], sort=False)]
    shown = rows.assign(upper=exp(rows["upper"])).rename(columns=_NAMES)
    for theorem, theirs in rows.groupby("theorem", sort=False)["theirs"]:
        shown[theorem] = exp(theirs.where(np.isfinite(theirs)))
    theorems = rows["theorem"].dropna().unique()
    names = [*list(_NAMES.values())[:-1], *theorems, "published tokens", "as published"]
    table = shown[names].dropna(axis=1, how="all")
    caption = "Constants and bounds at every radius and length; medians are over all heads of the layer"
    seen = [words for part in layers for words in _result_sentences(part)]
    return Finding([_picture(part, folder) for part in layers], seen, [(caption, table)])


def _balls(rows: pd.DataFrame) -> list[pd.DataFrame]:
    return [part for _, part in rows.groupby("R", sort=False)]


def _name(rows: pd.DataFrame) -> str:
    return f"{readable(str(rows['model'].iloc[0]))}, layer {rows['layer'].iloc[0]}, head {_HEAD}"


def _fit(rows: pd.DataFrame, name: str) -> Exponent:
    """Fit a power of n to the finite values in one column of constants."""
    values = rows[name].to_numpy(np.float64)
    return fit_exponent(rows["n"].to_numpy(), values, np.isfinite(values))


def _picture(rows: pd.DataFrame, folder: Path) -> plotting.Picture:
    canvas, _ = plotting.draw([list(map(_panel, _balls(rows)))], 3.0, sharey=True)
    canvas.suptitle(literal(_name(rows)))
    stem = file_stem("adversarial", str(rows["model"].iloc[0]), f"layer-{rows['layer'].iloc[0]:02d}")
    return plotting.picture(canvas, folder, stem, f"Section 5.2: {_name(rows)}")


def _panel(rows: pd.DataFrame) -> Panel:
    n, bounds = rows["n"], rows[["upper", "theirs"]].apply(exp)
    # Let the limits of the axis include bounds only if they are not far above all constants.
    near = bounds[bounds < 1e3 * rows[["found", "paper high", "text high"]].max().max()]
    curves = [
        Curve(n, rows["found"], "largest found", plotting.VIOLET, "o", size=13),
        *plotting.with_slope(
            rows, "n", "found", 0.5, r"$c\sqrt{n}$, $c$ fitted", plotting.VIOLET, plotting.DOTTED
        ),
        Curve(n, rows["paper"], "the paper's tokens", plotting.TEAL, "^", size=16),
        Curve(
            n,
            rows["paper median"],
            "their median over heads",
            plotting.TEAL,
            dashes=plotting.DASHED,
            spread=(rows["paper low"], rows["paper high"]),
        ),
        Curve(
            n,
            rows["text median"],
            "on text",
            plotting.GREY,
            "s",
            size=11,
            spread=(rows["text low"], rows["text high"]),
        ),
        *(Curve(n, near[name]) for name in near),  # room for these bounds
        *plotting.lines(
            n,
            bounds.where(np.isfinite(bounds)),
            ("upper", plotting.BLACK, plotting.SOLID, "howsmooth's bound"),
            ("theirs", plotting.GREY, plotting.DASHDOT, rows["theorem"].iloc[0]),
        ),
        Curve(n, rows["wrong slices"], "published tokens", plotting.ORANGE, "x", size=16),
        Curve(n, rows["as published"], "as published", plotting.ORANGE, "+", size=16),
    ]
    title = f"$R = {rows['R'].iloc[0]:.4g}$" + (", real tokens" if rows["real"].all() else "")
    for name, words in (("found", "found"), ("paper", "paper's")):
        if rows["theorem"].notna().all() or name == "found":
            title += f"\n{words} {power_label(_fit(rows, name), ends=False)}"
    return Panel(curves, title)


def _result_sentences(rows: pd.DataFrame) -> list[str]:
    """Return sentences on the largest constants of one layer in each ball."""
    said = [_ball_words(ball) for ball in _balls(rows)]
    if rows["as published"].notna().any():
        said.append(_published_words(rows))
    if rows["unsettled"].any():
        said.append(f"{_name(rows)}: {rows['unsettled'].sum()} values did not converge and are left out.")
    return said


def _ends(values: pd.Series) -> str:
    there = values.dropna()
    return f"{there.iloc[0]:.3g} to {there.iloc[-1]:.3g}"


def _ball_words(rows: pd.DataFrame) -> str:
    n, real = rows["n"], bool(rows["real"].all())
    words = f"{_name(rows)}, R = {rows['R'].iloc[0]:.4g}"
    words += " (the norm of the longest real token): " if real else ": "
    if rows["paper"].notna().any():
        words += (
            f"at the paper's tokens the constant goes from {_ends(rows['paper'])} as n goes from {n.min()} "
            f"to {n.max()}, {power(_fit(rows, 'paper'))}; its median over all heads from "
            f"{_ends(rows['paper median'])}. "
        )
    if rows["found"].notna().any():
        words += "The" if rows["paper"].notna().any() else "the"
        words += f" largest found goes from {_ends(rows['found'])}, {power(_fit(rows, 'found'))}, and is "
        if rows["paper"].notna().any():
            words += f"{between(rows['found'] / rows['paper'])} times that at the paper's tokens and "
        share = between(rows["found"] / exp(rows["upper"]))
        words += f"{share} times howsmooth's bound, which none in the ball can exceed"
        if np.isfinite(rows["theirs"]).all():
            theirs = between(exp(rows["theirs"] - rows["upper"]))
            words += f"; {rows['theorem'].iloc[0]} is {theirs} times that bound"
        words += ". "
    text = rows[rows["text median"].notna()]
    if real and len(text):
        words += (
            f"On text of the same lengths the median constant of a head is {between(text['text median'])}"
        )
        if text["paper median"].notna().any():
            ratio = between(text["paper median"] / text["text median"])
            words += f"; the median over heads at the paper's tokens is {ratio} times as large"
        ratio = between(text["found"] / text["text own"])
        words += f". In head {_HEAD} the largest found is {ratio} times the median on text."
    return words.strip()


def _published_words(rows: pd.DataFrame) -> str:
    words, right = f"{_name(rows)}, as published: ", rows["paper"]
    if rows["fused"].all():
        right = rows["wrong slices"]
        words += (
            "the tokens that heads sliced along the wrong axis give have constants "
            f"{between(right / rows['paper'])} times those at the paper's tokens; "
        )
    fits = [f"{power(_fit(ball, 'as published'))} at R = {ball['R'].iloc[0]:.4g}" for ball in _balls(rows)]
    return (
        f"{words}the published iteration, with the output in place of the tangent and its absolute stopping, "
        f"returns {between(rows['as published'] / right)} times the constant at its tokens, and grows like "
        f"{'; '.join(fits)}."
    )


WORST_INPUTS = Figure(
    name="adversarial",
    title="One head at its worst inputs, beside text of the same length",
    paper="Figure 2",
    about=(
        "The local Lipschitz constant of one head, values only, at the paper's two clusters: a token Ru and "
        "copies of Ru/2 or of −Ru, u an eigenvector of A. R is one of the paper's radii, or the norm of the "
        "longest real token that the layer is given. Beside it, the constant at the worst tokens that "
        "howsmooth finds in the same ball; on real text of the same length, with bars from the smallest to "
        "the largest over sequences and heads; and upper bounds on the ball, which no tokens can exceed. "
        "Dashed, the median over all heads of the layer at the paper's tokens, and shaded from the smallest "
        "to the largest. Of scores that the paper does not treat, such as those with rotary positions, the "
        "paper's tokens and theorems are left out."
    ),
    plan=plan,
    show=show,
)
