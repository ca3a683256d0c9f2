"""The weights of torch.nn.MultiheadAttention, split into heads.

Further functions convert the weights, bound means of values, and count the keys that each query may see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.differentiable_upper_bounds import any_boolean_mask
from howsmooth.bounds.visible_key_counts import VisibleRows, visible_rows
from howsmooth.nn.attention.accepted_masks import Masking
from howsmooth.nn.upward_rounding import rounded_up

__all__ = ["Parts", "Weights", "hull_radius", "in_double", "rows_of", "scaled_weights"]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Parts:
    """The query, key, value and output matrices and biases of a layer, split into heads.

    The layer has H heads of dimension k = d/H, where d is the dimension of a token.

    Attributes
    ----------
    query, key, value
        Weights (H, k, d).
    output
        Weight (d, H k).
    query_bias, key_bias, value_bias
        Biases (H, k), or None.
    output_bias
        Bias (d,), or None.

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
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The biases of queries, keys and values."""
        return self.query_bias, self.key_bias, self.value_bias

    def attention(self, masking: Masking, **keywords: Any) -> SelfAttention:
        """Return the attention of all heads as a function of tokens.

        Keywords are passed on to SelfAttention.
        """
        hidden = masking.hidden
        return SelfAttention(
            self.query,
            self.key,
            self.value,
            self.output,
            query_bias=self.query_bias,
            key_bias=self.key_bias,
            value_bias=self.value_bias,
            output_bias=self.output_bias,
            causal=masking.kind == "causal",
            mask=None if hidden is None else ~hidden.to(self.query.device),
            **keywords,
        )


def rows_of(masking: Masking, length: int) -> VisibleRows:
    """Return how many keys each query may see under the attention masks of a layer.

    The layer's Lipschitz bound depends on these numbers.
    """
    if masking.rows is not None:
        return masking.rows
    if masking.kind == "any":
        return any_boolean_mask(length)
    return visible_rows(length, "any" if masking.kind == "additive" else masking.kind)  # type: ignore[arg-type]


def scaled_weights(weights: Weights, scale: float) -> dict[str, Tensor]:
    """Return detached weights in float32 or float64, with the output projection multiplied by ``scale``."""
    dtype = torch.float64 if weights["out_proj.weight"].dtype == torch.float64 else torch.float32
    scaled = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    for name in ("out_proj.weight", "out_proj.bias"):
        if name in scaled:
            scaled[name] = scaled[name] * scale
    return scaled


def in_double(weights: Weights) -> dict[str, Tensor]:
    """Convert the weights to float64 on the CPU by operations that are differentiable."""
    return {name: weight.to("cpu", torch.float64) for name, weight in weights.items()}


def hull_radius(
    output: Tensor, values: Tensor, biases: tuple[Tensor | None, Tensor | None], radius: float
) -> float:
    """Return an upper bound on the norms of all output tokens of an attention layer.

    An output token is W_O (c + b_v) + b_O, where c joins the outputs c_h of all heads. The output c_h of head
    h is a mean of vectors V_h x with |x| <= ``radius``. ``output`` is W_O (d_out, heads · k), ``values`` are
    the V_h (heads, k, d), and ``biases`` are b_v and b_O.
    """
    blocks = output.unflatten(1, (len(values), -1)).transpose(0, 1)
    summed = torch.linalg.matrix_norm(blocks @ values, 2).sum()
    apart = torch.linalg.matrix_norm(output, 2) * torch.linalg.matrix_norm(values, 2).square().sum().sqrt()
    # Two bounds on the norm of the linear part hold: the sum over heads, and the norms of both factors.
    by_value, own = biases
    shift = torch.zeros(len(output), dtype=output.dtype) if own is None else own
    if by_value is not None:
        shift = shift + output @ by_value
    return rounded_up(float(radius * torch.minimum(summed, apart) + torch.linalg.vector_norm(shift)))
