"""Training penalties that lower the local Lipschitz constants of attention layers."""

from howsmooth.nn.penalty.jasmin import JasminPenalty, jasmin
from howsmooth.nn.penalty.report import LayerReport, PenaltyReport
from howsmooth.nn.penalty.spectral_penalty import SpectralPenalty

__all__ = ["JasminPenalty", "LayerReport", "PenaltyReport", "SpectralPenalty", "jasmin"]
