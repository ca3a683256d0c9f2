"""Weights like those of torch.nn.MultiheadAttention, split into heads, and bounds on attention outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from howsmooth.bounds.differentiable_upper_bounds import HeadMatrices, Products
from howsmooth.rounding import U, above, spectral_norms_above, up

__all__ = ["Weights", "hull_radius", "joined_radius", "projections_of", "scaled_weights", "weights_in_double"]

Weights = Mapping[str, Tensor]


def projections_of(weights: Weights, heads: int) -> HeadMatrices:
    """Split the weights of a layer into heads. The results are differentiable in the weights."""
    # in_proj_weight has the queries, keys and values of all heads above each other.
    query, key, value = (part.unflatten(0, (heads, -1)) for part in weights["in_proj_weight"].chunk(3))
    output, b_q, b_k, b_v = weights["out_proj.weight"], None, None, None
    if "in_proj_bias" in weights:
        b_q, b_k, b_v = (part.unflatten(0, (heads, -1)) for part in weights["in_proj_bias"].chunk(3))
    return HeadMatrices(query, key, value, output, b_q, b_k, b_v, weights.get("out_proj.bias"))


def scaled_weights(weights: Weights, scale: float) -> dict[str, Tensor]:
    """Return detached weights in float32 or float64, with the output projection multiplied by ``scale``."""
    dtype = torch.float64 if weights["out_proj.weight"].dtype == torch.float64 else torch.float32
    scaled = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    return {name: w * scale if name.startswith("out_proj.") else w for name, w in scaled.items()}


def weights_in_double(weights: Weights) -> dict[str, Tensor]:
    """Convert the weights to float64 on the CPU by operations that are differentiable."""
    return {name: weight.to("cpu", torch.float64) for name, weight in weights.items()}


def joined_radius(layer: HeadMatrices, sizes: Tensor, factor: float = 1.0) -> float:
    """Bound the norms of all outputs W_O c + b_O from above, where c concatenates one vector of each head.

    ``factor`` times ``sizes`` (H,) bounds the norms of these vectors.
    """
    # Two bounds hold: the sum over heads, and the norm of W_O times that of all heads.
    summed = (spectral_norms_above(layer.blocks) * sizes).sum()
    total = factor * float(torch.minimum(summed, layer.whole * sizes.square().sum().sqrt()))
    shift = 0.0 if layer.output_bias is None else float(torch.linalg.vector_norm(layer.output_bias))
    return above(total + shift, len(sizes) + len(layer.output) + 8)


def hull_radius(layer: HeadMatrices, radius: float, size: Tensor | None = None) -> float:
    """Bound the norms of all outputs W_O (c + b_V) + b_O from above. The vector c concatenates, for each head
    h, a mean of vectors V_h x with |x| <= ``radius``. ``size`` bounds |W_O c| for a radius of one.
    """
    output, shift = layer.output, layer.output_bias
    if size is None:
        apart = layer.whole * layer.sizes["value"].square().sum().sqrt()
        size = torch.minimum(Products.of(layer.blocks, layer.value).norms.sum(), apart)
    shift = torch.zeros(len(output), dtype=output.dtype) if shift is None else shift
    length = torch.linalg.vector_norm(shift)
    if layer.value_bias is not None:
        moved, rounding = Products.of(output, layer.value_bias.flatten()[:, None])
        length = torch.linalg.vector_norm(shift + moved[:, 0]) + up(rounding + U * (length + moved.norm()))
    return above(float(radius * size + length), len(layer.value) + len(output) + 8)
