"""Proposition 3.6: the constant of mean-field attention at two Dirac masses grows like g e^g, g = γR²."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.bounds import mean_field_upper_bound, theorem_3_5
from howsmooth.bounds.mean_field_bounds import (
    proposition_3_6,
    proposition_3_6_rate,
    weighted_two_atom_lower_bound,
)
from howsmooth.measures import wasserstein_lipschitz
from howsmooth.paper import plotting
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench, Key, Unit, Values
from howsmooth.paper.identity_head import RTOL, describe, identity_head, two_diracs
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.seeds import derive_seed

__all__ = ["BETTER", "HALF", "OPPOSITE", "PAPER_WEIGHT", "measure", "result_sentences", "show"]

# The names of the two families of measures, and of the two weights of the light Dirac.
OPPOSITE, HALF = "A = −I, heavy Dirac at −Ru", "A = 8I, heavy Dirac at Ru/2"
PAPER_WEIGHT, BETTER = "e^(−2g)", "1/(1 + 3e^(2g))"
# γ, the place of the heavy Dirac divided by that of the light one, a mark and a label. Both have g = R².
_FAMILIES = {OPPOSITE: (-1.0, -1.0, "o", "$A=-I$"), HALF: (8.0, 0.5, "^", "$A=8I$")}
_WEIGHTS = {
    PAPER_WEIGHT: (plotting.VIOLET, "light mass $e^{-2g}$"),
    BETTER: (plotting.ORANGE, "light mass $1/(1+3e^{2g})$"),
}
# At R = 26.5, where g = 702, the constant is near the largest float64.
_RADII = (*(0.25 * step for step in range(2, 32)), *(0.5 * step for step in range(16, 54)))
_NEAR = 10.0  # beyond this radius the ratios hardly change
_OVERFLOW = math.sqrt(math.log(np.finfo(np.float64).max) / 2)  # from here on e^{2γR²} is no float64
_BOUNDS = (
    ("log_asymptotic", plotting.RED, plotting.DASHED, "Proposition 3.6, $(g/2)\\,e^g$"),
    ("log_free", plotting.GREY, plotting.DOTTED, "howsmooth's bound for every $n$"),
)


def measure(bench: Bench) -> pd.DataFrame:
    """Return a row with the constant for each family of measures, each weight and each radius."""
    describe(bench, "two Diracs in four dimensions, A = −I or 8I, V = I")
    units = []
    for family, weight, radius in product(_FAMILIES, _WEIGHTS, _RADII):
        key: Key = {"family": family, "weight": weight, "seed": bench.options.seed}
        words = f"{family}, {weight}, R = {radius}"
        units.append(Unit({**key, "radius": repr(radius)}, partial(_rows, key, radius), words))
    return bench.kept(units)


def _rows(key: Key, radius: float) -> Iterator[Values]:
    gamma, ratio, *_ = _FAMILIES[str(key["family"])]
    f, g = identity_head(gamma), radius**2
    start = derive_seed(purpose="two Diracs", radius=repr(radius), **key)
    at = two_diracs(radius, ratio, _log_weights(str(key["weight"]), g))
    found = wasserstein_lipschitz(f, at, rtol=RTOL, seed=start)
    yield {
        "radius": radius,
        "g": g,
        "log_value": math.log(found.value),
        "converged": found.converged,
        "by": found.by,
        "log_paper": proposition_3_6(gamma, radius).log_value,
        "log_asymptotic": proposition_3_6_rate(gamma, radius).log_value,
        "log_better": weighted_two_atom_lower_bound(gamma, radius).log_value,
        "log_free": mean_field_upper_bound(f, radius).log_value,
        "log_theorem": theorem_3_5(f, radius).log_value,
    }


def _log_weights(weight: str, g: float) -> Float64[Tensor, "2"]:
    if weight == PAPER_WEIGHT:
        logs = -2 * g, math.log(-math.expm1(-2 * g))
    else:
        tail = math.log1p(math.exp(-2 * g) / 3)
        logs = -math.log(3) - 2 * g - tail, -tail
    return torch.tensor(logs, dtype=torch.float64)


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the constant against the radius, as it is and divided by the growth rate of Proposition 3.6."""
    logs = rows.filter(like="log_").astype(np.float64)
    ratios = rows.assign(**logs.sub(rows["log_asymptotic"], axis=0).apply(np.exp))
    decades = rows.assign(**logs / math.log(10))
    best = (rows["family"] == OPPOSITE) & (rows["weight"] == BETTER)
    near = (rows["g"] >= 1) & (rows["radius"] <= _NEAR)
    here, close = decades[best], ratios[best & near]
    theorem = ("log_theorem", plotting.GREY, plotting.DASHDOT, "Theorem 3.5")
    forms = (
        ("log_better", plotting.ORANGE, plotting.SOLID, ""),
        ("log_paper", plotting.VIOLET, plotting.SOLID, "its forms for finite $R$, by mass"),
    )
    growth = plotting.lines(here["radius"], here, *_BOUNDS, theorem)
    shares = plotting.lines(close["radius"], close, *_BOUNDS, *forms)
    for (family, sign), (place, weight) in product(_FAMILIES.items(), enumerate(_WEIGHTS)):
        colour, words = _WEIGHTS[weight]
        of = (rows["family"] == family) & (rows["weight"] == weight)
        if family == OPPOSITE:
            # Every other radius for each weight, because their logarithms nearly coincide.
            some = decades[of].iloc[place::2]
            growth.append(Curve(some["radius"], some["log_value"], "", colour, sign[2], size=7))
        part, label = ratios[near & of], f"{sign[3]}, {words}"
        shares.append(Curve(part["radius"], part["log_value"], label, colour, sign[2], size=7))
    top = 1.35 * float(decades["log_value"].max())
    limits, scales = (0, 1.02 * float(rows["radius"].max()), -0.02 * top, top), ("linear", "decades")
    title, y = "Growth, $A=-I$", "local constant in $W_2$"
    left = Panel(growth, title, "radius $R$", y, scales, limits, [_OVERFLOW])
    title, y = "Over the rate of the proposition", r"divided by $(g/2)\,e^g$"
    right = Panel(shares, title, "radius $R$", y, ("linear", "linear"), (0, 1.02 * _NEAR, 0, 4.2))
    canvas, _ = plotting.draw_panels([[left, right]], 3.0)
    picture = plotting.write_picture(canvas, folder, "two-dirac", "Proposition 3.6: two Diracs", legend=3)
    columns = ["family", "weight", "radius", "g", "log_value", "ratio", "log_paper", "log_free", "converged"]
    caption = "Logarithms of the constant, and its ratio to (g/2) e^g"
    table = rows.assign(ratio=ratios["log_value"])[columns]
    return Finding([picture], result_sentences(rows), [(caption, table)])


def result_sentences(rows: pd.DataFrame) -> list[str]:
    """Return sentences on the constants at the largest radius, and on measurements that violate a bound."""
    logs, converged = rows["log_value"], rows["converged"].astype(bool)
    form = rows["log_paper"].where(rows["weight"] == PAPER_WEIGHT, rows["log_better"])
    last = rows[rows["radius"] == rows["radius"].max()]
    seen = [
        f"{row['family']}, light mass {row['weight']}: at R = {row['radius']:.4g} the constant is "
        f"{math.exp(row['log_value'] - row['log_asymptotic']):.4g} times (g/2) e^g."
        for row in last.to_dict("records")
    ]
    above = int((logs > rows["log_free"] + 1e-9).sum())
    below = int((logs < np.maximum(form, rows["log_asymptotic"]) - 1e-9).sum())
    far = last[(last["family"] == OPPOSITE) & (last["weight"] == BETTER)].iloc[0]
    free = math.exp(far["log_free"] - far["log_value"])
    seen.append(
        f"Of {len(rows)} measurements {int((~converged).sum())} did not converge, {above} are above "
        f"howsmooth's bound for every n, and {below} below the proposition's lower bound for their mass. For "
        f"A = −I the upper bound is {free:.3g} times the larger constant at R = {far['radius']:.4g}."
    )
    return seen
