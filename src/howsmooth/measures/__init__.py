"""Probability measures that attention acts on, and the distances between them."""

from howsmooth.measures.discrete import DiscreteMeasure
from howsmooth.measures.lipschitz import WassersteinLipschitz, wasserstein_lipschitz

__all__ = ["DiscreteMeasure", "WassersteinLipschitz", "wasserstein_lipschitz"]
