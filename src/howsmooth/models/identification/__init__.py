"""Identification of the map that a traced attention layer computes, from its tensors, and verification of the
map.

Names, shapes and model types decide nothing. ``self_attention_module`` finds the attention module and its
tokens; ``candidate_maps`` reads projections, rotary positions and masks, ``norm_placement``
residual and norms; ``verification`` compares the map with the model's own numbers.
"""
