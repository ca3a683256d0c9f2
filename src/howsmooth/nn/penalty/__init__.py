"""Training penalties that lower the local Lipschitz constants of attention layers."""

from howsmooth.nn.penalty.jasmin import JasminPenalty, jasmin, softmax_jacobian_bound
from howsmooth.nn.penalty.report import LayerReport, PenaltyReport
from howsmooth.nn.penalty.singular_value import SingularValue, leading_singular_value
from howsmooth.nn.penalty.singular_vector_storage import Directions
from howsmooth.nn.penalty.spectral_penalty import SpectralPenalty

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
