"""The figures of the paper *How Smooth Is Attention?*, and the quantities that the code published with the
paper computes.

Each figure has a module that measures the figure, draws it and describes its results in sentences. The
package :mod:`howsmooth.paper.published_code` computes the same values as the published code; the figures show
these values beside the correct ones.
"""
