"""All experiments, in the order of the paper."""

from __future__ import annotations

from howsmooth.reproduce.experiment import Experiment
from howsmooth.reproduce.figure_1 import FIGURE_1

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (FIGURE_1,)
"""All experiments, in the order of the paper."""
