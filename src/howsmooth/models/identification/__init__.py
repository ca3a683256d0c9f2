"""Identification of the map that a traced attention layer computes, from its tensors, and verification of the
map.

Names, shapes and model types decide nothing. ``self_attention_module`` finds the attention module and its
tokens; ``map_hypotheses`` reads projections, rotary positions and masks, ``block_arrangement`` residual
and norms; ``verification`` compares the map with the model's own numbers.
"""
