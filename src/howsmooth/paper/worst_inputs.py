"""Section 5.2: the constant of one head at the paper's worst inputs, at ours, and on real text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from howsmooth import lipschitz
from howsmooth.adversarial import ascend, two_cluster
from howsmooth.attention import SelfAttention
from howsmooth.bounds import best, theorem_3_3, theorem_4_3, theorem_e_3
from howsmooth.errors import ArgumentError
from howsmooth.paper import drawing
from howsmooth.paper.drawing import Curve, Panel
from howsmooth.paper.figure import Bench, Figure, Finding
from howsmooth.paper.published import has_fused_weight, power_iteration, wrong_slices
from howsmooth.paper.setting import Column, Setting, bilinear, columns, loaded, usual_length
from howsmooth.paper.units import Key, Row
from howsmooth.paper.words import between, exp, power, power_label
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.style import literal
from howsmooth.study.names import file_stem, readable
from howsmooth.study.plan import derive_seed
from howsmooth.study.strengths import strengths

__all__ = ["RADII", "WORST_INPUTS", "Ball", "Layer", "measure", "show", "side_by_side"]

RADII = (15.5, 21.5, 100.0)
"""The paper's radii; that of real tokens is added for each layer."""

_LENGTHS = (12, 24, 64, 160, 392)
_SAMPLES = 4
_HEAD = 0
_RTOL = 1e-4
# Of the search, which begins at all constructions: here it adds less than 1 % to the best of them.
_STEPS, _RESTARTS, _ATOM_STEPS = 1, 8, 40
# Of the time of one model, what its text needs.
_TEXT, _BALLS = 0.15, 0.85
_THEOREMS = {"theorem_3_3": "Theorem 3.3", "theorem_e_3": "Theorem E.3", "theorem_4_3": "Theorem 4.3"}
_NAMES = {
    "n": "n", "text median": "text, median", "paper": "paper's tokens",
    "paper median": "paper's tokens, median", "found": "largest found", "found by": "found by",
    "upper": "at most",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of one model.

    Attributes
    ----------
    column
        What it is.
    attention
        All its heads with their output; the head 0 is the one that is attacked.
    fingerprint
        Of the model.
    fused
        Whether its weights are fused and transposed.
    text
        The converged measurements of every head on text.
    radius
        The norm of the longest real token.

    """

    column: Column
    attention: SelfAttention
    fingerprint: str
    fused: bool
    text: pd.DataFrame
    radius: float

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{readable(self.column.spec.label)}, layer {self.column.layer}, head {_HEAD}"


@dataclass(frozen=True, eq=False)
class Ball:
    """The tokens of at most some norm, in one layer.

    Attributes
    ----------
    layer, radius
        What it is.
    table
        As :func:`side_by_side` gives it.
    theorem
        The paper's that gives the column ``theirs``.

    """

    layer: Layer
    radius: float
    table: pd.DataFrame
    theorem: str

    @property
    def real(self) -> bool:
        """Whether the radius is the norm of the longest real token."""
        return self.radius == self.layer.radius

    def fit(self, name: str) -> Exponent:
        """Fit the power of n to a column of the table."""
        values = self.table[name].to_numpy(np.float64)
        return fit_exponent(self.table["n"].to_numpy(), values, np.isfinite(values))


def measure(bench: Bench) -> list[list[Ball]]:
    """Measure each layer on text, and one head of it in every ball."""
    lengths = tuple(n for n in bench.request.lengths or _LENGTHS if n >= 2)
    if not lengths:
        raise ArgumentError("lengths", expected="some of at least 2, for two clusters", got="1")
    layers = columns(bench)
    found = []
    for column, part in bench.each(layers, [one.cost for one in layers]):
        reading, searching = part.parts((_TEXT, _BALLS))
        layer = _on_text(column, reading)
        jobs = [(radius, n) for radius in dict.fromkeys((*RADII, layer.radius)) for n in lengths]
        rows: list[Row] = []
        for (radius, n), share in searching.each(jobs, [n + 100.0 for _, n in jobs]):
            share.say(f"{column.spec.label}, R = {radius:.4g}, n = {n}")
            rows += _in_ball(layer, radius, n, share)
        balls = []
        for written, own in pd.DataFrame(rows).groupby("ball", sort=False):
            theorem = _THEOREMS[str(own[own["kind"] == "theirs"]["name"].iloc[0])]
            balls.append(Ball(layer, float(str(written)), side_by_side(own, layer.text, _HEAD), theorem))
        found.append(balls)
    return found


def _on_text(column: Column, bench: Bench) -> Layer:
    """Measure every head on text; return the layer."""
    longest = loaded(bench, column.spec).max_length
    asked = bench.request.lengths or _LENGTHS
    lengths = tuple(n for n in asked if longest is None or n <= longest)
    here = Setting(
        bench,
        column.spec,
        lengths=lengths or (usual_length(bench, column.spec),),
        samples=bench.request.samples or _SAMPLES,
        layers=column.layers,
        scopes=("head",),
    )
    subject = here.subjects[0]
    _, tokens = next(here.sequences(subject))
    (site,) = here.sites(subject, tokens[:1])
    model = getattr(bench.models.load_for(subject), "model", None)
    fused = model is not None and has_fused_weight(model.get_submodule(site.name))
    rows = here.study(f"studies/{column.stem}", bench).rows
    return Layer(
        column,
        bilinear(site, column.spec.label),
        subject.fingerprint,
        fused,
        text=rows[rows["converged"]],
        radius=float(rows["radius_max"].max()),
    )


def _in_ball(layer: Layer, radius: float, n: int, bench: Bench) -> list[Row]:
    """Measure one head in a ball at one length, as published too if that is asked for."""
    rows: list[Row] = []
    for kind in (_rows, _published_rows) if bench.request.as_published else (_rows,):
        key: Key = {
            "model": layer.column.spec.label,
            "fingerprint": layer.fingerprint,
            "layer": layer.column.layer,
            "ball": repr(radius),
            "n": n,
            "published": int(kind is _published_rows),
            "search": f"{_STEPS},{_RESTARTS},{_ATOM_STEPS}",
            "seed": bench.request.seed,
            "dtype": bench.request.dtype,
        }
        rows += bench.rows(key, partial(kind, layer, radius, n, derive_seed(purpose="adversarial", **key)))
    return rows


def _rows(layer: Layer, radius: float, n: int, seed: int) -> Iterator[Row]:
    """Give the paper's tokens for every head; for one head ours and the bounds besides."""
    f = layer.attention
    for h in _real(f):
        x = two_cluster(f.head(h), n, radius).x
        yield {"kind": "paper", "name": "two_cluster", "head": h, **_measured(f.head(h), x, seed)}
    head = f.head(_HEAD)
    found = ascend(
        head,
        n,
        radius,
        random_starts=0,
        steps=_STEPS,
        atom_restarts=_RESTARTS,
        atom_steps=_ATOM_STEPS,
        seed=seed,
    )
    yield {"kind": "search", "name": found.start, "head": _HEAD, **_measured(head, found.x, seed)}
    biased = f.query_bias is not None
    theirs = (theorem_4_3 if f.causal else theorem_e_3 if biased else theorem_3_3)(head, n, radius)
    for kind, bound in (("upper", best(head, length=n, radius=radius)), ("theirs", theirs)):
        yield {"kind": kind, "name": bound.name, "head": _HEAD, "log_value": bound.log_value}


def _published_rows(layer: Layer, radius: float, n: int, seed: int) -> Iterator[Row]:
    """Give the published tokens, measured right and as the published code does.

    They are the paper's, but for weights that are fused and transposed: then of slices along the wrong axis.
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
    """List the heads whose A has a real eigenvalue: the others have no clusters."""
    return [h for h, strength in enumerate(strengths(f)) if strength.gamma is not None]


def _measured(head: SelfAttention, x: Tensor, seed: int) -> Row:
    found = lipschitz.local_lipschitz(head, x, rtol=_RTOL, seed=seed)
    names = ("value", "lower", "upper")
    return {name: float(getattr(found, name)) for name in names} | {"converged": bool(found.converged)}


def side_by_side(rows: pd.DataFrame, text: pd.DataFrame, head: int) -> pd.DataFrame:
    """Put what was measured in one ball side by side.

    Parameters
    ----------
    rows
        Of the units: ``n, kind, name, head``, and ``value`` with ``converged``, or ``log_value`` of a bound.
    text
        Converged measurements on text: ``n, head, lipschitz``.
    head
        The one that is attacked.

    Returns
    -------
    pandas.DataFrame
        One row a length: constants of that head at the paper's tokens (``paper``), at the worst that were
        found (``found``, by ``found by``), at the published tokens (``wrong slices``) and as the published
        code computes it (``as published``); logarithms of bounds (``upper``, ``theirs``); over all heads
        ``paper median``, ``paper low``, ``paper high``, and on text ``text median``, ``text low``,
        ``text high`` (``text own``: the median of that head alone); ``unsettled``, how many values did not
        converge and are left out. NaN where there is none.

    """
    found = []
    for n, part in rows.groupby("n", sort=True):
        values = part[part["converged"] == True]  # noqa: E712
        own = values[values["head"] == head]
        by_kind = own.groupby("kind")["value"].first()
        paper = values[values["kind"] == "paper"]["value"]
        here = text[text["n"] == n]
        bounds = part.set_index("kind")["log_value"]
        worst = own[own["kind"].isin(["paper", "search"])].sort_values("value").tail(1)
        found.append(
            {"n": n, "text own": here[here["head"] == head]["lipschitz"].median()}
            | _span("text", here["lipschitz"])
            | _span("paper", paper)
            | {
                "found": worst["value"].max(),
                "found by": "".join(worst["name"]),
                "upper": bounds["upper"],
                "theirs": bounds["theirs"],
                "unsettled": int((part["converged"] == False).sum()),  # noqa: E712
            }
            | {kind: by_kind.get(kind, math.nan) for kind in ("paper", "wrong slices", "as published")}
        )
    return pd.DataFrame(found)


def _span(name: str, values: pd.Series) -> Row:
    return {f"{name} median": values.median(), f"{name} low": values.min(), f"{name} high": values.max()}


def show(layers: list[list[Ball]], folder: Path) -> Finding:
    """Draw each layer, and say what is seen in each ball."""
    pictures = [_picture(balls, folder) for balls in layers]
    seen = [words for balls in layers for words in _said(balls)]
    table = pd.concat([_shown(ball) for balls in layers for ball in balls], ignore_index=True)
    caption = "Constants and bounds at every radius and length; medians are over all heads of the layer"
    return Finding(pictures, seen, [(caption, table)])


def _picture(balls: list[Ball], folder: Path) -> drawing.Picture:
    layer = balls[0].layer
    canvas, _ = drawing.draw([list(map(_panel, balls))], 3.0, sharey=True)
    canvas.suptitle(literal(layer.name))
    stem = file_stem("adversarial", layer.column.spec.label, f"layer-{layer.column.layer:02d}")
    return drawing.picture(canvas, folder, stem, f"Section 5.2: {layer.name}")


def _panel(ball: Ball) -> Panel:
    table, n = ball.table, ball.table["n"]
    bounds = table[["upper", "theirs"]].apply(exp)
    # Bounds far above all constants would leave these no room, and may overflow.
    near = bounds[bounds < 1e3 * table[["found", "paper high", "text high"]].max().max()]
    curves = [
        Curve(n, table["found"], "largest found", drawing.VIOLET, "o", size=13),
        *drawing.with_slope(
            table, "n", "found", 0.5, r"$c\sqrt{n}$, $c$ fitted", drawing.VIOLET, drawing.DOTTED
        ),
        Curve(n, table["paper"], "the paper's tokens", drawing.TEAL, "^", size=16),
        Curve(n, table["paper median"], "their median over heads", drawing.TEAL, dashes=drawing.DASHED,
              spread=(table["paper low"], table["paper high"])),
        Curve(n, table["text median"], "on text", drawing.GREY, "s", size=11,
              spread=(table["text low"], table["text high"])),
        *(Curve(n, near[name]) for name in near),
        *drawing.lines(
            n, bounds.where(np.isfinite(bounds)),
            ("upper", drawing.BLACK, drawing.SOLID, "howsmooth's bound"),
            ("theirs", drawing.GREY, drawing.DASHDOT, ball.theorem),
        ),
        Curve(n, table["wrong slices"], "published tokens", drawing.ORANGE, "x", size=16),
        Curve(n, table["as published"], "as published", drawing.ORANGE, "+", size=16),
    ]  # fmt: skip
    found, paper = (power_label(ball.fit(name), ends=False) for name in ("found", "paper"))
    title = f"$R = {ball.radius:.4g}$" + (", real tokens" if ball.real else "")
    return Panel(curves, f"{title}\nfound {found}\npaper's {paper}")


def _said(balls: list[Ball]) -> list[str]:
    said = [_ball_words(ball) for ball in balls]
    published = [ball for ball in balls if ball.table["as published"].notna().any()]
    if published:
        said.append(_published_words(published))
    unsettled = sum(int(ball.table["unsettled"].sum()) for ball in balls)
    if unsettled:
        said.append(f"{balls[0].layer.name}: {unsettled} values did not converge and are left out.")
    return said


def _ends(values: pd.Series) -> str:
    there = values.dropna()
    return f"{there.iloc[0]:.3g} to {there.iloc[-1]:.3g}"


def _ball_words(ball: Ball) -> str:
    table, n = ball.table, ball.table["n"]
    words = f"{ball.layer.name}, R = {ball.radius:.4g}"
    words += " (the norm of the longest real token): " if ball.real else ": "
    if table["paper"].notna().any():
        words += (
            f"at the paper's tokens the constant goes from {_ends(table['paper'])} as n goes from {n.min()} "
            f"to {n.max()}, {power(ball.fit('paper'))}; its median over all heads from "
            f"{_ends(table['paper median'])}. "
        )
    if table["found"].notna().any():
        words += (
            f"The largest found goes from {_ends(table['found'])}, {power(ball.fit('found'))}, and is "
            f"{between(table['found'] / table['paper'])} times that at the paper's tokens and "
            f"{between(table['found'] / exp(table['upper']))} times howsmooth's bound, which none in the "
            "ball can exceed"
        )
        if np.isfinite(table["theirs"]).all():
            theirs = exp(table["theirs"] - table["upper"])
            words += f"; {ball.theorem} is {between(theirs)} times that bound"
        words += ". "
    text = table[table["text median"].notna()]
    if ball.real and len(text):
        words += (
            f"On text of the same lengths the median constant of a head is {between(text['text median'])}; "
            "the median over heads at the paper's tokens is "
            f"{between(text['paper median'] / text['text median'])} times as large. In head {_HEAD} the "
            f"largest found is {between(text['found'] / text['text own'])} times the median on text."
        )
    return words.strip()


def _published_words(balls: list[Ball]) -> str:
    tables, layer = pd.concat([ball.table for ball in balls]), balls[0].layer
    words, right = f"{layer.name}, as published: ", tables["paper"]
    if layer.fused:
        right = tables["wrong slices"]
        words += (
            "the tokens that heads sliced along the wrong axis give have constants "
            f"{between(right / tables['paper'])} times those at the paper's tokens; "
        )
    fits = [f"{power(ball.fit('as published'))} at R = {ball.radius:.4g}" for ball in balls]
    return (
        f"{words}the published iteration, with the output in place of the tangent and its absolute stopping, "
        f"returns {between(tables['as published'] / right)} times the constant at its tokens, and grows like "
        f"{'; '.join(fits)}."
    )


def _shown(ball: Ball) -> pd.DataFrame:
    table = ball.table.assign(upper=exp(ball.table["upper"]), theirs=exp(ball.table["theirs"]))
    names = dict(_NAMES)
    if np.isfinite(ball.table["theirs"]).any():
        names["theirs"] = ball.theorem
    published = {"wrong slices": "published tokens", "as published": "as published"}
    names |= {name: words for name, words in published.items() if table[name].notna().any()}
    column = ball.layer.column
    what = {"model": column.spec.label, "layer": column.layer, "head": _HEAD, "R": ball.radius}
    shown = table[list(names)].rename(columns=names)
    return pd.concat([pd.DataFrame(what, index=shown.index), shown], axis=1)


WORST_INPUTS = Figure(
    name="adversarial",
    title="One head at its worst inputs, beside text of the same length",
    paper="Section 5.2",
    about=(
        "The local Lipschitz constant of one head, values only, at the paper's two clusters: a token Ru and "
        "copies of Ru/2 or of −Ru, u an eigenvector of A. R is one of the paper's radii, or the norm of the "
        "longest real token that the layer is given. Beside it, the constant at the worst tokens that "
        "howsmooth finds in the same ball; on real text of the same length, with bars from the smallest to "
        "the largest over sequences and heads; and upper bounds on the ball, which no tokens can exceed. "
        "Dashed, the median over all heads of the layer at the paper's tokens, and shaded from the smallest "
        "to the largest."
    ),
    measure=measure,
    show=show,
)
