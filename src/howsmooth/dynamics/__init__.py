"""Flows of tokens, measures and Gaussians through attention layers, as ordinary differential equations whose
time is the depth.

``flow`` integrates x' = Γ_μ(x). ``Layers``, ``Sphere`` and ``Rescaled`` are velocity fields to integrate.
``growth`` measures how much a flow amplifies small perturbations, and ``cluster_metrics`` how far its tokens
have clustered.
"""

from howsmooth.dynamics.clustering_quantities import (
    cluster_labels,
    cluster_metrics,
    effective_rank,
    log_interaction_energy,
    number_of_clusters,
)
from howsmooth.dynamics.flow import flow
from howsmooth.dynamics.flow_bounds import (
    clustering_bound,
    finite_context_bound,
    log_stability_bound,
)
from howsmooth.dynamics.perturbation_growth import Growth, growth
from howsmooth.dynamics.rescaled_tokens import Rescaled, rescaled
from howsmooth.dynamics.trajectory import Trajectory
from howsmooth.dynamics.velocity_fields import Layers, Sphere

__all__ = [
    "Growth",
    "Layers",
    "Rescaled",
    "Sphere",
    "Trajectory",
    "cluster_labels",
    "cluster_metrics",
    "clustering_bound",
    "effective_rank",
    "finite_context_bound",
    "flow",
    "growth",
    "log_interaction_energy",
    "log_stability_bound",
    "number_of_clusters",
    "rescaled",
]
