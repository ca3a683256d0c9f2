"""Softmax attention as a function of queries, keys and values. All attention layers with a softmax have this
part in common.

Queries have shape (..., kv_heads, group, n, key_dim) and keys (..., kv_heads, n, key_dim). All query heads
that share a key head (grouped-query attention) are multiplied with it in one product, without copies of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from howsmooth.attention.masks import Visibility

__all__ = [
    "NO_FEATURES", "Keys", "Outputs", "Queries", "ScoreFeatures", "Values", "attend",
    "attention_probabilities", "attention_scores", "cap_slope", "differentiated", "row_blocks",
    "weighted_values",
]  # fmt: skip

# Number of attention probabilities in one block. On a CPU a block stays in the caches, on a GPU it is large
# enough to keep the device busy. Peak memory is a few blocks plus the tokens, for sequences of any length.
_ENTRIES = {"cpu": 1 << 20}
_ENTRIES_ELSEWHERE = 1 << 26
# Number of probabilities from which PyTorch's fused kernel is faster than blocks on a CPU.
_FUSED_ABOVE = 1 << 16

# Least number of rows in a block under a narrow window. With fewer rows, starting a product costs more than
# the masked-out keys that it avoids.
_ROWS = 64

Queries = Float[Tensor, "*batch kv_heads group m key_dim"]
Keys = Float[Tensor, "*batch kv_heads n key_dim"]
Values = Float[Tensor, "*batch kv_heads n value_dim"]
Outputs = Float[Tensor, "*batch kv_heads group m value_dim"]
Scores = Float[Tensor, "*batch kv_heads group m n"]


@dataclass(frozen=True, eq=False)
class ScoreFeatures:
    """Optional features of attention scores: soft cap, bias, masks that differ by head, and attention sinks.

    Parameters
    ----------
    softcap
        The soft cap c > 0: a scaled score s becomes c tanh(s / c). It is applied first.
    bias, seen
        Numbers added to the capped scores, and masks that differ between heads, True where the query sees the
        key: (kv_heads or 1, group or 1, m, n). If they differ along the leading axes of the queries, these
        axes are flattened into one axis in front.
    sinks
        Attention sinks, (kv_heads, group): the score of one further key, without a value, in every row.

    """

    softcap: float | None = None
    bias: Float[Tensor, "*lead b_heads b_group m n"] | None = None
    sinks: Float[Tensor, "kv_heads group"] | None = None
    seen: Bool[Tensor, "*s_lead s_heads s_group m n"] | None = None

    def __bool__(self) -> bool:
        """Return True if the scores have any of these features."""
        return any(t is not None for t in (self.softcap, self.bias, self.sinks, self.seen))

    def block(self, members: slice, kv_heads: int, rows: slice, keys: slice) -> ScoreFeatures:
        """Return the features of one block of scores. ``members`` is a range of the flattened axes (lead,
        kv_heads).
        """
        if not self:
            return self
        device = next((t.device for t in (self.bias, self.sinks, self.seen) if t is not None), None)
        chosen = torch.arange(members.start, members.stop, device=device)
        heads = chosen % kv_heads
        place = (chosen // kv_heads, heads, rows, keys)
        sinks = None if self.sinks is None else self.sinks[heads]
        return ScoreFeatures(self.softcap, _block(self.bias, *place), sinks, _block(self.seen, *place))

    def applied(self, scores: Float[Tensor, "*lead m n"]) -> Float[Tensor, "*lead m n"]:
        """Return the scores after soft cap and bias, with −∞ where the key is hidden from the query."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias
        return scores if self.seen is None else scores.masked_fill(~self.seen, float("-inf"))

    def with_sinks(self, scores: Float[Tensor, "*lead m n"]) -> Float[Tensor, "*lead m columns"]:
        """Return the scores with the sink scores appended as a last column, if there are sinks."""
        if self.sinks is None:
            return scores
        column = self.sinks[..., None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column.to(scores.dtype)), dim=-1)


NO_FEATURES = ScoreFeatures()


def _block(t: Tensor | None, lead: Tensor, heads: Tensor, rows: slice, keys: slice) -> Tensor | None:
    if t is None:
        return None
    # Slices are taken first because they make views, whereas the index tensors below copy.
    t = t[..., rows, keys]
    if t.ndim == 5:
        return t[0] if t.shape[0] == 1 else t[lead, heads if t.shape[1] > 1 else 0]
    return t[heads] if t.shape[0] > 1 else t


def cap_slope(scores: Float[Tensor, "*lead m n"], cap: float) -> Float[Tensor, "*lead m n"]:
    """Return the derivative 1 − tanh²(s/c) of the soft cap s ↦ c tanh(s/c) at the scores s.

    It is computed as 4e^{−2|s|/c} / (1 + e^{−2|s|/c})², which has no cancellation where it is small.
    """
    decay = torch.exp(-2 * scores.abs() / cap)
    return 4 * decay / (1 + decay) ** 2


def attention_scores(
    q: Queries,
    k: Keys,
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    offsets: Float[Tensor, "*#heads n"] | None = None,
    features: ScoreFeatures = NO_FEATURES,
) -> Scores:
    """Return the scores scale · q kᵀ + offsets, with −∞ where the query does not see the key.

    The softmax of a row of scores is a row of P. ``offsets`` holds one number a key: the log-weights of a
    measure (Definition C.4) or a term of the key. ``features`` are applied before the offsets.
    """
    group, m = q.shape[-3], q.shape[-2]
    scores = (scale * (q.flatten(-3, -2) @ k.mT)).reshape(*k.shape[:-2], group, m, k.shape[-2])
    scores = features.applied(scores)
    if offsets is not None:
        scores = scores + offsets.to(scores.dtype)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def attention_probabilities(
    q: Queries,
    k: Keys,
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    offsets: Float[Tensor, "*#heads n"] | None = None,
    features: ScoreFeatures = NO_FEATURES,
) -> Scores:
    """Return P_ij ∝ exp(scale · ⟨q_i, k_j⟩ + offset_j) over visible keys j (Definitions 2.1 and C.4 of Castin
    et al., 2024). With sinks, a row sums to less than one.
    """
    scores = attention_scores(q, k, scale, visible, offsets, features)
    return torch.softmax(features.with_sinks(scores), dim=-1)[..., : scores.shape[-1]]


def weighted_values(p: Scores, v: Values) -> Outputs:
    """Return the attention outputs Σ_j P_ij v_j of each head for given probabilities P."""
    return (p.flatten(-3, -2) @ v).reshape(*p.shape[:-1], v.shape[-1])


def row_blocks(
    lead: int, group: int, m: int, n: int, device: torch.device, window: int | None = None
) -> list[tuple[slice, list[slice]]]:
    """Cut attention probabilities (lead, group, m, n) into blocks of rows, each of limited size.

    Each entry of the list is a slice of ``lead`` and the slices of the m rows. Under a ``window`` blocks have
    few rows, so that the keys visible to a block are not many more than those visible to a row.
    """
    entries = _ENTRIES.get(device.type, _ENTRIES_ELSEWHERE)
    longest = m if window is None else min(m, max(window, _ROWS))
    keys = n if window is None else min(n, longest + 2 * (window - 1))
    length = max(1, min(longest, entries // (group * keys)))
    heads = max(1, entries // (group * length * keys))
    rows = [slice(i, min(i + length, m)) for i in range(0, m, length)]
    return [(slice(h, min(h + heads, lead)), rows) for h in range(0, lead, heads)]


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    scale: float,
    visible: Visibility,
    offsets: Float[Tensor, "*#heads 1 n"] | None = None,
    *,
    features: ScoreFeatures = NO_FEATURES,
) -> Outputs:
    """Return the attention outputs Σ_j P_ij v_j of each head in O(n d) memory, by forming P block by block.

    With a window w the time is O(n w). On a CPU, long sequences use PyTorch's fused kernel if no derivative
    is recorded (the kernel lacks forward mode and second derivatives), there are no ``features``, and either
    all keys are visible or the mask is causal without offsets. A backward pass through this function stores
    the probabilities of all blocks.
    """
    triangle = None if visible.triangle and offsets is not None else visible.triangle
    group, m, n = q.shape[-3], q.shape[-2], k.shape[-2]
    lead, kv_heads = k.shape[:-2], k.shape[-3]
    if offsets is not None:
        offsets = offsets.expand(*lead, group, 1, n).flatten(0, -4)
    q, k, v = q.flatten(0, -4), k.flatten(0, -3), v.flatten(0, -3)
    long = len(k) * group * m * n > _FUSED_ABOVE and q.device.type == "cpu"
    inputs = (q, k, v) if offsets is None else (q, k, v, offsets)
    if long and triangle is not None and not features and not any(differentiated(t) for t in inputs):
        return _fused(q, k, v, scale, offsets, causal=bool(triangle)).reshape(*lead, group, m, -1)
    # All results are written into one tensor. Many small results allocated between the large blocks would
    # fragment the memory, and the next block would not fit into the holes.
    out = q.new_empty((len(k), group, m, v.shape[-1]))
    for some, all_rows in row_blocks(len(k), group, m, n, q.device, visible.window):
        for rows in all_rows:
            keys = visible.keys(rows)
            seen = visible.block(rows, keys, q.device)
            terms = None if offsets is None else offsets[some, ..., keys]
            part = features.block(some, kv_heads, rows, keys)
            p = attention_probabilities(q[some, :, rows], k[some, keys], scale, seen, terms, part)
            out[some, :, rows] = weighted_values(p, v[some, keys])
    return out.reshape(*lead, group, m, -1)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, offsets: Tensor | None, *, causal: bool
) -> Float[Tensor, "lead group m value_dim"]:
    """Compute the result of :func:`attend` by PyTorch's flash attention kernel for the CPU."""
    # The kernel wants keys and values of one dimension: zeros change neither scores nor the kept outputs.
    width, value_dim = max(k.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    mask = None if offsets is None else offsets.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
    k, v = (t[:, None].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    # PyTorch's other kernels would form n × n matrices.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out[..., :value_dim]


def differentiated(t: Tensor) -> bool:
    """Return True if PyTorch may have to differentiate with respect to ``t``, because it requires gradients,
    carries a tangent or is inside a transform of torch.func.
    """
    # The order matters: within torch.func.vmap unpack_dual fails, so wrapped tensors are recognised first.
    return (
        t.requires_grad
        or torch._C._functorch.is_functorch_wrapped_tensor(t)
        or forward_ad.unpack_dual(t).tangent is not None
    )
