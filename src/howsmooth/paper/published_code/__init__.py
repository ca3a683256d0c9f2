"""Compute the values that the published code of the paper measures in place of the local constant ‖D_X f‖.

The paper is Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024. The code differs from a measurement
of ‖D_X f‖ in several ways; each difference is called an item. The items are implemented from a description of
the published code, and only the comparison with this code uses them. The documentation page "Reproduce
the paper's figures" shows it at work.
"""

from howsmooth.paper.published_code.altered_attention import (
    DropoutAttention,
    c_3_as_coded,
    has_fused_weight,
    unmasked,
    with_dropout,
    wrong_slices,
)
from howsmooth.paper.published_code.measurement import (
    ITEMS,
    AsPublished,
    PowerIteration,
    PublishedLayer,
    capture_layers,
    items_that_apply,
    measure_layer,
    power_iteration,
)

__all__ = [
    "ITEMS", "AsPublished", "DropoutAttention", "PowerIteration", "PublishedLayer",
    "c_3_as_coded", "capture_layers", "has_fused_weight", "items_that_apply", "measure_layer",
    "power_iteration", "unmasked", "with_dropout", "wrong_slices",
]  # fmt: skip
