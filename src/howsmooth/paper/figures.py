"""All figures, in the order of the paper."""

from __future__ import annotations

from howsmooth.paper.all_bounds import ALL_BOUNDS
from howsmooth.paper.crossover import CROSSOVER
from howsmooth.paper.figure import Figure
from howsmooth.paper.figure_1 import FIGURE_1
from howsmooth.paper.gamma_radius import GAMMA_RADIUS
from howsmooth.paper.gpt2_growth import GPT2_GROWTH
from howsmooth.paper.quadratic_growth import QUADRATIC_GROWTH
from howsmooth.paper.two_dirac import TWO_DIRAC
from howsmooth.paper.worst_inputs import WORST_INPUTS

__all__ = ["FIGURES"]

FIGURES: tuple[Figure, ...] = (
    FIGURE_1,
    TWO_DIRAC,
    CROSSOVER,
    WORST_INPUTS,
    GAMMA_RADIUS,
    QUADRATIC_GROWTH,
    GPT2_GROWTH,
    ALL_BOUNDS,
)
"""All figures, in the order of the paper."""
