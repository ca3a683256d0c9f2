"""The paper *How Smooth Is Attention?*: its figures from one command, and what its published code computes.

Each figure is a module that measures, draws and puts into words; :mod:`howsmooth.paper.published` holds what
the code published with the paper computes, to be shown beside the corrected quantity.
"""
