"""The figures of the paper *How Smooth Is Attention?*, and the quantities that its published code computes.

Each figure has a module that measures it, draws it and describes its results in sentences.
:mod:`howsmooth.paper.published_code` computes what the code published with the paper does, to be shown beside the
corrected quantity.
"""
