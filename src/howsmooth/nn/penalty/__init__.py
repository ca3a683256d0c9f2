"""Training penalties: the leading singular value of each attention layer, and JaSMin for comparison."""

from howsmooth.nn.penalty.directions import Directions
from howsmooth.nn.penalty.jasmin import JasminPenalty, jasmin, softmax_jacobian_bound
from howsmooth.nn.penalty.report import LayerReport, PenaltyReport
from howsmooth.nn.penalty.singular_value import SingularValue, leading_singular_value
from howsmooth.nn.penalty.spectral import SpectralPenalty

__all__ = [
    "Directions",
    "JasminPenalty",
    "LayerReport",
    "PenaltyReport",
    "SingularValue",
    "SpectralPenalty",
    "jasmin",
    "leading_singular_value",
    "softmax_jacobian_bound",
]
