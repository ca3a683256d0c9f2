"""Finding the map that an attention layer computes, from the tensors in a trace of it, and verifying the map.

Names, shapes and model types decide nothing. ``self_attention_module`` finds the attention module and its
tokens; ``candidate_maps`` reads projections, rotary positions and masks, ``norm_placement``
residual and norms; ``verification`` compares the map with the model's own numbers.
"""
