"""Appendix C.7: measure the constant of attention at tokens where the constant grows like the squared radius
R².
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth import lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.bounds import (
    ball_upper_bound,
    causal_ball_upper_bound,
    causal_mean_field_upper_bound,
    mean_field_upper_bound,
    theorem_3_3,
    theorem_4_3,
)
from howsmooth.bounds.attention_parameters import Head, parameters_of
from howsmooth.errors import ArgumentError
from howsmooth.paper import plotting
from howsmooth.paper.exponent_text import between, exp
from howsmooth.paper.figure_definition import Figure, FigureContext, FigurePlan, Finding
from howsmooth.paper.figure_tasks import Key, UnitTask, Values
from howsmooth.paper.model_with_texts import PreparedModel, bilinear, prepared_models
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.paper.proposition_3_6_two_diracs import identity_head
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.results.drawing import literal
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import fit_exponent
from howsmooth.words import decimal, readable

__all__ = [
    "FAR",
    "IDENTITY",
    "QUADRATIC_GROWTH",
    "Balanced",
    "balanced",
    "exponents_in_radius",
    "plan",
    "show",
]

IDENTITY = "A = V = I"
"""The name of the first panel's model, which is one head in four dimensions."""

FAR = 300.0
"""The smallest ‖A‖R² in the fits of the growth."""

_LENGTHS = (3, 11, 101)
_MOST_LENGTHS = 4
_SAMPLES = 8
# The values of ‖A‖R². The constant is quadratic in R from about 10 on, or from about 100 with a causal mask.
_STRENGTHS = tuple(10 ** (-0.8 + 0.32 * step) for step in range(16))
_RTOL = 1e-6


@dataclass(frozen=True, eq=False)
class Balanced:
    """The tokens of Appendix C.7 for one head: pairs of opposite tokens Ru and −Ru, and one or two zero
    tokens. Here u is a unit vector and R is the radius.

    There are two zero tokens if the number of tokens is even, and one otherwise. The last token is zero. Its
    attention weights are equal, with or without a causal mask and for every query bias, because u is
    orthogonal to the bias.
    """

    head: Head
    u: Float64[Tensor, " d"]

    def tokens(self, n: int, radius: float) -> Float64[Tensor, "n d"]:
        """Return n tokens of shape (n, d): pairs of opposite tokens of norm ``radius``, and then one or two
        zero tokens.
        """
        pairs = (n - 1) // 2
        signs = torch.zeros(n, dtype=torch.float64)
        signs[: 2 * pairs : 2], signs[1 : 2 * pairs : 2] = 1.0, -1.0
        return radius * signs[:, None] * self.u

    def formula(self, n: int, radius: float) -> float:
        """Compute a lower bound on ‖D_X f‖ at the tokens of Appendix C.7: the norm of the diagonal block
        ∂y_n/∂x_n of the last token.

        The norm is ‖V(I/n + (m/n)R² u(Aᵀu)ᵀ)‖, where m of the n tokens are ±Ru. For A = γI, V = I and odd n
        it is 1/n + γR²(n−1)/n.
        """
        head, m = self.head, 2 * ((n - 1) // 2)
        form = (self.u @ head.left) @ head.right
        block = head.V / n + (m / n * radius**2) * torch.outer(head.V @ self.u, form)
        return float(torch.linalg.matrix_norm(block, 2))


def balanced(head: Head) -> Balanced:
    """Choose the direction u of the tokens of Appendix C.7 so that the constant of a head is large at these
    tokens.

    The candidates for u are two left singular vectors of the head's score matrix A and two right singular
    vectors of its value matrix V; their component along the query bias is removed. The candidate with the
    largest ‖Vu‖ ‖Aᵀu‖ is chosen.

    Raises
    ------
    ArgumentError
        If scores or values are zero along all of these vectors.

    """
    left, right = torch.linalg.qr(head.left), torch.linalg.qr(head.right.mT)
    inner = torch.linalg.svd(left.R @ right.R.mT)
    candidates = torch.cat([(left.Q @ inner.U)[:, :2], torch.linalg.svd(head.V).Vh[:2].mT], dim=1).mT
    if bool(head.b.any()):
        unit = head.b / torch.linalg.vector_norm(head.b)
        candidates = candidates - torch.outer(candidates @ unit, unit)
    sizes = torch.linalg.vector_norm(candidates, dim=1)
    candidates = candidates[sizes > 1e-6] / sizes[sizes > 1e-6, None]
    gains = torch.linalg.vector_norm(candidates @ head.V.mT, dim=1) * torch.linalg.vector_norm(
        candidates @ head.left @ head.right, dim=1
    )
    if not len(gains) or not float(gains.max()) > 0:
        raise ArgumentError("model", expected="heads whose scores and values are not zero", got=repr(head))
    return Balanced(head, candidates[int(gains.argmax())])


def plan(context: FigureContext) -> FigurePlan:
    """Plan to measure the constants of heads at the tokens of Appendix C.7. The table has one row for each
    head, length and radius.

    The head with A = V = I is measured at every length, and the heads of the models' layers at the longest
    length.
    """
    lengths, seed = _lengths(context.options), context.options.seed
    keys: list[Key] = [{"model": IDENTITY, "layer": 0, "head": 0, "n": n, "seed": seed} for n in lengths]
    tasks = [_task(identity_head(1.0), key, None) for key in keys]
    for model in prepared_models(context, samples=_SAMPLES):
        for layer in model.layers:
            tasks += _of_layer(model, layer, max(lengths))
    return context.units(tasks, "heads")


def _lengths(options: FigureOptions) -> list[int]:
    """Return at most four of the requested lengths from 3 on, evenly over their sorted list."""
    asked = sorted(options.lengths or _LENGTHS)
    there = [n for n in asked if n >= 3]
    if not there:
        raise ArgumentError(
            "lengths", expected="some of at least 3: a zero and a pair ±Ru", got=str(asked[-1])
        )
    places = torch.linspace(0, len(there) - 1, min(_MOST_LENGTHS, len(there))).round().int().tolist()
    return [there[place] for place in places]


def _of_layer(model: PreparedModel, layer: int, n: int) -> Iterator[UnitTask]:
    """Yield the tasks that measure every head of one layer at n tokens of Appendix C.7 with several radii."""
    sites = [site for place in model.places() for site in model.sites(*place) if site.layer == layer]
    f = bilinear(sites[0], model.label)
    squares = [float((site.radius_mean**2).mean()) for site in sites]
    radius = math.sqrt(sum(squares) / len(squares))  # the norm of real tokens
    digests = "; ".join(one.text.digest for one in model.subjects)
    for h in range(f.heads):
        key = model.key(texts=digests, layer=layer, head=h, n=n, samples=model.plan.samples)
        yield _task(f.head(h), key, radius)


def _task(f: SelfAttention, key: Key, real: float | None) -> UnitTask:
    words = f"{key['model']}, layer {key['layer']}, head {key['head']}, n = {key['n']}"
    return UnitTask(key, partial(_rows, f, key, real), words, (key["model"],), int(key["n"] or 0))


def _rows(f: SelfAttention, key: Key, real: float | None) -> Iterator[Values]:
    """Yield the constant of a head at the tokens of Appendix C.7, and bounds on it, for each radius R."""
    n = int(key["n"] or 0)
    head = parameters_of(f).one_head("quadratic growth")
    norm, tokens = head.A_norm, balanced(head)
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
            **_bounds(f, n, radius),
        }


def _bounds(f: SelfAttention, n: int, radius: float) -> Values:
    """Return the logarithms of the sharpest bound on the ball, the paper's, and the one for every n."""
    parameters = parameters_of(f)
    sharp, paper, free = ball_upper_bound, theorem_3_3, mean_field_upper_bound
    if parameters.masking == "causal":
        sharp, paper, free = causal_ball_upper_bound, theorem_4_3, causal_mean_field_upper_bound
    return {
        "log_sharp": sharp(parameters, n, radius).log_value,
        "log_paper": paper(parameters, n, radius).log_value,
        "log_free": free(parameters, radius).log_value,
    }


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the constants of the heads of each layer against R, fit powers of R, and describe the results."""
    table = exponents_in_radius(rows)
    parts, panels, seen = [], [], []
    for (model, layer), part in rows.groupby(["model", "layer"], sort=False):
        fits = table[(table["model"] == model) & (table["layer"] == layer)].dropna(subset="exponent")
        parts.append(f"{readable(str(model))}" + ("" if model == IDENTITY else f", layer {layer}"))
        draw, say = (_identity_panel, _identity_words) if model == IDENTITY else (_heads_panel, _words)
        panels.append(draw(part, f"{literal(parts[-1])}: {_span(fits, '$R^{{{}}}$') or 'no exponent'}"))
        seen.append(say(part, fits))
    across = min(2, len(panels))
    sheet = [panels[place : place + across] for place in range(0, len(panels), across)]
    canvas, _ = plotting.draw(sheet, 0.7 + 2.1 * len(sheet))
    picture = plotting.picture(canvas, folder, "quadratic-growth", f"Appendix C.7: {'; '.join(parts)}")
    return Finding([picture], seen, [(f"Exponents in R, where ‖A‖R² is at least {FAR:g}", table)])


def exponents_in_radius(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit a power of the radius R to the constants of each head, at those radii where ‖A‖R² is at least
    :data:`FAR`. Here A is the score matrix of the head.

    Rows in which the radius is the norm of real tokens (column ``real``) are left out of the fit. The table
    has the columns ``model, layer, head, n, exponent, low, high, points``.
    """
    names = ["model", "layer", "head", "n"]
    found = []
    for key, part in rows[~rows["real"].astype(bool)].groupby(names, sort=False):
        far = part[part["strength"] >= FAR]
        radius, value = (far[name].to_numpy(np.float64) for name in ("radius", "value"))
        fit = fit_exponent(radius, value, far["converged"].to_numpy(bool))
        ends = {"exponent": fit.slope, "low": fit.low, "high": fit.high, "points": fit.n_points}
        found.append(dict(zip(names, key, strict=True)) | ends)
    return pd.DataFrame(found)


def _identity_panel(rows: pd.DataFrame, title: str) -> Panel:
    longest = rows[rows["n"] == rows["n"].max()].sort_values("radius")
    bounds = longest.filter(like="log_").apply(exp)
    top = 3 * float(bounds["log_sharp"].max())
    n = longest["n"].iloc[0]
    curves = plotting.lines(
        longest["radius"],
        bounds[bounds <= 1e3 * top],
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


def _span(fits: pd.DataFrame, form: str = "{}") -> str:
    """Return the range of the fitted exponents as text, empty without any."""
    ends = [] if fits.empty else [decimal(fits["exponent"].min(), 2), decimal(fits["exponent"].max(), 2)]
    return " to ".join(form.format(end) for end in dict.fromkeys(ends))


def _identity_words(rows: pd.DataFrame, fits: pd.DataFrame) -> str:
    exponents = ", ".join(
        f"{decimal(fit['exponent'], 3)} at n = {fit['n']} ({decimal(fit['low'], 3)} to "
        f"{decimal(fit['high'], 3)})"
        for fit in fits.to_dict("records")
    )
    good = rows[rows["converged"].astype(bool) & (rows["strength"] >= FAR)]
    if good.empty:
        return f"{IDENTITY}, four dimensions: no measurement converged where ‖A‖R² is at least {FAR:g}."
    off = float((good["value"] / good["formula"] - 1).abs().max())
    last = good[good["n"] == good["n"].max()].sort_values("radius").iloc[-1]
    log = math.log(float(last["value"]))
    sharp, theirs = math.exp(last["log_sharp"] - log), math.exp(last["log_paper"] - log)
    return (
        f"{IDENTITY}, four dimensions: where ‖A‖R² is at least {FAR:g} the measured constant grows like R to "
        f"the power {exponents}, with 95 % intervals, and differs from 1/n + γR²m/n, m the number of tokens "
        f"±Ru, by a share of at most {off:.1g}. At R = {last['radius']:.3g} and n = {last['n']} it is "
        f"{last['value']:.4g}; howsmooth's bound on the ball is {sharp:.3g} times as large, Theorem 3.3 "
        f"{theirs:.3g} times, and the bound for every n is exp({last['log_free']:.4g})."
    )


def _words(rows: pd.DataFrame, fits: pd.DataFrame) -> str:
    name, layer, n = readable(str(rows["model"].iloc[0])), rows["layer"].iloc[0], rows["n"].iloc[0]
    words = (
        f"{name}, layer {layer}: at n = {n} the exponent in R is {_span(fits) or 'without a fit'} over its "
        f"{rows['head'].nunique()} heads, where ‖A‖R² is at least {FAR:g}."
    )
    if len(fits):
        words += f" The widest of the 95 % intervals is ± {(fits['high'] - fits['low']).max() / 2:.2g}."
    converged = rows["converged"].astype(bool)
    real = rows[rows["real"].astype(bool) & converged]
    if len(real):
        words += (
            f" At the norm of real tokens, R = {real['radius'].iloc[0]:.4g}, ‖A‖R² is "
            f"{between(real['strength'])}, and the balanced tokens give constants from "
            f"{between(real['value'])}; howsmooth's bound on the ball is "
            f"{between(exp(real['log_sharp']) / real['value'])} times as large."
        )
    hollow = int((~converged).sum())
    return words + (f" {hollow} measurements did not converge and are not fitted." if hollow else "")


QUADRATIC_GROWTH = Figure(
    name="quadratic-growth",
    title="Tokens at which the constant grows like R²",
    paper="Appendix C.7",
    about=(
        "One token (or two) at zero, all others balanced at ±Ru: the zero sees all tokens alike, however "
        "large R is, and its own block of the Jacobian is V(I/n + (m/n)R² uuᵀA), m the number of tokens "
        "±Ru. For A = γI, V = I and odd n this is 1/n + γR²(n−1)/n: attention is not Lipschitz on all "
        "sequences, not even on three tokens. First, A = V = I in four dimensions, the formula dashed; then "
        "every head of a layer of each model, with u the best of singular vectors of A and V, orthogonal to "
        "the query bias, and dashed R² with only its factor fitted; the vertical line is the norm of real "
        "tokens. Rotary positions turn A by the distance of two tokens: A is then its mean over the tokens "
        f"±Ru, and ‖A‖ the largest norm. Exponents are fitted where ‖A‖R² is at least {FAR:g}."
    ),
    plan=plan,
    show=show,
)
