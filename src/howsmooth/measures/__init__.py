"""Probability measures that attention acts on, and the distances between them."""
