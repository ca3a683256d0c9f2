"""Reproduce the figures of the paper *How Smooth Is Attention?*, with one module for each figure.
:mod:`howsmooth.paper.published_code` computes what the code published with the paper computes.
"""
