"""Penalties for training: the leading singular value of each attention layer, and JaSMin for comparison."""

from howsmooth.nn.penalty.directions import Directions
from howsmooth.nn.penalty.pair import SingularValue, leading_singular_value
from howsmooth.nn.penalty.report import LayerReport, PenaltyReport
from howsmooth.nn.penalty.spectral import SpectralPenalty

__all__ = [
    "Directions",
    "LayerReport",
    "PenaltyReport",
    "SingularValue",
    "SpectralPenalty",
    "leading_singular_value",
]
