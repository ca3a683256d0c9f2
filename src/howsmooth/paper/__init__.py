"""The figures of the paper *How Smooth Is Attention?*, a module each, and in
:mod:`howsmooth.paper.published_code` the quantities that the code published with the paper computes.
"""
