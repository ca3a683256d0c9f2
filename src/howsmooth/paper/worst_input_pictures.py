"""Draw and describe the constants of Section 5.2: at the paper's worst inputs, on text, and found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.paper import plotting
from howsmooth.paper.exponent_text import between, exp, power, power_label
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.results.drawing import literal
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.words import file_stem, readable

__all__ = ["HEAD", "show"]

HEAD = 0
"""The head that is attacked."""

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
    return f"{readable(str(rows['model'].iloc[0]))}, layer {rows['layer'].iloc[0]}, head {HEAD}"


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
    root = (r"$c\sqrt{n}$, $c$ fitted", plotting.VIOLET, plotting.DOTTED)
    shades = {name: (rows[f"{name} low"], rows[f"{name} high"]) for name in ("paper", "text")}
    dashed: dict[str, Any] = {"dashes": plotting.DASHED, "spread": shades["paper"]}
    curves = [
        Curve(n, rows["found"], "largest found", plotting.VIOLET, "o", size=13),
        *plotting.with_slope(rows, "n", "found", 0.5, *root),
        Curve(n, rows["paper"], "the paper's tokens", plotting.TEAL, "^", size=16),
        Curve(n, rows["paper median"], "their median over heads", plotting.TEAL, **dashed),
        Curve(n, rows["text median"], "on text", plotting.GREY, "s", size=11, spread=shades["text"]),
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
        if rows[name].notna().any():
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
    paper, found = (bool(rows[name].notna().any()) for name in ("paper", "found"))
    worst = rows["found" if found else "paper"]
    words = f"{_name(rows)}, R = {rows['R'].iloc[0]:.4g}"
    words += " (the norm of the longest real token): " if real else ": "
    if paper:
        words += (
            f"at the paper's tokens the constant goes from {_ends(rows['paper'])} as n goes from {n.min()} "
            f"to {n.max()}, {power(_fit(rows, 'paper'))}; its median over all heads from "
            f"{_ends(rows['paper median'])}. "
        )
    if found:
        words += f"{'The' if paper else 'the'} largest found goes from {_ends(worst)}, "
        words += f"{power(_fit(rows, 'found'))}, and is "
        words += f"{between(worst / rows['paper'])} times that at the paper's tokens and " if paper else ""
    elif paper:
        words += "It is "
    else:
        words += f"howsmooth's bound is {between(exp(rows['upper']))}; --search looks for the worst tokens. "
    if found or paper:
        words += f"{between(worst / exp(rows['upper']))} times howsmooth's bound, which none in the ball can "
        words += "exceed"
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
        words += "."
        if found or paper:
            ratio = between(worst[text.index] / text["text own"])
            what = "largest found" if found else "constant at the paper's tokens"
            words += f" In head {HEAD} the {what} is {ratio} times the median on text."
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
