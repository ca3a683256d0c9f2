"""Identification: find the map that a traced layer computes by comparing numbers, and verify it.

Names, shapes and model types decide nothing. ``self_attention_module`` finds the attention module and its
tokens; ``map_identification`` reads projections, rotary positions and masks, ``block_arrangement`` residual
and norms; ``verification`` compares the map with the model's own numbers.
"""
