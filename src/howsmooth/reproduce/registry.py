"""All experiments, in the order of the paper."""

from __future__ import annotations

from howsmooth.reproduce.adversarial_figure import ADVERSARIAL
from howsmooth.reproduce.all_bounds import ALL_BOUNDS
from howsmooth.reproduce.crossover import CROSSOVER
from howsmooth.reproduce.experiment import Experiment
from howsmooth.reproduce.figure_1 import FIGURE_1
from howsmooth.reproduce.gamma_radius import GAMMA_RADIUS
from howsmooth.reproduce.gpt2_growth import GPT2_GROWTH
from howsmooth.reproduce.quadratic_growth import QUADRATIC_GROWTH
from howsmooth.reproduce.two_dirac import TWO_DIRAC

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    FIGURE_1,
    TWO_DIRAC,
    CROSSOVER,
    ADVERSARIAL,
    GAMMA_RADIUS,
    QUADRATIC_GROWTH,
    GPT2_GROWTH,
    ALL_BOUNDS,
)
"""All experiments, in the order of the paper."""
