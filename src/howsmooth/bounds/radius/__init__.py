"""A radius around one input within which a whole Transformer's answer does not change.

``robust_radius`` is the function for users. A model is read (``reading``) as a ``network`` of ``stages``, and
its margin is expanded along its own partial Jacobians: ``second_order`` with ``remainders``, ``third_order``
with ``cubic_remainders``; ``errors`` carries remainders to later stages. ``rounding`` bounds the rounding
errors of all that is computed, ``residuals`` what they cost. ``attack`` searches the nearest change of the
class. Proofs: documentation page "A proved radius for a whole network".
"""

from howsmooth.bounds.radius.network import Network, Stage
from howsmooth.bounds.radius.result import RobustRadius, rounded_down
from howsmooth.bounds.radius.robust_radius import NetworkAtInput, robust_radius
from howsmooth.bounds.radius.stages import (
    ACTIVATIONS,
    Activation,
    Attention,
    FeedForward,
    GatedFeedForward,
    Norm,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Attention",
    "FeedForward",
    "GatedFeedForward",
    "Network",
    "NetworkAtInput",
    "Norm",
    "RobustRadius",
    "Stage",
    "robust_radius",
    "rounded_down",
]
