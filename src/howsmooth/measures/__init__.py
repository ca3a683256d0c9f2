"""Probability measures that attention acts on, and the distances between them."""

from howsmooth.measures.discrete import DiscreteMeasure

__all__ = ["DiscreteMeasure"]
