"""Section 5.2: compare the constants at the paper's worst inputs with the constants at inputs found by a
search, and with the constants on text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
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
from howsmooth.paper.figure_dataclasses import Figure, FigureContext, Finding
from howsmooth.paper.model_with_texts import (
    Column,
    PreparedModel,
    attention_of,
    columns,
    loaded,
    other_scores,
    usual_length,
)
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.paper.published_code import has_fused_weight, power_iteration, wrong_slices
from howsmooth.paper.row_cache import Key, Row
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.drawing import literal
from howsmooth.study.text_formatting import file_stem, readable

__all__ = ["RADII", "WORST_INPUTS", "measure", "show", "side_by_side"]

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
# Shares of the time of one model: its text, and the balls.
_TEXT, _BALLS = 0.15, 0.85
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
    """One layer of one model, with the measurements of its heads on text.

    ``attention`` is the attention of all heads with the output projection. If the scores differ from the
    paper's, for example by rotary positions, ``heads`` contains the attacked head for each length that the
    model can read; otherwise ``heads`` is empty. ``fused`` says whether the weights of queries, keys and
    values are one transposed matrix. ``text`` is the table of the converged measurements of all heads on
    text, and ``radius`` is the largest norm of a token of these texts.
    """

    column: Column
    attention: SelfAttention
    heads: dict[int, SelfAttention]
    fingerprint: str
    fused: bool
    text: pd.DataFrame
    radius: float

    @property
    def effort(self) -> dict[str, Any]:
        """The arguments of :func:`~howsmooth.adversarial.ascend` that set the effort of the search."""
        steps, starts = (_OTHER_STEPS, _OTHER_STARTS) if self.heads else (_STEPS, 0)
        atoms = {"atom_restarts": _RESTARTS, "atom_steps": _ATOM_STEPS}
        return {"steps": steps, "random_starts": starts, **atoms}


def measure(context: FigureContext) -> pd.DataFrame:
    """Measure the heads of each layer on text, and one head at the worst tokens in balls of several radii.

    Returns
    -------
    pandas.DataFrame
        One row for each model, layer, radius (``R``) and length, with the columns of :func:`side_by_side`.
        ``real`` says whether the radius is the largest norm of a token of the texts, and ``fused`` whether
        the weights of queries, keys and values are one transposed matrix.

    """
    lengths = tuple(n for n in context.options.lengths or _LENGTHS if n >= 2)
    if not lengths:
        raise ArgumentError("lengths", expected="some of at least 2, for two clusters", got="1")
    layers, found = columns(context), []
    for column, part in context.each(layers, [one.cost for one in layers]):
        reading, searching = part.parts((_TEXT, _BALLS))
        layer = _on_text(column, reading)
        possible = [n for n in lengths if n in layer.heads or not layer.heads]
        if not possible:
            most = f"lengths of at most {max(layer.heads)}, which {column.spec.label} can read"
            raise ArgumentError("lengths", expected=most, got=str(min(lengths)))
        jobs = [(radius, n) for radius in dict.fromkeys((*RADII, layer.radius)) for n in possible]
        for (radius, n), share in searching.each(jobs, [n + 100.0 for _, n in jobs]):
            share.say(f"{column.spec.label}, R = {radius:.4g}, n = {n}")
            rows = pd.DataFrame(_in_ball(layer, radius, n, share))
            what = {"model": column.spec.label, "layer": column.layer, "head": _HEAD, "R": radius}
            beside = {"real": radius == layer.radius, "fused": layer.fused}
            found.append(what | beside | side_by_side(rows, layer.text[layer.text["n"] == n], _HEAD))
    return pd.DataFrame(found)


def _on_text(column: Column, context: FigureContext) -> _Layer:
    """Measure the heads of one layer on text, and return the layer with those measurements that converged."""
    longest = loaded(context, column.spec).max_length
    asked = context.options.lengths or _LENGTHS
    lengths = tuple(n for n in asked if longest is None or n <= longest)
    here = PreparedModel(
        context,
        column.spec,
        lengths=lengths or (usual_length(context, column.spec),),
        samples=context.options.samples or _SAMPLES,
        layers=column.layers,
        scopes=("head",),
    )
    subject = here.subjects[0]
    sites = {n: here.sites(subject, tokens[:1])[0] for n, tokens in here.sequences(subject)}
    site = sites[max(sites)]  # a window is seen in long sequences only
    attention, heads = attention_of(site, column.spec.label), {}
    if other_scores(attention):
        heads = {n: attention_of(one, column.spec.label).head(_HEAD) for n, one in sites.items()}
    model = getattr(context.models.load_for(subject), "model", None)
    fused = model is not None and has_fused_weight(model.get_submodule(site.name))
    rows = here.study(f"studies/{column.stem}", context).rows
    return _Layer(
        column,
        attention,
        heads,
        subject.fingerprint,
        fused,
        text=rows[rows["converged"]],
        radius=float(rows["radius_max"].max()),
    )


def _in_ball(layer: _Layer, radius: float, n: int, context: FigureContext) -> list[Row]:
    """Return the constants and bounds for n tokens in a ball of the given radius, from the cache or newly
    computed.
    """
    rows: list[Row] = []
    for kind in (_rows, _published_rows) if context.options.as_published and not layer.heads else (_rows,):
        key: Key = {
            "model": layer.column.spec.label,
            "fingerprint": layer.fingerprint,
            "layer": layer.column.layer,
            "ball": repr(radius),
            "n": n,
            "published": int(kind is _published_rows),
            "search": ",".join(map(str, layer.effort.values())),
            "seed": context.options.seed,
            "dtype": context.options.dtype,
        }
        rows += context.rows(key, partial(kind, layer, radius, n, derive_seed(purpose="adversarial", **key)))
    return rows


def _rows(layer: _Layer, radius: float, n: int, seed: int) -> Iterator[Row]:
    """Yield rows with the constants of a layer's heads at the worst tokens in a ball, and with upper bounds.

    Every head is measured at the paper's two-cluster tokens. One head is also measured at the worst tokens
    that a search finds, and has two upper bounds: the best one of this library, and the paper's. If the paper
    does not treat the scores of the layer, the rows contain only the search and the best bound of this
    library.
    """
    f = layer.attention
    for h in () if layer.heads else _real(f):
        x = two_cluster(f.head(h), n, radius).x
        yield {"kind": "paper", "name": "two_cluster", "head": h, **_measured(f.head(h), x, seed)}
    head = layer.heads[n] if layer.heads else f.head(_HEAD)
    found = ascend(head, n, radius, seed=seed, **layer.effort)
    yield {"kind": "search", "name": found.start, "head": _HEAD, **_measured(head, found.x, seed)}
    uppers = {"upper": best(head, length=n, radius=radius)}
    if not layer.heads:
        biased = f.query_bias is not None
        theorem = theorem_4_3 if f.causal else theorem_e_3 if biased else theorem_3_3
        uppers["theirs"] = theorem(head, n, radius)
    for kind, bound in uppers.items():
        yield {"kind": kind, "name": bound.name, "head": _HEAD, "log_value": bound.log_value}


def _published_rows(layer: _Layer, radius: float, n: int, seed: int) -> Iterator[Row]:
    """Yield the constants of each head at the two-cluster tokens that the published code constructs.

    The constants are measured with the method of the published code. The tokens are those of the paper,
    unless the weights of queries, keys and values are one transposed matrix, which the published code slices
    along the wrong axis. In this case the constants at the wrong tokens are also measured correctly.
    """
    f = layer.attention
    sliced = wrong_slices(f) if layer.fused else f
    for h in _real(sliced):
        x = two_cluster(sliced.head(h), n, radius).x
        what = {"name": "two_cluster", "head": h}
        if layer.fused:
            yield {"kind": "wrong slices", **what, **_measured(f.head(h), x, seed)}
        theirs = power_iteration(f.head(h), x, output=True, absolute=True, seed=seed)
        yield {"kind": "as published", **what, "value": theirs.value, "converged": theirs.settled}


def _real(f: SelfAttention) -> list[int]:
    """Return the indices of those heads whose matrix A has a real eigenvalue, because the paper's tokens
    exist only for such heads.
    """
    return [h for h, head in enumerate(parameters_of(f).heads) if real_eigenpairs(head)]


def _measured(head: SelfAttention, x: Tensor, seed: int) -> Row:
    found = lipschitz.local_lipschitz(head, x, rtol=_RTOL, seed=seed)
    return {"value": float(found.value), "converged": bool(found.converged)}


def side_by_side(rows: pd.DataFrame, text: pd.DataFrame, head: int) -> Row:
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


def _span(name: str, values: pd.Series) -> Row:
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
    measure=measure,
    show=show,
)
