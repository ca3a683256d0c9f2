"""Multi-head self-attention with its parameters: Definitions 2.1, 2.2 and 2.5 of Castin et al. (2024)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.core import attention_probabilities, visible_keys, weighted_values
from howsmooth.attention.map import TokenMap, as_parameter
from howsmooth.attention.rotary import Rotary
from howsmooth.attention.weighting import Weighting
from howsmooth.errors import ArgumentError

__all__ = ["SelfAttention"]


class SelfAttention(TokenMap):
    """Multi-head softmax self-attention, X (..., n, d) -> (..., n, d_out).

    f(X)_i = W_O · concat_h( Σ_j P^h_ij (V_h x_j + b_v,h) ) + b_O with P^h the row softmax of
    scale · ⟨Q_h x_i + b_q,h, K_h x_j + b_k,h⟩ over the visible keys j.

    Parameters
    ----------
    query
        (heads, key_dim, d).
    key
        (kv_heads, key_dim, d); heads must be a multiple of kv_heads, and query head h uses key and
        value head h // (heads // kv_heads) (grouped-query attention).
    value
        (kv_heads, value_dim, d).
    output
        (d_out, heads * value_dim), or None: the heads are concatenated.
    query_bias, key_bias, value_bias, output_bias
        (heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (d_out,). Without rotary
        positions the key bias has no effect (a shift that the softmax forgets).
    scale
        Factor of the scores; 1/sqrt(key_dim) by default.
    causal
        Token i sees the tokens j <= i only (masked self-attention, Definition 2.5).
    mask
        Boolean (n, n), True where query i (row) sees key j (column); combined with ``causal`` by
        "and". It fixes the length to n. Every query must see a key.
    rotary
        Rotary positions of queries and keys; they limit the length to ``rotary.n_max``.

    Raises
    ------
    ArgumentError
        If a shape, dtype or device does not fit; the message names the argument.
    NonFiniteError
        If a parameter holds NaN or infinity.

    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        self.query = as_parameter("query", query, ("heads", "key_dim", "d"))
        self.heads, self.key_dim, d = self.query.shape
        q = self.query
        self.key = as_parameter("key", key, ("kv_heads", self.key_dim, d), like=q)
        self.kv_heads = self.key.shape[0]
        self.value = as_parameter("value", value, (self.kv_heads, "value_dim", d), like=q)
        self.value_dim = self.value.shape[1]
        if self.heads % self.kv_heads:
            raise ArgumentError(
                "key",
                expected=f"a number of key heads that divides the {self.heads} query heads",
                got=f"{self.kv_heads} key heads",
            )
        width = self.heads * self.value_dim

        def optional(name: str, given: Tensor | None, shape: tuple[int | str, ...]) -> Tensor | None:
            return None if given is None else as_parameter(name, given, shape, like=q)

        self.output = optional("output", output, ("d_out", width))
        self.query_bias = optional("query_bias", query_bias, (self.heads, self.key_dim))
        self.key_bias = optional("key_bias", key_bias, (self.kv_heads, self.key_dim))
        self.value_bias = optional("value_bias", value_bias, (self.kv_heads, self.value_dim))
        if output_bias is not None and self.output is None:
            raise ArgumentError(
                "output_bias", expected="None without an output matrix", got="a tensor", remedy="Give output."
            )
        self.output_bias = optional("output_bias", output_bias, (self.d_out,))
        self.scale = 1.0 / math.sqrt(self.key_dim) if scale is None else float(scale)
        if not math.isfinite(self.scale):
            raise ArgumentError("scale", expected="a finite number", got=str(scale))
        self.causal = bool(causal)
        self.mask = None if mask is None else _check_mask(mask, self.causal, q.device)
        if rotary is not None:
            as_parameter("rotary.cos", rotary.cos, ("n", "rot_dim"), like=q)
            if rotary.rot_dim > self.key_dim:
                raise ArgumentError(
                    "rotary", expected=f"rot_dim <= key_dim = {self.key_dim}", got=f"{rotary.rot_dim}"
                )
        self.rotary = rotary

    # ---- what it is

    @property
    def d(self) -> int:
        """Dimension of an input token."""
        return self.query.shape[2]

    @property
    def d_out(self) -> int:
        """Dimension of an output token."""
        return self.heads * self.value_dim if self.output is None else self.output.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.query.device

    def describe(self) -> str:
        """Return one phrase that says what the map is."""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}"
        if self.kv_heads != self.heads:
            heads += f" over {self.kv_heads} key/value heads"
        masking = "causal" if self.causal else "unmasked"
        if self.mask is not None:
            masking = "causal with a further mask" if self.causal else "masked"
        projected = "with output projection" if self.output is not None else "heads concatenated"
        return f"self-attention, {heads}, {masking}, {projected}"

    def __repr__(self) -> str:
        return f"SelfAttention({self.describe()}, d={self.d}, key_dim={self.key_dim}, d_out={self.d_out})"

    def check_length(self, n: int) -> None:
        """Raise ArgumentError if the mask or the rotary tables do not fit ``n`` tokens."""
        if self.mask is not None and n != self.mask.shape[0]:
            raise ArgumentError(
                "X", expected=f"n = {self.mask.shape[0]} tokens, the length of the mask", got=f"n = {n}"
            )
        if self.rotary is not None and n > self.rotary.n_max:
            raise ArgumentError(
                "X", expected=f"at most {self.rotary.n_max} tokens, the rotary positions", got=f"n = {n}"
            )

    # ---- the map

    def visible_keys(self, n: int, weighting: Weighting | None = None) -> Bool[Tensor, "n n"] | None:
        """Return which keys (columns) each query (row) sees; None if all.

        Raises
        ------
        ArgumentError
            If the map does not act on measures, because of a mask or rotary positions, or is causal and the
            weighting has no positions.

        """
        if weighting is None:
            return visible_keys(n, causal=self.causal, mask=self.mask, device=self.device)
        if self.mask is not None or self.rotary is not None:
            raise ArgumentError(
                "measure",
                expected="attention that sees tokens by their place in space, and by causal=True",
                got="a boolean mask" if self.mask is not None else "rotary positions",
                remedy="These belong to a list of tokens: call the map on tokens.",
            )
        return weighting.earlier() if self.causal else None

    def projections(
        self, X: Float[Tensor, "*batch n d"]
    ) -> tuple[
        Float[Tensor, "*batch heads n key_dim"],
        Float[Tensor, "*batch kv_heads n key_dim"],
        Float[Tensor, "*batch kv_heads n value_dim"],
    ]:
        """Return queries, keys and values of tokens X, after biases and rotary positions."""

        def project(weight: Tensor, bias: Tensor | None) -> Tensor:
            rows = X @ weight.flatten(0, 1).mT
            if bias is not None:
                rows = rows + bias.flatten()
            return rows.reshape(*rows.shape[:-1], *weight.shape[:2]).movedim(-2, -3)

        q, k = project(self.query, self.query_bias), project(self.key, self.key_bias)
        if self.rotary is not None:
            q, k = self.rotary.rotate(q), self.rotary.rotate(k)
        return q, k, project(self.value, self.value_bias)

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        visible = self.visible_keys(x.shape[-2], weighting)
        q, k, v = self.projections(x)
        q = q.unflatten(-3, (self.kv_heads, self.heads // self.kv_heads))
        log_weights = None if weighting is None else weighting.log_weights
        p = attention_probabilities(q, k, self.scale, visible, log_weights)
        heads = weighted_values(p, v).flatten(-4, -3).movedim(-3, -2).flatten(-2)
        if self.output is None:
            return heads
        out = heads @ self.output.mT
        return out if self.output_bias is None else out + self.output_bias

    # ---- related maps

    def _rebuilt(self, **changes: object) -> SelfAttention:
        names = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")
        keywords = {name: getattr(self, name) for name in (*names, "scale", "causal", "mask", "rotary")}
        return SelfAttention(**(keywords | changes))

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> SelfAttention:
        """Return the same attention with parameters of another dtype or on another device."""
        names = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")
        moved: dict[str, object] = {
            name: tensor.to(dtype=dtype, device=device)
            for name in names
            if (tensor := getattr(self, name)) is not None
        }
        if self.mask is not None:
            moved["mask"] = self.mask.to(device=device)
        if self.rotary is not None:
            moved["rotary"] = self.rotary.to(dtype=dtype, device=device)
        return self._rebuilt(**moved)

    def without_output(self) -> SelfAttention:
        """Return the same heads concatenated, before the output projection (scope ``heads``)."""
        return self._rebuilt(output=None, output_bias=None)

    def head(self, h: int) -> SelfAttention:
        """Return head ``h`` alone with its value projection only (scope ``head``: the paper's one-head map).

        Raises
        ------
        ArgumentError
            If there is no head ``h``.

        """
        if not 0 <= h < self.heads:
            raise ArgumentError("h", expected=f"a head from 0 to {self.heads - 1}", got=str(h))
        g = h // (self.heads // self.kv_heads)

        def pick(tensor: Tensor | None, index: int) -> Tensor | None:
            return None if tensor is None else tensor[index : index + 1]

        return self._rebuilt(
            query=pick(self.query, h),
            key=pick(self.key, g),
            value=pick(self.value, g),
            output=None,
            query_bias=pick(self.query_bias, h),
            key_bias=pick(self.key_bias, g),
            value_bias=pick(self.value_bias, g),
            output_bias=None,
        )


def _check_mask(mask: object, causal: bool, device: torch.device) -> Tensor:
    """Return the mask, after checking that it is boolean, square and leaves each query a key."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        got = (
            f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise ArgumentError(
            "mask",
            expected="a boolean tensor of shape (n, n), True where the query sees the key",
            got=got,
            remedy="Convert an additive mask with mask == 0.",
        )
    n = mask.shape[0]
    if mask.shape != (n, n) or n < 1:
        raise ArgumentError("mask", expected="shape (n, n)", got=f"shape {tuple(mask.shape)}")
    if mask.device != device:
        raise ArgumentError("mask", expected=f"a tensor on {device}, as query", got=str(mask.device))
    seen = mask & torch.ones_like(mask).tril_() if causal else mask
    blind = torch.nonzero(~seen.any(dim=1)).flatten()
    if blind.numel():
        raise ArgumentError(
            "mask",
            expected="at least one visible key for every query",
            got=f"query {int(blind[0])} sees none",
            remedy="Leave such tokens (padding) out of X.",
        )
    return mask
