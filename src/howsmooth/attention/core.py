"""Softmax attention on queries, keys and values: the part that every architecture shares.

Heads are grouped: queries (..., kv_heads, group, n, key_dim) against keys (..., kv_heads, n, key_dim),
so that query heads which share a key head are one matrix product and no key is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from howsmooth.attention.visibility import Visibility

__all__ = [
    "NO_FEATURES",
    "ScoreFeatures",
    "Visible",
    "attend",
    "attention_probabilities",
    "attention_scores",
    "cap_slope",
    "differentiated",
    "row_blocks",
    "weighted_values",
]

# Attention probabilities that are formed at a time: what stays in a processor's caches, or keeps an
# accelerator busy. Memory is that of the tokens and a few times this, however long the sequence.
_ENTRIES = {"cpu": 1 << 20}
_ENTRIES_ELSEWHERE = 1 << 26
# Number of entries above which the fused kernel is the faster one on a CPU.
_FUSED_ABOVE = 1 << 16

# Fewest rows of a block of a narrow window: smaller products cost more than what they leave out.
_ROWS = 64


@runtime_checkable
class Visible(Protocol):
    """Which keys the queries see; :class:`~howsmooth.attention.visibility.Visibility`, for one."""

    def keys(self, rows: slice) -> slice:
        """Return a range that holds all keys which the queries ``rows`` see."""

    def block(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Bool[Tensor, "rows keys"] | None:
        """Return what the queries ``rows`` see of ``keys``; None if all of it."""


@dataclass(frozen=True, eq=False)
class ScoreFeatures:
    """What models do to scores beyond a mask.

    Parameters
    ----------
    softcap
        c: the scaled scores s become c tanh(s / c), before everything else.
    bias
        Numbers that are added then, (kv_heads or 1, group or 1, m, n); with one axis more in front where
        they differ between the leading axes of the queries, flattened to one.
    sinks
        (kv_heads, group): the score, in every row, of one further key without value.
    seen
        Which keys are seen, in a shape as ``bias``: for masks that differ between heads or leading axes.

    """

    softcap: float | None = None
    bias: Float[Tensor, "*lead b_heads b_group m n"] | None = None
    sinks: Float[Tensor, "kv_heads group"] | None = None
    seen: Bool[Tensor, "*s_lead s_heads s_group m n"] | None = None

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return any(t is not None for t in (self.softcap, self.bias, self.sinks, self.seen))

    def block(self, lead: Tensor, heads: Tensor, rows: slice, keys: slice) -> ScoreFeatures:
        """Return what concerns some rows and keys of some key heads of some members of the leading axis."""
        place = (lead, heads, rows, keys)
        sinks = None if self.sinks is None else self.sinks[heads]
        return ScoreFeatures(self.softcap, _block(self.bias, *place), sinks, _block(self.seen, *place))

    def applied(self, scores: Float[Tensor, "*lead m n"]) -> Float[Tensor, "*lead m n"]:
        """Return the scores with the cap and the bias, −∞ where a key is not seen."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias
        return scores if self.seen is None else scores.masked_fill(~self.seen, float("-inf"))

    def with_sinks(self, scores: Float[Tensor, "*lead m n"]) -> Float[Tensor, "*lead m columns"]:
        """Return the scores with a last column for the sinks, if there are any."""
        if self.sinks is None:
            return scores
        column = self.sinks[..., None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column.to(scores.dtype)), dim=-1)


NO_FEATURES = ScoreFeatures()


def _block(t: Tensor | None, lead: Tensor, heads: Tensor, rows: slice, keys: slice) -> Tensor | None:
    if t is None:
        return None
    t = t[..., rows, keys]  # first: an index by tensors copies
    if t.ndim == 5:
        return t[0] if t.shape[0] == 1 else t[lead, heads if t.shape[1] > 1 else 0]
    return t[heads] if t.shape[0] > 1 else t


def cap_slope(scores: Float[Tensor, "*lead m n"], cap: float) -> Float[Tensor, "*lead m n"]:
    """Return the derivative 1 − tanh²(s/c) of s ↦ c tanh(s/c), right in all its digits where it is small."""
    decay = torch.exp(-2 * scores.abs() / cap)
    return 4 * decay / (1 + decay) ** 2


def attention_scores(
    q: Float[Tensor, "*batch kv_heads group m key_dim"],
    k: Float[Tensor, "*batch kv_heads n key_dim"],
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    offsets: Float[Tensor, "*#heads n"] | None = None,
    features: ScoreFeatures = NO_FEATURES,
) -> Float[Tensor, "*batch kv_heads group m n"]:
    """Return scale · q kᵀ + offsets, −∞ where the key is not visible: the softmax of its rows is P.

    ``offsets`` are added to the columns: log-weights of a measure (C.4), or terms of the keys. ``features``
    change the scores before.
    """
    group, m = q.shape[-3], q.shape[-2]
    scores = (scale * (q.flatten(-3, -2) @ k.mT)).reshape(*k.shape[:-2], group, m, k.shape[-2])
    scores = features.applied(scores)
    if offsets is not None:
        scores = scores + offsets.to(scores.dtype)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def attention_probabilities(
    q: Float[Tensor, "*batch kv_heads group m key_dim"],
    k: Float[Tensor, "*batch kv_heads n key_dim"],
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    offsets: Float[Tensor, "*#heads n"] | None = None,
    features: ScoreFeatures = NO_FEATURES,
) -> Float[Tensor, "*batch kv_heads group m n"]:
    """P_ij ∝ exp(scale · ⟨q_i, k_j⟩ + offset_j) over the visible keys j (Definitions 2.1 and C.4).

    With sinks rows sum to less than one.
    """
    scores = attention_scores(q, k, scale, visible, offsets, features)
    return torch.softmax(features.with_sinks(scores), dim=-1)[..., : scores.shape[-1]]


def weighted_values(
    p: Float[Tensor, "*batch kv_heads group m n"], v: Float[Tensor, "*batch kv_heads n value_dim"]
) -> Float[Tensor, "*batch kv_heads group m value_dim"]:
    """Σ_j P_ij v_j for each head."""
    return (p.flatten(-3, -2) @ v).reshape(*p.shape[:-1], v.shape[-1])


def row_blocks(
    lead: int, group: int, m: int, n: int, device: torch.device, window: int | None = None
) -> list[tuple[slice, list[slice]]]:
    """Cut ``lead`` times (group, m, n) entries into blocks: some of the lead at a time, and of their rows.

    A ``window`` leaves few keys to each row; blocks of few rows keep it so.
    """
    entries = _ENTRIES.get(device.type, _ENTRIES_ELSEWHERE)
    longest = m if window is None else min(m, max(window, _ROWS))
    keys = n if window is None else min(n, longest + 2 * (window - 1))
    length = max(1, min(longest, entries // (group * keys)))
    heads = max(1, entries // (group * length * keys))
    rows = [slice(i, min(i + length, m)) for i in range(0, m, length)]
    return [(slice(h, h + heads), rows) for h in range(0, lead, heads)]


def attend(
    q: Float[Tensor, "*batch kv_heads group m key_dim"],
    k: Float[Tensor, "*batch kv_heads n key_dim"],
    v: Float[Tensor, "*batch kv_heads n value_dim"],
    scale: float,
    visible: Visible,
    offsets: Float[Tensor, "*#heads 1 n"] | None = None,
    *,
    features: ScoreFeatures = NO_FEATURES,
) -> Float[Tensor, "*batch kv_heads group m value_dim"]:
    """Σ_j P_ij v_j, with P formed in blocks of heads or of rows: memory O(n d), not n².

    With a window w it takes time O(n w). Where all keys are visible, or the causal triangle and there are no
    offsets, long sequences on a CPU go through PyTorch's fused kernel, unless there are ``features``, or a
    derivative is asked for: it lacks some. A backward pass through the blocks keeps them.
    """
    triangle, window = None, None
    if isinstance(visible, Visibility):
        triangle, window = visible.triangle, visible.window
        if triangle and offsets is not None:
            triangle = None
    group, m, n = q.shape[-3], q.shape[-2], k.shape[-2]
    lead, kv_heads = k.shape[:-2], k.shape[-3]
    if offsets is not None:
        offsets = offsets.expand(*lead, group, 1, n).flatten(0, -4)
    q, k, v = q.flatten(0, -4), k.flatten(0, -3), v.flatten(0, -3)
    long = len(k) * group * m * n > _FUSED_ABOVE and q.device.type == "cpu"
    inputs = (q, k, v) if offsets is None else (q, k, v, offsets)
    if long and triangle is not None and not features and not any(differentiated(t) for t in inputs):
        return _fused(q, k, v, scale, offsets, causal=bool(triangle)).reshape(*lead, group, m, -1)
    # One tensor for all rows: small results between large blocks would leave holes in the memory that the
    # next block does not fit into.
    out = q.new_empty((len(k), group, m, v.shape[-1]))
    for some, all_rows in row_blocks(len(k), group, m, n, q.device, window):
        members = torch.arange(len(k), device=q.device)[some]
        outer, heads = members // kv_heads, members % kv_heads
        for rows in all_rows:
            keys = visible.keys(rows)
            seen = visible.block(rows, keys, q.device)
            terms = None if offsets is None else offsets[some, ..., keys]
            part = features.block(outer, heads, rows, keys)
            p = attention_probabilities(q[some, :, rows], k[some, keys], scale, seen, terms, part)
            out[some, :, rows] = weighted_values(p, v[some, keys])
    return out.reshape(*lead, group, m, -1)


def _fused(
    q: Float[Tensor, "lead group m key_dim"],
    k: Float[Tensor, "lead n key_dim"],
    v: Float[Tensor, "lead n value_dim"],
    scale: float,
    offsets: Float[Tensor, "lead group 1 n"] | None,
    *,
    causal: bool,
) -> Float[Tensor, "lead group m value_dim"]:
    """Return the same by PyTorch's flash kernel for the CPU, which takes keys and values of one size."""
    width, value_dim = max(k.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    mask = None if offsets is None else offsets.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
    k, v = (t[:, None].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    # Other kernels than this one would form n × n matrices.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out[..., :value_dim]


def differentiated(t: Tensor) -> bool:
    """Tell whether a derivative with respect to ``t`` may be asked for, in any mode of PyTorch."""
    # In this order: within torch.func.vmap a dual cannot be taken apart.
    return (
        t.requires_grad
        or torch._C._functorch.is_functorch_wrapped_tensor(t)
        or forward_ad.unpack_dual(t).tangent is not None
    )
