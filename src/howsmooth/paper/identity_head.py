"""Build the inputs of figures without a model: a head with A = γI and V = I, and measures of two Diracs."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.measures import DiscreteMeasure
from howsmooth.paper.figure_measurements import Bench

__all__ = ["RTOL", "describe", "identity_head", "two_diracs"]

RTOL = 1e-8
"""The relative tolerance of constants measured at measures."""


def identity_head(gamma: float, d: int = 4) -> SelfAttention:
    """Return an attention head in R^d with A = γI and V = I."""
    eye = torch.eye(d, dtype=torch.float64)[None]
    return SelfAttention(gamma * eye, eye, eye, scale=1.0)


def two_diracs(radius: float, ratio: float, log_weights: Float64[Tensor, "2"], d: int = 4) -> DiscreteMeasure:
    """Return a measure with Dirac masses at radius · u and ratio · radius · u, u the first unit vector."""
    points = torch.zeros(2, d, dtype=torch.float64)
    points[0, 0], points[1, 0] = radius, ratio * radius
    return DiscreteMeasure(points, log_weights=log_weights)


def describe(bench: Bench, measures: str) -> None:
    """Record for the HTML page at which measures the constants were computed, and the settings."""
    settings = f"seed {bench.options.seed}, float64, relative tolerance {RTOL:g}, confidence 0.999."
    bench.made.update({"Measures": f"{measures}; no model and no text.", "Settings": settings})
