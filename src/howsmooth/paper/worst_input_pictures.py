"""Draw and describe the constants of Section 5.2: at the paper's worst inputs, on text, and from a search."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.paper import plotting
from howsmooth.paper.bound_ratios import display_name
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Values
from howsmooth.paper.plotting import Curve, Panel, between, exponentials, power, power_label
from howsmooth.results.drawing import literal
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.words import file_stem, readable, sentence

__all__ = ["HEAD", "show", "side_by_side"]

HEAD = 0
"""The head that is attacked."""

_SATURATED = 0.01
_NAMES = {
    "text median": "text, median", "paper": "paper's tokens", "paper median": "paper's tokens, median",
    "found": "largest found", "found by": "found by", "upper": "at most",
}  # fmt: skip


def side_by_side(rows: pd.DataFrame, text: pd.DataFrame, head: int) -> Values:
    """Combine the constants and bounds of one head, in one ball at one length, into one row. ``rows`` are
    those in the ball, ``text`` the converged measurements on text.

    The constants are ``paper`` at the paper's tokens, ``wrong slices`` at the published code's, ``as
    published`` as that code computes it, and after a search ``found``, the largest known, ``found by`` the
    search or a construction. ``upper`` and ``theirs`` are logarithms of howsmooth's and the paper's bound.
    ``median``, ``low`` and ``high`` are over all heads, ``text own`` is the median on text of the one head.
    ``unsettled`` values did not converge and are left out. Missing values are NaN or None.
    """
    values = rows[rows["converged"] == True]  # noqa: E712
    own = values[values["head"] == head]
    by_kind = own.groupby("kind")["value"].first()
    bounds = rows.drop_duplicates("kind").set_index("kind").reindex(["upper", "theirs"])
    theorem = bounds.loc["theirs", "name"]
    searched = ["paper", "search"] if (rows["kind"] == "search").any() else []
    worst = own[own["kind"].isin(searched)].sort_values("value").tail(1)
    every = {"text": text["lipschitz"], "paper": values[values["kind"] == "paper"]["value"]}
    return (
        {f"{of} {end}": one for of, all_of in every.items() for end, one in _span(all_of).items()}
        | {kind: by_kind.get(kind, math.nan) for kind in ("paper", "wrong slices", "as published")}
        | {
            "text own": text[text["head"] == head]["lipschitz"].median(),
            "found": worst["value"].max(),
            "found by": "".join(worst["name"]) or None,
            "upper": bounds.loc["upper", "log_value"],
            "theirs": bounds.loc["theirs", "log_value"],
            "theorem": display_name(theorem) if isinstance(theorem, str) else None,
            "unsettled": int((rows["converged"] == False).sum()),  # noqa: E712
        }
    )


def _span(values: pd.Series) -> Values:
    return {"median": values.median(), "low": values.min(), "high": values.max()}


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the constants and bounds of each layer against n, a panel for each ball, and describe them."""
    layers = [part for _, part in rows.groupby(["model", "layer"], sort=False)]
    names = _NAMES | {"wrong slices": "published tokens"}
    shown = rows.assign(upper=exponentials(rows["upper"])).rename(columns=names)
    for theorem, theirs in rows.groupby("theorem", sort=False)["theirs"]:
        shown[theorem] = exponentials(theirs.where(np.isfinite(theirs)))
    theorems = rows["theorem"].dropna().unique()
    columns = ["model", "layer", "head", "R", "n", *_NAMES.values(), *theorems, "published tokens"]
    table = shown[[*columns, "as published"]].dropna(axis=1, how="all")
    caption = "Constants and bounds at every radius and length; medians are over all heads of the layer"
    seen = [words for part in layers for words in _result_sentences(part)]
    return Finding([_picture(part, folder) for part in layers], seen, [(caption, table)])


def _balls(rows: pd.DataFrame) -> list[pd.DataFrame]:
    return [part for _, part in rows.groupby("R", sort=False)]


def _name(rows: pd.DataFrame) -> str:
    return f"head {HEAD} of layer {rows['layer'].iloc[0]} of {readable(str(rows['model'].iloc[0]))}"


def _fit(rows: pd.DataFrame, name: str) -> Exponent:
    values = rows[name].to_numpy(np.float64)
    return fit_exponent(rows["n"].to_numpy(), values, np.isfinite(values))


def _picture(rows: pd.DataFrame, folder: Path) -> plotting.Picture:
    canvas, _ = plotting.draw_panels([list(map(_panel, _balls(rows)))], 3.0, sharey=True)
    canvas.suptitle(literal(sentence(_name(rows)).removesuffix(".")))
    stem = file_stem("adversarial", str(rows["model"].iloc[0]), f"layer-{rows['layer'].iloc[0]:02d}")
    return plotting.write_picture(canvas, folder, stem, f"Section 5.2: {_name(rows)}")


def _panel(rows: pd.DataFrame) -> Panel:
    n, bounds = rows["n"], rows[["upper", "theirs"]].apply(exponentials)
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
    """Return sentences on each ball of one layer, on the published code, and on unconverged values."""
    said = [_ball_words(ball) for ball in _balls(rows)]
    papers = rows.pivot_table(index="R", columns="n", values="paper")
    moves = ((papers / papers.max() - 1).abs() > _SATURATED).any(axis=1)
    still = papers.index[~moves[::-1].cummax()[::-1]]
    if len(still) > 1:
        words = f"from R = {still[0]:.4g} to {still[-1]:.4g} it changes by less than {_SATURATED:.0%}"
        said.append(f"The constant of {_name(rows)} at the paper's tokens has saturated: {words}.")
    if rows["as published"].notna().any():
        fused = bool(rows["fused"].all())
        right = rows["wrong slices" if fused else "paper"]
        words = f"the published iteration returns {between(rows['as published'] / right)} times the constant "
        words += "at its tokens"
        if fused:
            words += ", of heads sliced along the wrong axis; the constant there is "
            words += f"{between(right / rows['paper'])} times that at the paper's tokens"
        said.append(sentence(f"{_name(rows)}, as published: {words}"))
    if rows["unsettled"].any():
        said.append(f"Of {_name(rows)}, {rows['unsettled'].sum()} values did not converge and are left out.")
    return said


def _ball_words(rows: pd.DataFrame) -> str:
    upper, words = exponentials(rows["upper"]), []
    for name, what in (("paper", "at the paper's tokens"), ("found", "at the worst tokens found")):
        if rows[name].notna().any():
            share = between(rows[name] / upper)
            words.append(
                f"the constant of {_name(rows)} {what} is {between(rows[name])}, grows like "
                f"{power(_fit(rows, name))}, and is {share} times howsmooth's upper bound on the ball"
            )
    if not words:
        words.append(f"howsmooth's upper bound for {_name(rows)} is {between(upper)}")
    ball = f"In the ball of radius {rows['R'].iloc[0]:.4g}"
    if rows["real"].all():
        ball += ", the norm of the longest real token"
        if rows["text median"].notna().any():
            words.append(f"on text the median over sequences and heads is {between(rows['text median'])}")
    return f"{ball}, {'; '.join(words)}."
