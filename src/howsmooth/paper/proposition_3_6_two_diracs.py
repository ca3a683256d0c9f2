"""Proposition 3.6: measure the constant of mean-field attention at two Dirac masses, where it grows
exponentially with the squared radius.

The constant grows like g e^g with g = γR², where R is the radius of a ball that contains the Dirac masses.
The measured heads have A = −I or A = 8I, and γ = 1 for both.
"""

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
from howsmooth.bounds.mean_field_lower_bounds import (
    proposition_3_6,
    proposition_3_6_rate,
    weighted_two_atom_lower_bound,
)
from howsmooth.measures import wasserstein_lipschitz
from howsmooth.paper import plotting
from howsmooth.paper.bench import Bench, Key, Unit, Values
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.identity_head import RTOL, describe, identity_head, two_diracs
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.seeds import derive_seed

__all__ = ["BETTER", "HALF", "OPPOSITE", "PAPER_WEIGHT", "measure", "result_sentences", "show"]

OPPOSITE, HALF = "A = −I, heavy Dirac at −Ru", "A = 8I, heavy Dirac at Ru/2"
"""The names of the two families of measures."""

PAPER_WEIGHT, BETTER = "e^(−2g)", "1/(1 + 3e^(2g))"
"""The names of the two weights of the light Dirac."""

# γ, and the position of the heavy Dirac divided by the position of the light one. Both have g = R².
_FAMILIES = {OPPOSITE: (-1.0, -1.0), HALF: (8.0, 0.5)}
# At R = 26.5, where g = 702, the constant is near the largest float64. From R = 18.84 on, e^{2g} overflows.
_RADII = (*(0.25 * step for step in range(2, 32)), *(0.5 * step for step in range(16, 54)))
# Beyond this radius the ratios hardly change.
_NEAR = 10.0
# The radius from which on e^{2γR²} overflows in float64.
_OVERFLOW = math.sqrt(math.log(np.finfo(np.float64).max) / 2)

_COLOURS = {PAPER_WEIGHT: plotting.VIOLET, BETTER: plotting.ORANGE}
_MARKS = {OPPOSITE: "o", HALF: "^"}
_LABELS = {
    OPPOSITE: "$A=-I$",
    HALF: "$A=8I$",
    PAPER_WEIGHT: "light mass $e^{-2g}$",
    BETTER: "light mass $1/(1+3e^{2g})$",
}
_BOUNDS = (
    ("log_asymptotic", plotting.RED, plotting.DASHED, "Proposition 3.6, $(g/2)\\,e^g$"),
    ("log_free", plotting.GREY, plotting.DOTTED, "howsmooth's bound for every $n$"),
)


def measure(bench: Bench) -> pd.DataFrame:
    """Measure the constant at two Dirac masses. The table has one row for each choice of their positions,
    their weights and the radius.
    """
    describe(bench, "two Diracs in four dimensions, A = −I or 8I, V = I")
    units = []
    for family, weight, radius in product(_FAMILIES, _COLOURS, _RADII):
        key: Key = {"family": family, "weight": weight, "seed": bench.options.seed}
        words = f"{family}, {weight}, R = {radius}"
        units.append(Unit({**key, "radius": repr(radius)}, partial(_rows, key, radius), words))
    return bench.kept("constants at two Diracs", units)


def _rows(key: Key, radius: float) -> Iterator[Values]:
    gamma, ratio = _FAMILIES[str(key["family"])]
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


def _log_weights(name: str, g: float) -> Float64[Tensor, "2"]:
    """Return the logarithms of the weights p and 1 − p of two Dirac masses. The argument ``name`` chooses
    p = e^{−2g} or p = 1/(1 + 3e^{2g}), where g is the squared radius R².
    """
    if name == PAPER_WEIGHT:
        logs = (-2 * g, math.log(-math.expm1(-2 * g)))
    else:
        tail = math.log1p(math.exp(-2 * g) / 3)
        logs = (-math.log(3) - 2 * g - tail, -tail)
    return torch.tensor(logs, dtype=torch.float64)


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the constant at two Dirac masses against the radius R, and compare it with Proposition 3.6."""
    logs = rows.filter(like="log_").astype(np.float64)
    ratios = logs.sub(rows["log_asymptotic"], axis=0).apply(np.exp).join(rows["radius"])
    decades = (logs / math.log(10)).join(rows["radius"])
    opposite, better = rows["family"] == OPPOSITE, rows["weight"] == BETTER
    near = (rows["g"] >= 1) & (rows["radius"] <= _NEAR)
    top = 1.35 * float(decades["log_value"].max())
    theorem = ("log_theorem", plotting.GREY, plotting.DASHDOT, "Theorem 3.5")
    here = decades[opposite & better]
    growth = plotting.lines(here["radius"], here, *_BOUNDS, theorem)
    for place, weight in enumerate(_COLOURS):
        # Draw every other radius for each weight, because their logarithms nearly coincide.
        some = decades[opposite & (rows["weight"] == weight)].iloc[place::2]
        growth.append(Curve(some["radius"], some["log_value"], "", _COLOURS[weight], "o", size=7))
    here = ratios[near & opposite & better]
    shares = plotting.lines(
        here["radius"],
        here,
        *_BOUNDS,
        ("log_better", plotting.ORANGE, plotting.SOLID, ""),
        ("log_paper", plotting.VIOLET, plotting.SOLID, "its forms for finite $R$, by mass"),
    )
    for family, weight in product(_FAMILIES, _COLOURS):
        part = ratios[near & (rows["family"] == family) & (rows["weight"] == weight)]
        label, look = f"{_LABELS[family]}, {_LABELS[weight]}", (_COLOURS[weight], _MARKS[family])
        shares.append(Curve(part["radius"], part["log_value"], label, *look, size=7))
    left = Panel(
        growth,
        "Growth, $A=-I$",
        "radius $R$",
        "local constant in $W_2$",
        ("linear", "decades"),
        (0, 1.02 * float(rows["radius"].max()), -0.02 * top, top),
        [_OVERFLOW],
    )
    right = Panel(
        shares,
        "Over the rate of the proposition",
        "radius $R$",
        r"divided by $(g/2)\,e^g$",
        ("linear", "linear"),
        (0, 1.02 * _NEAR, 0, 4.2),
    )
    canvas, _ = plotting.draw([[left, right]], 3.0)
    picture = plotting.picture(canvas, folder, "two-dirac", "Proposition 3.6: two Diracs", legend=3)
    table = rows.assign(ratio=ratios["log_value"])[
        ["family", "weight", "radius", "g", "log_value", "ratio", "log_paper", "log_free", "converged"]
    ]
    tables = [("Logarithms of the constant, and its ratio to (g/2) e^g", table)]
    return Finding([picture], result_sentences(rows), tables)


def result_sentences(rows: pd.DataFrame) -> list[str]:
    """Return sentences on the constants at the largest radius, and on the number of measurements that violate
    a bound.
    """
    rows = rows.assign(form=rows["log_paper"].where(rows["weight"] == PAPER_WEIGHT, rows["log_better"]))
    last = rows.sort_values("radius").groupby(["family", "weight"], sort=False).tail(1)
    seen = []
    for family in _FAMILIES:
        words = []
        for row in last[last["family"] == family].sort_index().to_dict("records"):
            log = row["log_value"]
            words.append(
                f"with the light mass {row['weight']} the constant at R = {row['radius']:.4g} is 10 to the "
                f"power {log / math.log(10):.4g}, which is {math.exp(log - row['log_asymptotic']):.4g} times "
                "(g/2) e^g and exceeds the proposition's form for finite R, with this mass, by a share of "
                f"{max(math.expm1(log - row['form']), 0.0):.2g}"
            )
        seen.append(f"{family}: {'; '.join(words)}.")
    far = last[(last["family"] == OPPOSITE) & (last["weight"] == BETTER)].iloc[0]
    free = math.exp(far["log_free"] - far["log_value"])
    theirs = (far["log_theorem"] - far["log_value"]) / math.log(10)
    seen.append(
        f"For A = −I howsmooth's bound for every n is {free:.3g} times the better one of the two at "
        f"R = {far['radius']:.4g}; Theorem 3.5 is 10 to the power {theirs:.3g} times as large."
    )
    below = int((rows["log_value"] < np.maximum(rows["form"], rows["log_asymptotic"]) - 1e-9).sum())
    above = int((rows["log_value"] > rows["log_free"] + 1e-9).sum())
    converged = rows["converged"].astype(bool)
    beyond = int(((rows["radius"] > _OVERFLOW) & converged).sum())
    split = int((rows["by"] == "splitting").sum())
    seen.append(
        f"Of {len(rows)} measurements {above} are above the bound for every n, {below} below the "
        f"proposition's form with their mass, and {int((~converged).sum())} did not converge; {beyond} are "
        f"at radii where e^(2γR²) is no float64 number. In {split} of them it is an atom that splits."
    )
    return seen
