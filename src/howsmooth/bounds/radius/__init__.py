"""A radius around one input within which the answer of a whole Transformer provably does not change.

``robust_radius`` is the function for users. ``model_reading`` turns a model into a ``staged_network``.
The margin of its answer is expanded along the network's own ``partial_jacobians``: in ``second_order_margin``
with ``second_order_remainders``, in ``third_order_margin`` with ``third_order_remainders``. Tensors of
``rounded_tensor`` carry bounds on their own rounding errors; ``rounding_residuals`` says what these take from
the margin. ``attack`` searches the nearest change of the answer. Proofs: documentation page "A proved radius
for a whole network".
"""

from howsmooth.bounds.radius.robust_radius import NetworkAtInput, robust_radius
from howsmooth.bounds.radius.robust_radius_result import RobustRadius
from howsmooth.bounds.radius.transformer_layers import (
    ACTIVATIONS,
    Activation,
    Attention,
    FeedForward,
    GatedFeedForward,
    Norm,
)
from howsmooth.bounds.radius.transformer_network import Network, Stage

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
]
