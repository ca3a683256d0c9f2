"""Appendix C.7: measure attention at tokens where its constant grows like the squared radius R²."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from howsmooth import bounds, lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.errors import ArgumentError
from howsmooth.paper import plotting
from howsmooth.paper.balanced_tokens import balanced_direction
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench, Key, Unit, Values
from howsmooth.paper.identity_head import identity_head
from howsmooth.paper.model_with_texts import ModelWithTexts, attention_of, models_of
from howsmooth.paper.plotting import Curve, Panel, between, exponentials
from howsmooth.results.drawing import literal
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import fit_exponent
from howsmooth.words import decimal, readable

__all__ = ["FAR", "IDENTITY", "exponents_in_radius", "lengths_from_3", "measure", "show"]

IDENTITY = "A = V = I"  # the name of the first panel's model, which is one head in four dimensions
FAR = 300.0  # the smallest ‖A‖R² in the fits of the growth
_MOST_LENGTHS = 4
# The values of ‖A‖R². The constant is quadratic in R from about 10 on, or from about 100 with a causal mask.
_STRENGTHS = tuple(10 ** (-0.8 + 0.32 * step) for step in range(16))
_RTOL = 1e-6


def measure(bench: Bench) -> pd.DataFrame:
    """Measure heads at the tokens of Appendix C.7; the table has a row for each head, length and radius.

    The head with A = V = I is measured at every length, the heads of the models at the longest one.
    """
    lengths = lengths_from_3(bench.lengths)
    units = []
    for n in lengths:
        key: Key = {"model": IDENTITY, "layer": 0, "head": 0, "seed": bench.options.seed, "n": n}
        units.append(Unit(key, partial(_rows, identity_head(1.0), key, None), f"{IDENTITY}, n = {n}"))
    for model in models_of(bench, lengths=(64,), fitting=True):
        for layer in model.layers:
            units += _of_layer(model, layer, max(lengths))
    return bench.kept(units)


def lengths_from_3(asked: tuple[int, ...]) -> list[int]:
    """Return at most four of the requested lengths of at least 3, spread evenly over their sorted list."""
    there = sorted(n for n in asked if n >= 3)
    if not there:
        expected = "some of at least 3: a zero and a pair ±Ru"
        raise ArgumentError("lengths", expected=expected, got=str(max(asked)))
    places = torch.linspace(0, len(there) - 1, min(_MOST_LENGTHS, len(there))).round().int().tolist()
    return [there[place] for place in places]


def _of_layer(model: ModelWithTexts, layer: int, n: int) -> Iterator[Unit]:
    sites = [model.sites(*place, layers=[layer])[0] for place in model.places()]
    f = attention_of(sites[0], model.label, bilinear=True)
    squares = [float((site.radius_mean**2).mean()) for site in sites]
    radius = math.sqrt(sum(squares) / len(squares))  # the norm of real tokens
    digests = "; ".join(one.text.digest for one in model.subjects)
    for h in range(f.heads):
        key = model.key(texts=digests, layer=layer, head=h, n=n, samples=model.plan.samples)
        words = f"{model.label}, layer {layer}, head {h}, n = {n}"
        yield Unit(key, partial(_rows, f.head(h), key, radius), words)


def _rows(f: SelfAttention, key: Key, real: float | None) -> Iterator[Values]:
    """Yield a row for each radius R: the constant of a head, and logarithms of upper bounds on the ball."""
    n, parameters = int(key["n"] or 0), parameters_of(f)
    head = parameters.one_head("quadratic growth")
    norm, tokens = head.A_norm, balanced_direction(head)
    sharp, paper, free = bounds.ball_upper_bound, bounds.theorem_3_3, bounds.mean_field_upper_bound
    if parameters.masking == "causal":
        sharp, paper = bounds.causal_ball_upper_bound, bounds.theorem_4_3
        free = bounds.causal_mean_field_upper_bound
    radii = [math.sqrt(strength / norm) for strength in _STRENGTHS]
    for radius in radii if real is None else [*radii, real]:
        start = derive_seed(purpose="quadratic growth", radius=repr(radius), **key)
        found = lipschitz.local_lipschitz(f, tokens.tokens(n, radius), rtol=_RTOL, seed=start)
        yield {
            "radius": radius,
            "real": radius == real,
            "strength": norm * radius**2,
            "value": float(found.value),
            "converged": bool(found.converged),
            "formula": tokens.formula(n, radius),
            "log_sharp": sharp(parameters, n, radius).log_value,
            "log_paper": paper(parameters, n, radius).log_value,
            "log_free": free(parameters, radius).log_value,
        }


def exponents_in_radius(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit a power of R for each head and length, at the radii where ‖A‖R² is at least :data:`FAR`."""
    names = ["model", "layer", "head", "n"]
    found = []
    for key, part in rows[~rows["real"].astype(bool)].groupby(names, sort=False):
        far = part[part["strength"] >= FAR]
        radius, value = (far[name].to_numpy(np.float64) for name in ("radius", "value"))
        fit = fit_exponent(radius, value, far["converged"].to_numpy(bool))
        ends = {"exponent": fit.slope, "low": fit.low, "high": fit.high, "points": fit.n_points}
        found.append(dict(zip(names, key, strict=True)) | ends)
    return pd.DataFrame(found)


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the constants of the heads of each layer against R, fit powers of R, and describe the results."""
    table = exponents_in_radius(rows)
    parts, panels, seen = [], [], []
    for (model, layer), part in rows.groupby(["model", "layer"], sort=False):
        fits = table[(table["model"] == model) & (table["layer"] == layer)].dropna(subset="exponent")
        ends = dict.fromkeys(decimal(end, 2) for end in fits["exponent"].agg(["min", "max"]) if len(fits))
        name = readable(str(model)) + ("" if model == IDENTITY else f", layer {layer}")
        exponents = " to ".join(f"$R^{{{end}}}$" for end in ends)
        panel = _identity_panel if model == IDENTITY else _heads_panel
        panels.append(panel(part, f"{literal(name)}: {exponents or 'no exponent'}"))
        parts.append(name)
        seen.append(f"{name}, {_result_sentences(part, ' to '.join(ends))}")
    sheet = [row for _, row in plotting.sheets(panels, 2)]
    canvas, _ = plotting.draw_panels(sheet, 0.7 + 2.1 * len(sheet))
    picture = plotting.write_picture(canvas, folder, "quadratic-growth", f"Appendix C.7: {'; '.join(parts)}")
    return Finding([picture], seen, [(f"Exponents in R, where ‖A‖R² is at least {FAR:g}", table)])


def _result_sentences(rows: pd.DataFrame, exponents: str) -> str:
    converged = rows["converged"].astype(bool)
    words = (
        f"n = {between(rows['n'], '{:.0f}')}: where ‖A‖R² is at least {FAR:g} the constant grows like R to "
        f"the power {exponents or 'that could not be fitted'} over {rows['head'].nunique()} heads"
    )
    far = rows[converged & (rows["strength"] >= FAR)]
    if len(far) and rows["model"].iloc[0] == IDENTITY:
        off = float((far["value"] / far["formula"] - 1).abs().max())
        words += f", and differs from the formula by a share of at most {off:.1g}"
    real = rows[rows["real"].astype(bool) & converged]
    if len(real):
        words += (
            f"; at the norm of real tokens, R = {real['radius'].iloc[0]:.4g}, the balanced tokens give "
            f"constants from {between(real['value'])}"
        )
    hollow = int((~converged).sum())
    return words + (f". {hollow} measurements did not converge and are not fitted." if hollow else ".")


def _identity_panel(rows: pd.DataFrame, title: str) -> Panel:
    longest = rows[rows["n"] == rows["n"].max()].sort_values("radius")
    logs = longest.filter(like="log_").apply(exponentials)
    top = 3 * float(logs["log_sharp"].max())
    n = longest["n"].iloc[0]
    curves = plotting.lines(
        longest["radius"],
        logs[logs <= 1e3 * top],
        ("log_sharp", plotting.BLACK, plotting.SOLID, f"howsmooth's bound, $n = {n}$"),
        ("log_paper", plotting.GREY, plotting.DASHDOT, f"Theorem 3.3, $n = {n}$"),
        ("log_free", plotting.GREY, plotting.DOTTED, "bound for every $n$"),
    )
    curves.append(Curve(longest["radius"], [top] * len(longest)))  # room for the bounds
    for (length, part), (colour, mark) in zip(rows.groupby("n"), plotting.LOOKS, strict=False):
        label, radius = f"measured, and formula, $n = {length}$", part["radius"]
        curves.append(Curve(radius, part["formula"], "", colour, dashes=plotting.DASHED, spans=False))
        curves.append(Curve(radius, part["value"], label, colour, mark, filled=part["converged"]))
    return Panel(curves, title, "radius $R$", scales=("log", "log"))


def _heads_panel(rows: pd.DataFrame, title: str) -> Panel:
    free = rows[~rows["real"].astype(bool)]
    far = free[(free["strength"] >= FAR) & free["converged"]]
    look = ("a head", plotting.VIOLET, "o", plotting.SOLID, 2, 0.75)
    curves = [Curve(part["radius"], part["value"], *look) for _, part in free.groupby("head")]
    curves += plotting.with_slope(far, "radius", "value", 2, "$c\\,R^2$, $c$ fitted", plotting.RED)
    real = rows["radius"][rows["real"].astype(bool)].unique()
    title += f", n = {rows['n'].iloc[0]}"
    return Panel(curves, title, "radius $R$", scales=("log", "log"), verticals=real.tolist())
