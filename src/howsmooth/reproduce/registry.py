"""All experiments, in the order of the paper."""

from __future__ import annotations

from howsmooth.reproduce.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = ()
"""All experiments, in the order of the paper."""
