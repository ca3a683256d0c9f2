"""Probability measures on which attention acts (discrete measures and Gaussians), and Wasserstein distances
between them.
"""

from howsmooth.measures.conditional_wasserstein_distance import conditional_wasserstein
from howsmooth.measures.discrete import DiscreteMeasure
from howsmooth.measures.gaussian import Gaussian, affine_action
from howsmooth.measures.lipschitz import WassersteinLipschitz, wasserstein_lipschitz
from howsmooth.measures.transport import Transport, wasserstein

__all__ = [
    "DiscreteMeasure",
    "Gaussian",
    "Transport",
    "WassersteinLipschitz",
    "affine_action",
    "conditional_wasserstein",
    "wasserstein",
    "wasserstein_lipschitz",
]
