"""The weights of torch.nn.MultiheadAttention, split into heads.

A further function counts the keys that each query may see, because bounds depend on these numbers.
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

__all__ = ["Parts", "rows_of"]


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
    def of(
        cls,
        weights: Mapping[str, Tensor],
        heads: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = "cpu",
    ) -> Parts:
        """Split the weights of a layer into heads, and convert their dtype and device.

        The results are differentiable in the weights.
        """
        w = {name: weight.to(device=device, dtype=dtype) for name, weight in weights.items()}
        # in_proj_weight has the queries, keys and values of all heads above each other.
        query, key, value = (part.unflatten(0, (heads, -1)) for part in w["in_proj_weight"].chunk(3))
        output, b_q, b_k, b_v = w["out_proj.weight"], None, None, None
        if "in_proj_bias" in w:
            b_q, b_k, b_v = (part.unflatten(0, (heads, -1)) for part in w["in_proj_bias"].chunk(3))
        return cls(query, key, value, output, b_q, b_k, b_v, w.get("out_proj.bias"))

    def attention(self, masking: Masking, factor: float, **keywords: Any) -> SelfAttention:
        """Return the attention of all heads as a function of tokens.

        Its output is multiplied by ``factor``. Keywords are passed on to SelfAttention.
        """
        hidden = masking.hidden
        return SelfAttention(
            self.query,
            self.key,
            self.value,
            self.output * factor,
            query_bias=self.query_bias,
            key_bias=self.key_bias,
            value_bias=self.value_bias,
            output_bias=None if self.output_bias is None else self.output_bias * factor,
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
