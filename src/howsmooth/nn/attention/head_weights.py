"""The weights of torch.nn.MultiheadAttention, split into heads, and bounds on what all heads return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from howsmooth.rounding import U, above, gamma, spectral_norms_above, up

__all__ = ["Parts", "Weights", "hull_radius", "in_double", "joined_radius", "scaled_weights"]

Weights = Mapping[str, Tensor]
Map = TypeVar("Map")


@dataclass(frozen=True, eq=False)
class Parts:
    """The matrices and biases of a layer with H heads of dimension k, for tokens of dimension d = H k.

    ``query``, ``key`` and ``value`` are (H, k, d), ``output`` is (d, H k), the biases are (H, k), that of the
    output is (d,), and each may be None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None

    @classmethod
    def of(cls, weights: Weights, heads: int) -> Parts:
        """Split the weights of a layer into heads. The results are differentiable in the weights."""
        # in_proj_weight has the queries, keys and values of all heads above each other.
        query, key, value = (part.unflatten(0, (heads, -1)) for part in weights["in_proj_weight"].chunk(3))
        output, b_q, b_k, b_v = weights["out_proj.weight"], None, None, None
        if "in_proj_bias" in weights:
            b_q, b_k, b_v = (part.unflatten(0, (heads, -1)) for part in weights["in_proj_bias"].chunk(3))
        return cls(query, key, value, output, b_q, b_k, b_v, weights.get("out_proj.bias"))

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The matrices of queries, keys, values and output."""
        return self.query, self.key, self.value, self.output

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The biases of queries, keys and values."""
        return self.query_bias, self.key_bias, self.value_bias

    def as_map(self, kind: Callable[..., Map], **keywords: Any) -> Map:
        """Return an attention of ``howsmooth.attention`` with these matrices and biases."""
        names = ("query_bias", "key_bias", "value_bias", "output_bias")
        return kind(*self.matrices, **{name: getattr(self, name) for name in names}, **keywords)


def scaled_weights(weights: Weights, scale: float) -> dict[str, Tensor]:
    """Return detached weights in float32 or float64, with the output projection multiplied by ``scale``."""
    dtype = torch.float64 if weights["out_proj.weight"].dtype == torch.float64 else torch.float32
    scaled = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    return {name: w * scale if name.startswith("out_proj.") else w for name, w in scaled.items()}


def in_double(weights: Weights) -> dict[str, Tensor]:
    """Convert the weights to float64 on the CPU by operations that are differentiable."""
    return {name: weight.to("cpu", torch.float64) for name, weight in weights.items()}


def joined_radius(parts: Parts, sizes: Tensor, factor: float = 1.0) -> float:
    """Return an upper bound on the norms of all outputs W_O c + b_O, where c joins one vector of each head.

    ``factor`` times ``sizes`` (H,) bounds the norms of these vectors.
    """
    blocks = parts.output.unflatten(1, (len(sizes), -1)).transpose(0, 1)
    # Two bounds hold: the sum over heads, and the norm of W_O times that of all heads.
    summed = (spectral_norms_above(blocks) * sizes).sum()
    apart = spectral_norms_above(parts.output) * sizes.square().sum().sqrt()
    total = factor * float(torch.minimum(summed, apart))
    shift = 0.0 if parts.output_bias is None else float(torch.linalg.vector_norm(parts.output_bias))
    return above(total + shift, len(sizes) + len(parts.output) + 8)


def hull_radius(parts: Parts, radius: float) -> float:
    """Return an upper bound on the norms of all outputs W_O (c + b_V) + b_O, where c joins for each head a
    mean of vectors V_h x with |x| <= ``radius``.
    """
    output, values, shift = parts.output, parts.value, parts.output_bias
    blocks = output.unflatten(1, (len(values), -1)).transpose(0, 1)
    # The products round by γ_k |W_h| |V_h|, entry by entry.
    rounding = gamma(values.shape[-2]) * torch.linalg.matrix_norm(blocks) * torch.linalg.matrix_norm(values)
    summed = (spectral_norms_above(blocks @ values) + up(rounding)).sum()
    apart = spectral_norms_above(output) * spectral_norms_above(values).square().sum().sqrt()
    shift = torch.zeros(len(output), dtype=output.dtype) if shift is None else shift
    length = torch.linalg.vector_norm(shift)
    if parts.value_bias is not None:
        moved = output @ parts.value_bias.flatten()
        rounding = gamma(output.shape[1]) * torch.linalg.matrix_norm(output) * parts.value_bias.norm()
        length = torch.linalg.vector_norm(shift + moved) + up(rounding + U * (length + moved.norm()))
    return above(float(radius * torch.minimum(summed, apart) + length), len(values) + len(output) + 8)
