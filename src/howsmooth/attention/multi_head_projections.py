"""The query, key, value and output projections of multi-head attention, with their biases."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.map import TokenMap, as_parameter
from howsmooth.attention.scaled_dot_product import Keys, Outputs, Values
from howsmooth.errors import ArgumentError

__all__ = ["HeadsAttention", "InHeads", "in_heads"]

InHeads = Float[Tensor, "*batch heads n key_dim"]


class HeadsAttention(TokenMap):
    """Base class of multi-head self-attention with query, key, value and output projections, biases and a
    score scale. Subclasses define the attention matrix P.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None,
        query_bias: Tensor | None,
        key_bias: Tensor | None,
        value_bias: Tensor | None,
        output_bias: Tensor | None,
        scale: float | None,
    ) -> None:
        self.query = as_parameter("query", query, ("heads", "key_dim", "d"))
        self.heads, self.key_dim, d = self.query.shape
        q = self.query
        self.key = as_parameter("key", key, ("kv_heads", self.key_dim, d), like=q)
        self.kv_heads = self.key.shape[0]
        self.value = as_parameter("value", value, (self.kv_heads, "value_dim", self.key.shape[2]), like=q)
        self.value_dim = self.value.shape[1]
        if self.heads % self.kv_heads:
            raise ArgumentError(
                "key",
                expected=f"a number of key heads that divides the {self.heads} query heads",
                got=f"{self.kv_heads} key heads",
            )
        width = self.heads * self.value_dim

        self.output = _optional("output", output, ("d_out", width), q)
        self.query_bias = _optional("query_bias", query_bias, (self.heads, self.key_dim), q)
        self.key_bias = _optional("key_bias", key_bias, (self.kv_heads, self.key_dim), q)
        self.value_bias = _optional("value_bias", value_bias, (self.kv_heads, self.value_dim), q)
        if output_bias is not None and self.output is None:
            raise ArgumentError(
                "output_bias", expected="None without an output matrix", got="a tensor", remedy="Give output."
            )
        self.output_bias = _optional("output_bias", output_bias, (self.d_out,), q)
        self.scale = 1.0 / math.sqrt(self.key_dim) if scale is None else float(scale)
        if not math.isfinite(self.scale):
            raise ArgumentError("scale", expected="a finite number", got=str(scale))

    @property
    def d(self) -> int:
        """Dimension of the map's input tokens."""
        return self.query.shape[2]

    @property
    def d_out(self) -> int:
        """Dimension of the map's output tokens."""
        return self.heads * self.value_dim if self.output is None else self.output.shape[0]

    def _described(self, kind: str, masking: str) -> str:
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}"
        if self.kv_heads != self.heads:
            heads += f" over {self.kv_heads} key/value heads"
        projected = "with output projection" if self.output is not None else "heads concatenated"
        return f"{kind}, {heads}, {masking}, {projected}"

    def __repr__(self) -> str:
        sizes = f"d={self.d}, key_dim={self.key_dim}, d_out={self.d_out}"
        return f"{type(self).__name__}({self.describe()}, {sizes})"

    def _project(self, X: Float[Tensor, "*batch n d"]) -> tuple[InHeads, Keys, Values]:
        queries = in_heads(X, self.query, self.query_bias)
        keys = in_heads(X, self.key, self.key_bias)
        return queries, keys, in_heads(X, self.value, self.value_bias)

    def _grouped(self, q: Tensor) -> Tensor:
        return q.reshape(*q.shape[:-3], self.kv_heads, self.heads // self.kv_heads, *q.shape[-2:])

    def _projected(self, heads: Outputs) -> Float[Tensor, "*batch m d_out"]:
        rows = heads.flatten(-4, -3).movedim(-3, -2).flatten(-2)
        if self.output is None:
            return rows
        out = rows @ self.output.mT
        return out if self.output_bias is None else out + self.output_bias


def in_heads(X: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the projection of each head to tokens X (..., n, d). The result is (..., heads, n, dim)."""
    rows = X @ weight.flatten(0, 1).mT
    if bias is not None:
        rows = rows + bias.flatten()
    return rows.reshape(*rows.shape[:-1], *weight.shape[:2]).movedim(-2, -3)


def _optional(name: str, given: Tensor | None, shape: tuple[int | str, ...], like: Tensor) -> Tensor | None:
    return None if given is None else as_parameter(name, given, shape, like=like)
