"""Proposition 3.6: two Diracs at which the constant of mean-field attention grows like g e^g, g = γR²."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds import n_free, theorem_3_5
from howsmooth.bounds.mean_field_lower import (
    proposition_3_6,
    proposition_3_6_asymptotic,
    proposition_3_6_better_weight,
)
from howsmooth.measures import DiscreteMeasure, wasserstein_lipschitz
from howsmooth.reproduce.drawing.two_dirac import BETTER, HALF, OPPOSITE, PAPER_WEIGHT, draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.study.plan import derive_seed
from howsmooth.study.tools import Tools

__all__ = ["TWO_DIRAC", "identity_head", "two_diracs"]

_DIMENSION = 4
# γ and the place of the heavy Dirac over that of the light one, so that g = R² for both.
_FAMILIES = {OPPOSITE: (-1.0, -1.0), HALF: (8.0, 0.5)}
# At R = 26.5, g = 702, the constant is near the largest float64; e^{2g} is not one from R = 18.9 on.
_RADII = (*(0.25 * step for step in range(2, 32)), *(0.5 * step for step in range(16, 54)))
_RTOL = 1e-8


def identity_head(gamma: float, d: int = _DIMENSION) -> SelfAttention:
    """Return A = γI, V = I on R^d."""
    eye = torch.eye(d, dtype=torch.float64)[None]
    return SelfAttention(gamma * eye, eye, eye, scale=1.0)


def two_diracs(
    radius: float, ratio: float, log_weights: Float64[Tensor, "2"], d: int = _DIMENSION
) -> DiscreteMeasure:
    """Return the measure on Ru and ratio · Ru, u the first unit vector, with these weights."""
    points = torch.zeros(2, d, dtype=torch.float64)
    points[0, 0], points[1, 0] = radius, ratio * radius
    return DiscreteMeasure(points, log_weights=log_weights)


def _log_weights(name: str, g: float) -> Float64[Tensor, "2"]:
    """Logarithms of the mass p of the light Dirac and of 1 − p: e^{−2g}, or 1/(1 + 3e^{2g})."""
    if name == PAPER_WEIGHT:
        logs = (-2 * g, math.log(-math.expm1(-2 * g)))
    else:
        tail = math.log1p(math.exp(-2 * g) / 3)
        logs = (-math.log(3) - 2 * g - tail, -tail)
    return torch.tensor(logs, dtype=torch.float64)


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    kept = Kept(folder / "units")
    units: list[Key] = [
        {"family": family, "weight": weight, "seed": request.seed}
        for family in _FAMILIES
        for weight in (PAPER_WEIGHT, BETTER)
    ]
    for done, key in enumerate(units):
        on_step(Step(float(done), float(len(units)), f"{key['family']}, {key['weight']}"))
        if not kept.has(key):
            kept.add(key, [_row(key, radius) for radius in _RADII])
    on_step(Step(float(len(units)), float(len(units)), ""))
    made = [
        ("Measures", "two Diracs in four dimensions, A = −I or 8I, V = I; no model and no text."),
        ("Settings", f"seed {request.seed}, float64, relative tolerance {_RTOL:g}, confidence 0.999."),
    ]
    write_note(folder, {"units": [dict(key) for key in units], "made": made})


def _row(key: Key, radius: float) -> dict[str, object]:
    gamma, ratio = _FAMILIES[str(key["family"])]
    f, g = identity_head(gamma), radius**2
    measure = two_diracs(radius, ratio, _log_weights(str(key["weight"]), g))
    start = derive_seed(purpose="two Diracs", radius=repr(radius), **key)
    found = wasserstein_lipschitz(f, measure, rtol=_RTOL, seed=start)
    return {
        "radius": radius,
        "g": g,
        "log_value": math.log(found.value),
        "log_lower": math.log(found.lower),
        "log_upper": math.log(found.upper) if found.upper < math.inf else None,
        "converged": found.converged,
        "by": found.by,
        "log_paper": proposition_3_6(gamma, radius).log_value,
        "log_asymptotic": proposition_3_6_asymptotic(gamma, radius).log_value,
        "log_better": proposition_3_6_better_weight(gamma, radius).log_value,
        "log_free": n_free(f, radius).log_value,
        "log_theorem": theorem_3_5(f, radius).log_value,
    }


TWO_DIRAC = Experiment(
    name="two-dirac",
    title="Two Diracs at which the constant of mean-field attention grows exponentially",
    paper="Proposition 3.6",
    about=(
        "A light Dirac at Ru, a heavy one at −Ru (A = −I) or at Ru/2 (A = 8I), V = I, in four dimensions, so "
        "that g = γR² is R². The light mass is the paper's e^(−2g), or 1/(1 + 3e^(2g)), the best as R grows. "
        "The local constant in W₂ of mean-field attention is measured at these measures, with weights as "
        "logarithms: beyond R = 18.9 e^(2g) is no float64 number. No model and no text is involved."
    ),
    measure=_measure,
    draw=draw,
)
