"""A radius around one input within which the answer of a whole Transformer provably does not change.

``robust_radius`` is the function for users. ``classifier`` runs a model from its embedded tokens on a
``symbolic_tensor`` of ``symbolic_terms``; ``network_reader`` reads from these terms the ``network_graph``,
which becomes a ``transformer_network`` of ``transformer_layers``. The margin of its answer is expanded
in ``margin_expansion``: to second order with ``second_order_remainders``, to third order with
``third_order_remainders``. The remainders of earlier layers reach later ones along the network's own
``error_propagation``, which also bounds how much rounding errors reduce the margin: tensors of
``howsmooth.rounding`` carry bounds on their own. ``attack`` searches the nearest change of the answer.
Proofs: documentation page "A proved radius for a whole network".
"""

from howsmooth.bounds.radius.robust_radius import RobustRadius, robust_radius
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
    "ACTIVATIONS", "Activation", "Attention", "FeedForward", "GatedFeedForward", "Network", "Norm",
    "RobustRadius", "Stage", "robust_radius",
]  # fmt: skip
