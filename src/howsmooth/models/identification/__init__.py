"""Identification: the map that a traced layer computes, found by comparing values, and verified.

Nothing is read off names, shapes or model types. ``self_attention_module`` finds the module and its tokens,
``map_identification`` reads projections, rotary positions, masks, residuals and norms, and ``verification``
holds the map against the model's own numbers.
"""
