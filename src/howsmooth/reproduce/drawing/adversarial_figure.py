"""Section 5.2, drawn from its studies and units: one head at its worst inputs; nothing here measures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from howsmooth.reproduce.drawing.paper import PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.reproduce.words import power, ratio
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.study.figures.style import GREY, literal, new_figure, set_axis
from howsmooth.study.names import decimal, file_stem, readable
from howsmooth.study.store import Store

__all__ = ["Ball", "draw", "side_by_side"]

_FOUND, _PAPER, _PUBLISHED, _TEXT = "#440154", "#21918c", "#e07b00", "#7f7f7f"
_THEIRS, _MEDIAN, _ROOT = (0.0, (6.0, 1.5, 1.0, 1.5)), (0.0, (4.0, 2.0)), (0.0, (1.0, 1.2))
_THEOREMS = {"theorem_3_3": "Theorem 3.3", "theorem_e_3": "Theorem E.3", "theorem_4_3": "Theorem 4.3"}
_SERIES = ("paper", "found", "wrong slices", "as published")
_LARGEST = 700.0  # a logarithm whose number does not overflow


@dataclass(frozen=True, eq=False)
class Ball:
    """One layer of one model at one radius.

    Attributes
    ----------
    model, layer, head
        What it is; the head is the one that is attacked.
    radius, real
        Of the ball, and whether it is the norm of the longest real token.
    table
        One row a length: constants of that head at the paper's tokens (``paper``), at the worst that were
        found (``found``), at the published tokens (``wrong slices``) and as the published code computes it
        (``as published``); logarithms of bounds (``upper``, ``theirs``); over all heads
        ``paper median``, ``paper low``, ``paper high``, and on text ``text median``, ``text low``,
        ``text high`` (``text own``: the median of that head alone). NaN where there is none.
    theorem
        The paper's that gives ``theirs``.
    fits
        The powers of n fitted to ``paper``, ``found``, and what was published.

    """

    model: str
    layer: int
    head: int
    radius: float
    real: bool
    table: pd.DataFrame
    fits: dict[str, Exponent]
    theorem: str

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{readable(self.model)}, layer {self.layer}"


def draw(folder: Path) -> Finding:
    """Draw the figures from what ``folder`` holds, and say what is seen in them.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    pictures, seen, tables = [], [], []
    for column in note["columns"]:
        balls = _read(folder, column, note)
        with rc_context(PAPER):
            pictures.append(_picture(balls, folder))
        seen += _words(balls, fused=column["fused"])
        tables += [_shown(ball) for ball in balls]
    caption = "Constants and bounds at every radius and length; medians are over all heads of the layer"
    made = [(what, words) for what, words in note["made"]]
    return Finding(pictures, seen, [(caption, pd.concat(tables, ignore_index=True))], made)


# ---- reading


def _read(folder: Path, column: dict[str, Any], note: dict[str, Any]) -> list[Ball]:
    with Store.open(folder / column["store"], write=False) as store:
        text = store.measurements()
    text = text[
        text["text"].isin(note["texts"])
        & text["n"].isin(column["text_lengths"])
        & (text["sample"] < note["samples"])
        & text["converged"]
    ]
    rows = Kept(folder / "units").table(column["units"])
    rows["ball"] = rows["ball"].astype(float)
    balls = []
    for radius, part in rows.groupby("ball", sort=False):
        table = side_by_side(part, text, note["head"])
        balls.append(
            Ball(
                model=column["model"],
                layer=column["layer"],
                head=note["head"],
                radius=float(str(radius)),
                real=float(str(radius)) == column["radius"],
                table=table,
                fits={name: _fit(table, name) for name in _SERIES},
                theorem=_THEOREMS[str(part[part["kind"] == "theirs"]["name"].iloc[0])],
            )
        )
    return balls


def _fit(table: pd.DataFrame, name: str) -> Exponent:
    values = table[name].to_numpy(np.float64)
    return fit_exponent(table["n"].to_numpy(), values, np.isfinite(values))


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
        As :attr:`Ball.table`, with ``found by`` and ``unsettled``, the number of values that did not converge
        and are left out.

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


# ---- the picture


def _picture(balls: list[Ball], folder: Path) -> Picture:
    first = balls[0]
    figure = new_figure(WIDTH, 3.0)
    axes = figure.subplots(1, len(balls), sharex=True, sharey=True, squeeze=False)[0]
    for axis, ball in zip(axes, balls, strict=True):
        _panel(axis, ball)
        axis.set_xlabel("sequence length $n$")
    tables = pd.concat([ball.table for ball in balls])
    for axis in axes:
        set_axis(axis, "x", tables["n"], whole=True)
        set_axis(axis, "y", _heights(balls))
    axes[0].set_ylabel("local Lipschitz constant")
    figure.suptitle(literal(f"{first.name}, head {first.head}"))
    figure.legend(handles=_handles(balls), loc="outside lower center", ncols=4, handlelength=2.2)
    stem = file_stem("adversarial", first.model, f"layer-{first.layer:02d}")
    pdf, png = save_picture(figure, folder, stem, f"Section 5.2: {first.name}")
    spoken = "; ".join(
        f"R = {ball.radius:.4g}: the paper's tokens {_ends(ball.table['paper'])}, the largest found "
        f"{_ends(ball.table['found'])}"
        for ball in balls
    )
    alt = f"{first.name}, head {first.head}: constants against the length on log axes, by radius. {spoken}."
    caption = (
        f"{first.name}, head {first.head}: the local Lipschitz constant at the paper's two clusters and at "
        "the worst tokens found in the ball of radius R, beside that on text (median, smallest and largest "
        "over sequences and heads). Dashed, the median over all heads of the layer at the paper's tokens, "
        "and shaded from the smallest to the largest. Lines above: upper bounds on the ball. The ball of "
        "real tokens is as large as the longest of them."
    )
    return Picture(pdf, png, alt, caption)


def _heights(balls: list[Ball]) -> pd.Series:
    """List what is to be seen; bounds far above all constants would leave them no room, and may overflow."""
    tables = pd.concat([ball.table for ball in balls])
    names = [*_SERIES, "paper low", "paper high", "text low", "text high"]
    values = tables[names].to_numpy(np.float64).ravel()
    values = values[values > 0]
    logs = tables[["upper", "theirs"]].to_numpy(np.float64).ravel()
    near = logs[logs < math.log(1e3 * values.max(initial=1.0))]
    return pd.Series(np.concatenate([values, np.exp(near)]))


def _panel(axis: Axes, ball: Ball) -> None:
    table, n = ball.table, ball.table["n"]
    for name, style, colour in (("upper", "solid", "0.15"), ("theirs", _THEIRS, GREY)):
        logs = table[name].to_numpy(np.float64)
        shown = logs < _LARGEST
        axis.plot(n[shown], np.exp(logs[shown]), linestyle=style, color=colour, linewidth=0.9, zorder=2)
    axis.fill_between(
        n, table["paper low"], table["paper high"], color=_PAPER, alpha=0.18, linewidth=0, zorder=1
    )
    axis.plot(n, table["paper median"], color=_PAPER, linestyle=_MEDIAN, linewidth=0.9, zorder=2)
    text = table[table["text median"].notna()]
    axis.vlines(text["n"], text["text low"], text["text high"], color=_TEXT, linewidth=0.8, zorder=3)
    axis.scatter(text["n"], text["text median"], s=11, marker="s", color=_TEXT, linewidths=0, zorder=3)
    axis.scatter(n, table["paper"], s=16, marker="^", color=_PAPER, linewidths=0, zorder=5)
    axis.scatter(n, table["found"], s=13, marker="o", color=_FOUND, linewidths=0, zorder=5)
    for name, marker in (("wrong slices", "x"), ("as published", "+")):
        axis.scatter(n, table[name], s=16, marker=marker, color=_PUBLISHED, linewidths=0.9, zorder=6)
    fit = ball.fits["found"]
    if not fit.note:
        good = table[table["found"] > 0]
        factor = math.exp(float((np.log(good["found"]) - np.log(good["n"]) / 2).mean()))
        ends = np.array([fit.n_min, fit.n_max], dtype=float)
        axis.plot(ends, factor * np.sqrt(ends), color=_FOUND, linestyle=_ROOT, linewidth=0.9, zorder=4)
    heading = f"$R = {ball.radius:.4g}$" + (", real tokens" if ball.real else "")
    axis.set_title(f"{heading}\nfound {_power(fit)}\npaper's {_power(ball.fits['paper'])}")


def _power(fit: Exponent) -> str:
    return "no exponent" if fit.note else f"$n^{{{decimal(fit.slope, 2)}}}$"


def _handles(balls: list[Ball]) -> list[Line2D]:
    def point(colour: str, marker: str, words: str) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, markersize=3.8, linestyle="none", label=words)

    handles = [
        point(_FOUND, "o", "largest found"),
        Line2D([], [], color=_FOUND, linestyle=_ROOT, linewidth=0.9, label=r"$c\sqrt{n}$, $c$ fitted"),
        point(_PAPER, "^", "the paper's tokens"),
        Line2D([], [], color=_PAPER, linestyle=_MEDIAN, linewidth=0.9, label="their median over heads"),
        point(_TEXT, "s", "on text"),
        Line2D([], [], color="0.15", linewidth=0.9, label="howsmooth's bound"),
    ]
    tables = pd.concat([ball.table for ball in balls])
    if np.isfinite(tables["theirs"]).any():
        line = Line2D([], [], color=GREY, linestyle=_THEIRS, linewidth=0.9, label=balls[0].theorem)
        handles.append(line)
    if tables["wrong slices"].notna().any():
        handles.append(point(_PUBLISHED, "x", "published tokens"))
    if tables["as published"].notna().any():
        handles.append(point(_PUBLISHED, "+", "as published"))
    return handles


# ---- the words


def _ends(values: pd.Series) -> str:
    there = values.dropna()
    return f"{there.iloc[0]:.3g} to {there.iloc[-1]:.3g}" if len(there) else "not there"


def _span(values: pd.Series) -> str:
    there = values.dropna()
    low, high = ratio(float(there.min())), ratio(float(there.max()))
    return low if low == high else f"{low} to {high}"


def _exp(logs: pd.Series) -> pd.Series:
    """Give numbers of their logarithms, infinite where they overflow."""
    values = logs.to_numpy(np.float64)
    return pd.Series(np.where(values > _LARGEST, math.inf, np.exp(np.minimum(values, _LARGEST))), logs.index)


def _words(balls: list[Ball], *, fused: bool) -> list[str]:
    said = [_ball_words(ball) for ball in balls]
    first = balls[0]
    published = [ball for ball in balls if ball.table["as published"].notna().any()]
    if published:
        said.append(_published_words(published, fused=fused))
    unsettled = sum(int(ball.table["unsettled"].sum()) for ball in balls)
    if unsettled:
        said.append(f"{first.name}: {unsettled} values did not converge and are left out.")
    return said


def _ball_words(ball: Ball) -> str:
    table = ball.table
    n = table["n"]
    words = f"{ball.name}, head {ball.head}, R = {ball.radius:.4g}"
    words += " (the norm of the longest real token): " if ball.real else ": "
    if table["paper"].notna().any():
        words += (
            f"at the paper's tokens the constant goes from {_ends(table['paper'])} as n goes from {n.min()} "
            f"to {n.max()}, {power(ball.fits['paper'])}; its median over all heads from "
            f"{_ends(table['paper median'])}. "
        )
    if table["found"].notna().any():
        share = table["found"] / _exp(table["upper"])
        words += (
            f"The largest found goes from {_ends(table['found'])}, {power(ball.fits['found'])}, and is "
            f"{_span(table['found'] / table['paper'])} times that at the paper's tokens and {_span(share)} "
            "times howsmooth's bound, which none in the ball can exceed"
        )
        if np.isfinite(table["theirs"]).all():
            theirs = _exp(table["theirs"] - table["upper"])
            words += f"; {ball.theorem} is {_span(theirs)} times that bound"
        words += ". "
    text = table[table["text median"].notna()]
    if ball.real and len(text):
        words += (
            f"On text of the same lengths the median constant of a head is {_span(text['text median'])}; the "
            f"median over heads at the paper's tokens is {_span(text['paper median'] / text['text median'])} "
            f"times as large. In head {ball.head} the largest found is "
            f"{_span(text['found'] / text['text own'])} times the median on text."
        )
    return words.strip()


def _published_words(balls: list[Ball], *, fused: bool) -> str:
    tables = pd.concat([ball.table for ball in balls])
    words = f"{balls[0].name}, head {balls[0].head}, as published: "
    if fused:
        words += (
            "the tokens that heads sliced along the wrong axis give have constants "
            f"{_span(tables['wrong slices'] / tables['paper'])} times those at the paper's tokens; "
        )
        right = tables["wrong slices"]
    else:
        right = tables["paper"]
    returned = _span(tables["as published"] / right)
    words += (
        "the published iteration, with the output in place of the tangent and its absolute stopping, returns "
        f"{returned} times the constant at its tokens, and grows like "
    )
    fits = [f"{power(ball.fits['as published'])} at R = {ball.radius:.4g}" for ball in balls]
    return f"{words}{'; '.join(fits)}."


def _shown(ball: Ball) -> pd.DataFrame:
    table = ball.table
    shown = pd.DataFrame(
        {
            "model": ball.model,
            "layer": ball.layer,
            "head": ball.head,
            "R": ball.radius,
            "n": table["n"],
            "text, median": table["text median"],
            "paper's tokens": table["paper"],
            "paper's tokens, median": table["paper median"],
            "largest found": table["found"],
            "found by": table["found by"],
            "at most": _exp(table["upper"]),
        }
    )
    if np.isfinite(table["theirs"]).any():
        shown[ball.theorem] = _exp(table["theirs"])
    for name, words in (("wrong slices", "published tokens"), ("as published", "as published")):
        if table[name].notna().any():
            shown[words] = table[name]
    return shown
