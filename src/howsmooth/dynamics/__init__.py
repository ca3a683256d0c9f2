"""Attention through depth: tokens, measures and Gaussians as they flow.

``flow`` integrates x' = Γ_μ(x); ``Layers`` and ``Sphere`` are fields to integrate.
"""

from howsmooth.dynamics.fields import Field, Layers, Sphere
from howsmooth.dynamics.flow import flow
from howsmooth.dynamics.trajectory import Trajectory

__all__ = ["Field", "Layers", "Sphere", "Trajectory", "flow"]
