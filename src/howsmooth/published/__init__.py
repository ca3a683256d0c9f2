"""What the code published with the paper computes, item by item, to be shown beside the corrected quantity.

The paper is Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024. Each item is written from a
description of what that code does; none of it is used elsewhere in the library. What each item changes,
with numbers: docs/guide/as-published.md.
"""

from howsmooth.published.c_3 import c_3_as_coded
from howsmooth.published.items import ITEMS, items_that_apply, parse_items
from howsmooth.published.iteration import PowerIteration, power_iteration
from howsmooth.published.layers import PublishedLayer, capture_layers
from howsmooth.published.maps import DropoutAttention, unmasked, with_dropout
from howsmooth.published.measure import AsPublished, measure_as_published, measure_layer
from howsmooth.published.slices import has_fused_weight, wrong_slices

__all__ = [
    "ITEMS",
    "AsPublished",
    "DropoutAttention",
    "PowerIteration",
    "PublishedLayer",
    "c_3_as_coded",
    "capture_layers",
    "has_fused_weight",
    "items_that_apply",
    "measure_as_published",
    "measure_layer",
    "parse_items",
    "power_iteration",
    "unmasked",
    "with_dropout",
    "wrong_slices",
]
