"""A radius around one input within which a whole Transformer's answer does not change.

``robust_radius`` is the function for users. ``model_reading`` turns a model into a ``staged_network``.
The margin of its answer is expanded in ``margin_expansion``: to the second order with
``second_order_remainders``, to the third with ``third_order_remainders``. What a stage leaves out travels to
later ones along the network's own ``partial_jacobians``. Tensors of ``rounded_tensor`` carry bounds on their
own rounding errors; ``rounding_residuals`` says what these take from the margin. ``attack`` searches the
nearest change of the answer. Proofs: documentation page "A proved radius for a whole network".
"""

from howsmooth.bounds.radius.result import RobustRadius
from howsmooth.bounds.radius.robust_radius import NetworkAtInput, robust_radius
from howsmooth.bounds.radius.staged_network import Network, Stage
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
]
