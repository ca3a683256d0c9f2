"""Section 5.2: the constant of one head at the paper's worst inputs, at ours, and on real text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from torch import Tensor

from howsmooth import lipschitz
from howsmooth.adversarial import ascend, two_cluster
from howsmooth.attention import SelfAttention
from howsmooth.bounds import best, theorem_3_3, theorem_4_3, theorem_e_3
from howsmooth.errors import ArgumentError
from howsmooth.paper import drawing
from howsmooth.paper.figure import Bench, Figure, Finding
from howsmooth.paper.published import has_fused_weight, power_iteration, wrong_slices
from howsmooth.paper.setting import Column, Setting, bilinear, columns, loaded, usual_length
from howsmooth.paper.units import Key, Row
from howsmooth.paper.words import between, exp, power, power_label
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.style import literal, set_axis
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
_SERIES = ("paper", "found", "wrong slices", "as published")


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
        return f"{readable(self.column.spec.label)}, layer {self.column.layer}"


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
        radii = tuple(dict.fromkeys((*RADII, layer.radius)))
        rows = pd.DataFrame(_in_balls(layer, radii, lengths, searching))
        found.append(
            [_ball(layer, float(str(radius)), part) for radius, part in rows.groupby("ball", sort=False)]
        )
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
    attention, fused = _attention(here, column)
    rows = here.study(f"studies/{column.stem}", bench).rows
    radius = float(rows["radius_max"].max())
    text = rows[rows["converged"]]
    return Layer(column, attention, here.subjects[0].fingerprint, fused, text, radius)


def _attention(here: Setting, column: Column) -> tuple[SelfAttention, bool]:
    """Return all heads of the layer with its output, and whether their weights are fused and transposed."""
    subject = here.subjects[0]
    _, tokens = next(here.sequences(subject))
    (site,) = here.sites(subject, tokens[:1])
    model = getattr(here.model(subject), "model", None)
    fused = model is not None and has_fused_weight(model.get_submodule(site.name))
    return bilinear(site, column.spec.label), fused


def _in_balls(layer: Layer, radii: tuple[float, ...], lengths: tuple[int, ...], bench: Bench) -> list[Row]:
    """Measure one head in every ball at every length, as published too if that is asked for."""
    jobs = [(radius, n) for radius in radii for n in lengths]
    rows: list[Row] = []
    for (radius, n), part in bench.each(jobs, [n + 100.0 for _, n in jobs]):
        part.say(f"{layer.column.spec.label}, R = {radius:.4g}, n = {n}")
        for published in (False, True) if bench.request.as_published else (False,):
            key: Key = {
                "model": layer.column.spec.label,
                "fingerprint": layer.fingerprint,
                "layer": layer.column.layer,
                "ball": repr(radius),
                "n": n,
                "published": int(published),
                "search": f"{_STEPS},{_RESTARTS},{_ATOM_STEPS}",
                "seed": bench.request.seed,
                "dtype": bench.request.dtype,
            }
            seed = derive_seed(purpose="adversarial", **key)
            kind = _published_rows if published else _rows
            rows += part.rows(key, partial(kind, layer, radius, n, seed))
    return rows


# ---- what is measured at one radius and length; a row is a kind, a head and a number


def _rows(layer: Layer, radius: float, n: int, seed: int) -> Iterator[Row]:
    """Give the paper's tokens for every head; for one head ours and the bounds besides."""
    f = layer.attention
    for h in _real(f):
        yield _measured("paper", "two_cluster", f.head(h), h, _clusters(f.head(h), n, radius), seed)
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
    yield _measured("search", found.start, head, _HEAD, found.x, seed)
    biased = f.query_bias is not None
    theirs = (theorem_4_3 if f.causal else theorem_e_3 if biased else theorem_3_3)(head, n, radius)
    for kind, bound in (("upper", best(head, length=n, radius=radius)), ("theirs", theirs)):
        yield {"kind": kind, "name": bound.name, "head": _HEAD, "log_value": bound.log_value}


def _published_rows(layer: Layer, radius: float, n: int, seed: int) -> Iterator[Row]:
    """Give the published tokens, measured right and as the published code does.

    They are the paper's, but for weights that are fused and transposed: then of slices along the wrong axis.
    """
    f = layer.attention
    wrong = wrong_slices(f) if layer.fused else None
    for h in _real(f if wrong is None else wrong):
        head = f.head(h)
        x = _clusters(head if wrong is None else wrong.head(h), n, radius)
        if wrong is not None:
            yield _measured("wrong slices", "two_cluster", head, h, x, seed)
        theirs = power_iteration(head, x, output=True, absolute=True, seed=seed)
        yield {
            "kind": "as published",
            "name": "two_cluster",
            "head": h,
            "value": theirs.value,
            "converged": theirs.settled,
        }


def _real(f: SelfAttention) -> list[int]:
    """List the heads whose A has a real eigenvalue: the others have no clusters."""
    return [h for h, strength in enumerate(strengths(f)) if strength.gamma is not None]


def _clusters(head: SelfAttention, n: int, radius: float) -> Tensor:
    return two_cluster(head, n, radius).x


def _measured(kind: str, name: str, head: SelfAttention, h: int, x: Tensor, seed: int) -> Row:
    found = lipschitz.local_lipschitz(head, x, rtol=_RTOL, seed=seed)
    return {
        "kind": kind,
        "name": name,
        "head": h,
        "value": float(found.value),
        "lower": float(found.lower),
        "upper": float(found.upper),
        "converged": bool(found.converged),
    }


# ---- side by side


def _ball(layer: Layer, radius: float, rows: pd.DataFrame) -> Ball:
    theorem = _THEOREMS[str(rows[rows["kind"] == "theirs"]["name"].iloc[0])]
    return Ball(layer, radius, side_by_side(rows, layer.text, _HEAD), theorem)


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
        paper = values[values["kind"] == "paper"]["value"]
        ours = own[own["kind"].isin(["paper", "search"])]
        here = text[text["n"] == n]
        on_text = here["lipschitz"]
        bounds = part.set_index("kind")["log_value"]
        best = ours.sort_values("value").iloc[-1] if len(ours) else None
        found.append(
            {
                "n": n,
                "text median": on_text.median(),
                "text own": here[here["head"] == head]["lipschitz"].median(),
                "text low": on_text.min(),
                "text high": on_text.max(),
                "paper": _only(own, "paper"),
                "paper median": paper.median(),
                "paper low": paper.min(),
                "paper high": paper.max(),
                "found": math.nan if best is None else best["value"],
                "found by": "" if best is None else best["name"],
                "upper": bounds["upper"],
                "theirs": bounds["theirs"],
                "wrong slices": _only(own, "wrong slices"),
                "as published": _only(own, "as published"),
                "unsettled": int((part["converged"] == False).sum()),  # noqa: E712
            }
        )
    return pd.DataFrame(found)


def _only(rows: pd.DataFrame, kind: str) -> float:
    values = rows[rows["kind"] == kind]["value"]
    return float(values.iloc[0]) if len(values) else math.nan


def show(layers: list[list[Ball]], folder: Path) -> Finding:
    """Draw each layer, and say what is seen in each ball."""
    pictures = [_picture(balls, folder) for balls in layers]
    seen = [words for balls in layers for words in _words(balls)]
    tables = [_shown(ball) for balls in layers for ball in balls]
    caption = "Constants and bounds at every radius and length; medians are over all heads of the layer"
    return Finding(pictures, seen, [(caption, pd.concat(tables, ignore_index=True))])


# ---- the picture


def _picture(balls: list[Ball], folder: Path) -> drawing.Picture:
    first = balls[0].layer
    figure = drawing.canvas(drawing.WIDTH, 3.0)
    axes = figure.subplots(1, len(balls), sharex=True, sharey=True, squeeze=False)[0]
    for axis, ball in zip(axes, balls, strict=True):
        _panel(axis, ball)
        axis.set_xlabel("sequence length $n$")
    tables = pd.concat([ball.table for ball in balls])
    for axis in axes:
        set_axis(axis, "x", tables["n"], whole=True)
        set_axis(axis, "y", _heights(balls))
    axes[0].set_ylabel("local Lipschitz constant")
    figure.suptitle(literal(f"{first.name}, head {_HEAD}"))
    drawing.legend(figure)
    stem = file_stem("adversarial", first.column.spec.label, f"layer-{first.column.layer:02d}")
    spoken = "; ".join(
        f"R = {ball.radius:.4g}: the paper's tokens {_ends(ball.table['paper'])}, the largest found "
        f"{_ends(ball.table['found'])}"
        for ball in balls
    )
    alt = f"{first.name}, head {_HEAD}: constants against the length on log axes, by radius. {spoken}."
    caption = (
        f"{first.name}, head {_HEAD}: the local Lipschitz constant at the paper's two clusters and at "
        "the worst tokens found in the ball of radius R, beside that on text (median, smallest and largest "
        "over sequences and heads). Dashed, the median over all heads of the layer at the paper's tokens, "
        "and shaded from the smallest to the largest. Lines above: upper bounds on the ball. The ball of "
        "real tokens is as large as the longest of them."
    )
    return drawing.picture(figure, folder, stem, f"Section 5.2: {first.name}", alt, caption)


def _heights(balls: list[Ball]) -> pd.Series:
    """List what is to be seen; bounds far above all constants would leave them no room, and may overflow."""
    tables = pd.concat([ball.table for ball in balls])
    names = [*_SERIES, "paper low", "paper high", "text low", "text high"]
    values = tables[names].to_numpy(np.float64).ravel()
    values = values[values > 0]
    bounds = np.concatenate([exp(tables[name]) for name in ("upper", "theirs")])
    return pd.Series(np.concatenate([values, bounds[bounds < 1e3 * values.max(initial=1.0)]]))


def _panel(axis: Axes, ball: Ball) -> None:
    table, n, fit = ball.table, ball.table["n"], ball.fit("found")
    drawing.dots(axis, n, table["found"], (drawing.VIOLET, "o"), "largest found", size=13)
    if not fit.note:
        good = table[table["found"] > 0]
        factor = math.exp(float((np.log(good["found"]) - np.log(good["n"]) / 2).mean()))
        ends = np.array([fit.n_min, fit.n_max], dtype=float)
        label = r"$c\sqrt{n}$, $c$ fitted"
        axis.plot(
            ends,
            factor * np.sqrt(ends),
            color=drawing.VIOLET,
            linestyle=drawing.DOTTED,
            label=label,
            zorder=4,
        )
    drawing.dots(axis, n, table["paper"], (drawing.TEAL, "^"), "the paper's tokens", size=16)
    low, high = table["paper low"], table["paper high"]
    axis.fill_between(n, low, high, color=drawing.TEAL, alpha=0.18, linewidth=0, zorder=1)
    drawing.lines(axis, n, table, [("paper median", drawing.TEAL, drawing.DASHED, "their median over heads")])
    axis.vlines(n, table["text low"], table["text high"], color=drawing.GREY, linewidth=0.8, zorder=3)
    drawing.dots(axis, n, table["text median"], (drawing.GREY, "s"), "on text", size=11)
    bounds = table[["upper", "theirs"]].apply(exp)
    lines = (
        ("upper", "0.15", drawing.SOLID, "howsmooth's bound"),
        ("theirs", drawing.GREY, drawing.DASHDOT, ball.theorem),
    )
    drawing.lines(axis, n, bounds, lines, most=np.finfo(np.float64).max)
    drawing.dots(axis, n, table["wrong slices"], (drawing.ORANGE, "x"), "published tokens", size=16)
    drawing.dots(axis, n, table["as published"], (drawing.ORANGE, "+"), "as published", size=16)
    heading = f"$R = {ball.radius:.4g}$" + (", real tokens" if ball.real else "")
    found, paper = (power_label(ball.fit(name), ends=False) for name in ("found", "paper"))
    axis.set_title(f"{heading}\nfound {found}\npaper's {paper}")


# ---- the words


def _ends(values: pd.Series) -> str:
    there = values.dropna()
    return f"{there.iloc[0]:.3g} to {there.iloc[-1]:.3g}" if len(there) else "not there"


def _words(balls: list[Ball]) -> list[str]:
    said = [_ball_words(ball) for ball in balls]
    published = [ball for ball in balls if ball.table["as published"].notna().any()]
    if published:
        said.append(_published_words(published))
    unsettled = sum(int(ball.table["unsettled"].sum()) for ball in balls)
    if unsettled:
        said.append(f"{balls[0].layer.name}: {unsettled} values did not converge and are left out.")
    return said


def _ball_words(ball: Ball) -> str:
    table = ball.table
    n = table["n"]
    words = f"{ball.layer.name}, head {_HEAD}, R = {ball.radius:.4g}"
    words += " (the norm of the longest real token): " if ball.real else ": "
    if table["paper"].notna().any():
        words += (
            f"at the paper's tokens the constant goes from {_ends(table['paper'])} as n goes from {n.min()} "
            f"to {n.max()}, {power(ball.fit('paper'))}; its median over all heads from "
            f"{_ends(table['paper median'])}. "
        )
    if table["found"].notna().any():
        share = table["found"] / exp(table["upper"])
        words += (
            f"The largest found goes from {_ends(table['found'])}, {power(ball.fit('found'))}, and is "
            f"{between(table['found'] / table['paper'])} times that at the paper's tokens and "
            f"{between(share)} times howsmooth's bound, which none in the ball can exceed"
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
    tables = pd.concat([ball.table for ball in balls])
    words = f"{balls[0].layer.name}, head {_HEAD}, as published: "
    if balls[0].layer.fused:
        words += (
            "the tokens that heads sliced along the wrong axis give have constants "
            f"{between(tables['wrong slices'] / tables['paper'])} times those at the paper's tokens; "
        )
        right = tables["wrong slices"]
    else:
        right = tables["paper"]
    returned = between(tables["as published"] / right)
    words += (
        "the published iteration, with the output in place of the tangent and its absolute stopping, returns "
        f"{returned} times the constant at its tokens, and grows like "
    )
    fits = [f"{power(ball.fit('as published'))} at R = {ball.radius:.4g}" for ball in balls]
    return f"{words}{'; '.join(fits)}."


_NAMES = {
    "n": "n", "text median": "text, median", "paper": "paper's tokens",
    "paper median": "paper's tokens, median", "found": "largest found",
    "found by": "found by", "upper": "at most",
}  # fmt: skip


def _shown(ball: Ball) -> pd.DataFrame:
    table = ball.table.assign(upper=exp(ball.table["upper"]))
    names = dict(_NAMES)
    if np.isfinite(table["theirs"]).any():
        table = table.assign(theirs=exp(table["theirs"]))
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
        "howsmooth finds in the same ball, on real text of the same length, and upper bounds on the ball, "
        "which no tokens can exceed."
    ),
    measure=measure,
    show=show,
)
