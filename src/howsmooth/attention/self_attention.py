"""Multi-head softmax self-attention (Definitions 2.1, 2.2 and 2.5 of Castin et al., 2024)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import as_parameter
from howsmooth.attention.masks import Visibility, check_seen, check_window
from howsmooth.attention.multi_head_projections import HeadsAttention, InHeads, in_heads
from howsmooth.attention.norm_layers import LayerNorm, RMSNorm
from howsmooth.attention.rotary import Rotary
from howsmooth.attention.scaled_dot_product import Keys, ScoreFeatures, Values, attend
from howsmooth.errors import ArgumentError

__all__ = ["SelfAttention"]


class SelfAttention(HeadsAttention):
    """Multi-head softmax self-attention, X (..., n, d) -> (..., n, d_out).

    f(X)_i = W_O · concat_h( Σ_j P^h_ij (V_h x_j + b_v,h) ) + b_O, where P^h is the row softmax of
    scale · ⟨Q_h x_i + b_q,h, K_h x_j + b_k,h⟩ over the visible keys j. Optionally queries and keys are
    normalised before their product, the scores are soft-capped and then get a bias, and a sink takes a part
    of each row of P.

    Parameters
    ----------
    query
        (heads, key_dim, d).
    key
        (kv_heads, key_dim, d), where kv_heads divides heads. Query head h uses key and value head
        h // (heads // kv_heads) (grouped-query attention).
    value
        (kv_heads, value_dim, d).
    output
        (d_out, heads * value_dim), or None for concatenated heads without output projection.
    query_bias, key_bias, value_bias, output_bias
        (heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (d_out,). Without rotary
        positions, a key norm, softcap and sinks the key bias has no effect: it shifts all scores of a row
        alike.
    scale
        Factor of the scores; 1/sqrt(key_dim) by default.
    causal
        If True, token i sees only the tokens j <= i (masked self-attention, Definition 2.5).
    window
        Width w >= 1: token i sees only the tokens j with |i − j| < w (sliding-window attention). A causal
        window holds w tokens, token i among them. Time grows with n w, not n².
    mask
        Boolean (n, n), True where query i (row) may see key j (column). ``causal`` and ``window`` apply as
        well. The mask fixes the length to n. Every query must see a key.
    rotary
        Rotary position embedding of queries and keys; it limits the length to ``rotary.n_max``.
    score_bias
        Finite numbers (heads, n, n), or (1, n, n) for all heads alike, added to the score of query i (row)
        and key j (column), such as ALiBi or a relative position bias. They fix the length to n.
    softcap
        Soft cap c > 0: a score s becomes c · tanh(s / c), before bias and mask, as in Gemma 2.
    sinks
        Attention sinks (heads,), as in gpt-oss: each row of the softmax contains one further score, the sink
        of the head, whose key has no value. P_ij = e^{S_ij} / (e^{sink} + Σ_l e^{S_il}), so rows sum to less
        than one.
    query_norm, key_norm
        LayerNorm or RMSNorm of the queries and keys, after their biases and before rotary positions. A norm
        of dimension key_dim acts on each head separately (Qwen 3). A norm of dimension heads * key_dim for
        queries, kv_heads * key_dim for keys, acts on the concatenated heads (OLMo 2).

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
        window: int | None = None,
        mask: Tensor | None = None,
        rotary: Rotary | None = None,
        score_bias: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        query_norm: object = None,
        key_norm: object = None,
    ) -> None:
        super().__init__(query, key, value, output, query_bias, key_bias, value_bias, output_bias, scale)
        self.causal = bool(causal)
        self.window = check_window(window)
        self.mask = None if mask is None else _check_mask(mask, self.causal, self.window, self.device)
        if rotary is not None:
            as_parameter("rotary.cos", rotary.cos, ("n", "rot_dim"), like=self.query)
            if rotary.rot_dim > self.key_dim:
                raise ArgumentError(
                    "rotary", expected=f"rot_dim <= key_dim = {self.key_dim}", got=f"{rotary.rot_dim}"
                )
        self.rotary = rotary
        self.score_bias = None if score_bias is None else self._check_score_bias(score_bias)
        self.softcap = None if softcap is None else float(softcap)
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ArgumentError("softcap", expected="a finite number > 0, or None", got=str(softcap))
        self.sinks = None if sinks is None else as_parameter("sinks", sinks, (self.heads,), like=self.query)
        self.query_norm = self._check_norm("query_norm", query_norm, self.heads)
        self.key_norm = self._check_norm("key_norm", key_norm, self.kv_heads)

    def _check_norm(self, name: str, norm: object, heads: int) -> LayerNorm | RMSNorm | None:
        if norm is None:
            return None
        if not isinstance(norm, LayerNorm | RMSNorm):
            raise ArgumentError(name, expected="a LayerNorm or RMSNorm, or None", got=type(norm).__name__)
        as_parameter(f"{name}.weight", norm.weight, ("d",), like=self.query)
        if norm.d not in (self.key_dim, heads * self.key_dim):
            raise ArgumentError(
                name,
                expected=f"dimension {self.key_dim}, of one head, or {heads * self.key_dim}, of all heads",
                got=f"dimension {norm.d}",
            )
        return norm

    def _check_score_bias(self, given: Tensor) -> Tensor:
        bias = as_parameter("score_bias", given, ("heads", "n", "n"), like=self.query)
        if bias.shape[0] not in (1, self.heads) or bias.shape[1] != bias.shape[2]:
            raise ArgumentError(
                "score_bias",
                expected=f"shape ({self.heads}, n, n) or (1, n, n)",
                got=f"shape {tuple(bias.shape)}",
            )
        if self.mask is not None and self.mask.shape[0] != bias.shape[1]:
            raise ArgumentError(
                "score_bias",
                expected=f"n = {self.mask.shape[0]}, the length of the mask",
                got=f"n = {bias.shape[1]}",
            )
        return bias

    # ---- description

    @property
    def features(self) -> ScoreFeatures:
        """The features of the scores, with the axis of heads split into (kv_heads, heads per key head)."""
        bias = self.score_bias
        if bias is not None:
            bias = bias[None] if bias.shape[0] == 1 else bias.unflatten(0, (self.kv_heads, -1))
        sinks = None if self.sinks is None else self.sinks.unflatten(0, (self.kv_heads, -1))
        return ScoreFeatures(self.softcap, bias, sinks)

    def feature_names(self) -> tuple[str, ...]:
        """Return the names of features by which scores differ from inner products of projections."""
        named = {
            "a norm of queries": self.query_norm,
            "a norm of keys": self.key_norm,
            "soft-capped scores": self.softcap,
            "a score bias": self.score_bias,
            "sinks": self.sinks,
        }
        return tuple(name for name, there in named.items() if there is not None)

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        rules = ["causal"] if self.causal else []
        if self.window is not None:
            rules.append(f"sliding window {self.window}")
        if self.mask is not None:
            rules.append("with a further mask" if rules else "masked")
        masking = " ".join(rules) if self.window is None else ", ".join(rules)
        return ", ".join((self._described("self-attention", masking or "unmasked"), *self.feature_names()))

    def check_length(self, n: int) -> None:
        """Raise ArgumentError if the mask, the score bias or the rotary tables do not fit ``n`` tokens."""
        for name, rows in (("mask", self.mask), ("score bias", self.score_bias)):
            if rows is not None and n != rows.shape[-1]:
                expected = f"n = {rows.shape[-1]} tokens, the length of the {name}"
                raise ArgumentError("X", expected=expected, got=f"n = {n}")
        if self.rotary is not None and n > self.rotary.n_max:
            raise ArgumentError(
                "X",
                expected=f"at most {self.rotary.n_max} tokens, the number of rotary positions",
                got=f"n = {n}",
                remedy="A captured layer has the positions of its input: give a longer input.",
            )

    # ---- the map

    def visibility(self, n: int, weighting: Weighting | None = None) -> Visibility:
        """Return the mask of n tokens or, with a weighting, of the n atoms of a measure.

        Raise ArgumentError for a measure if the attention has a window, a mask, rotary positions, a score
        bias or sinks, or if it is causal and the atoms have no positions.
        """
        if weighting is None:
            return Visibility(n, self.causal, self.window, self.mask)
        named = {
            "a window": self.window,
            "a boolean mask": self.mask,
            "rotary positions": self.rotary,
            "a score bias": self.score_bias,
            "sinks": self.sinks,  # the weight of a sink depends on the number of tokens
        }
        got = [name for name, there in named.items() if there is not None]
        if got:
            raise ArgumentError(
                "measure",
                expected="attention that depends on positions in no other way than by causal=True",
                got=" and ".join(got),
                remedy="These settings are defined for sequences: call the map on tokens.",
            )
        return weighting.visibility(causal=self.causal)

    def visible_keys(self, n: int, weighting: Weighting | None = None) -> Bool[Tensor, "n n"] | None:
        """Return the mask of :meth:`visibility` as a matrix (n, n), True where the query (row) sees the key
        (column), or None if nothing is masked. Raises the same errors.
        """
        return self.visibility(n, weighting).whole(self.device)

    def projections(self, X: Float[Tensor, "*batch n d"]) -> tuple[InHeads, Keys, Values]:
        """Return the queries, keys and values of tokens X, after biases, norm layers and rotary positions."""
        q, k, v = self._project(X)
        return *self._placed(q, k), v

    def queries_and_keys(self, X: Float[Tensor, "*batch n d"]) -> tuple[InHeads, Keys]:
        """Return the queries and keys of tokens X, after biases, norm layers and rotary positions."""
        return self._placed(in_heads(X, self.query, self.query_bias), in_heads(X, self.key, self.key_bias))

    def _placed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the norm layers and the rotary positions of the attention, if any, to queries and keys."""
        q, k = _normed(q, self.query_norm), _normed(k, self.key_norm)
        return (q, k) if self.rotary is None else (self.rotary.rotate(q), self.rotary.rotate(k))

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        visible = self.visibility(x.shape[-2], weighting)
        q, k, v = self.projections(x)
        log_weights = None if weighting is None else weighting.log_weights[None, None]
        heads = attend(self._grouped(q), k, v, self.scale, visible, log_weights, features=self.features)
        return self._projected(heads)

    # ---- related maps

    def without_output(self) -> SelfAttention:
        """Return the attention without its output projection: the concatenated heads (scope ``heads``)."""
        return self._rebuilt(output=None, output_bias=None)

    def head(self, h: int) -> SelfAttention:
        """Return one head as a separate attention layer, without the output projection (scope ``head``): the
        single-head attention of Castin et al. (2024).

        Raises
        ------
        ArgumentError
            If there is no head ``h``, or one norm acts on the queries or keys of all heads together.

        """
        if not 0 <= h < self.heads:
            raise ArgumentError("h", expected=f"a head from 0 to {self.heads - 1}", got=str(h))
        for name, norm in (("query_norm", self.query_norm), ("key_norm", self.key_norm)):
            if norm is not None and norm.d != self.key_dim:
                raise ArgumentError(
                    name,
                    expected="norms that act on each head separately, to take one head alone",
                    got="a norm of all heads together",
                    remedy="Take all heads, with without_output().",
                )
        g = h // (self.heads // self.kv_heads)

        def pick(tensor: Tensor | None, index: int) -> Tensor | None:
            return None if tensor is None else tensor[index : index + 1]

        shared = self.score_bias is not None and self.score_bias.shape[0] == 1

        return self._rebuilt(
            query=pick(self.query, h),
            key=pick(self.key, g),
            value=pick(self.value, g),
            output=None,
            query_bias=pick(self.query_bias, h),
            key_bias=pick(self.key_bias, g),
            value_bias=pick(self.value_bias, g),
            output_bias=None,
            score_bias=self.score_bias if shared else pick(self.score_bias, h),
            sinks=pick(self.sinks, h),
        )


def _normed(t: InHeads, norm: LayerNorm | RMSNorm | None) -> InHeads:
    """Apply a norm layer to queries or keys, either to each head or to the concatenated heads."""
    if norm is None:
        return t
    if norm.d == t.shape[-1]:
        return norm._forward(t)
    rows = t.transpose(-2, -3)
    return norm._forward(rows.flatten(-2)).reshape(rows.shape).transpose(-2, -3)


def _check_mask(mask: object, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return the mask after checking that it is boolean and square and that every query sees a key."""
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
    check_seen(mask, causal, window)
    return mask
