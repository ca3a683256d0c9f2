"""One softmax attention with its operands, which can also be computed from them in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["HIDES", "SoftmaxCall", "all_true", "disagreement", "plain_attention"]

HIDES = -9000.0  # a number at or below this, written over a score or added to it, hides the key
_ROWS = 32  # number of output rows that are recomputed to check the operands that were read
_ENTRIES = 1 << 22  # number of scores that are computed at a time; it bounds the memory of long sequences


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftmaxCall:
    """One softmax attention: ``output = softmax(softcap · tanh(scale · q kᵀ / softcap) + mask) v``.

    The tensors are the model's own, or views of them: the model may change them after the call. ``lead``
    stands for the batch axis and, in models with windows, the axis of windows. The axis of heads has length
    one if the model's code has no such axis.
    """

    value: Tensor  # (*lead, kv_heads, n, value_dim)
    query: Tensor | None = None  # (*lead, heads, m, key_dim)
    key: Tensor | None = None  # (*lead, kv_heads, n, key_dim)
    scale: float = 1.0
    mask: Tensor | None = None  # additive, or boolean, True where visible; broadcasts to (*lead, heads, m, n)
    softcap: float | None = None
    sinks: Tensor | None = None  # (heads,)
    output: Tensor | None = None  # (*lead, heads, m, value_dim); None if the tracer runs ``ahead``
    probabilities: Tensor | None = None  # (*lead, heads, m, n); None if the code never computes them
    kind: str = "softmax"  # or "sdpa", or "interface" (see ``attention_hooks``)
    obstacle: str = ""  # why the operands could not be read, in a phrase; "" if they were read
    causal: bool = False  # besides the mask, query i sees only the keys j <= i; this needs no (m, n) mask

    @classmethod
    def given(
        cls,
        query: Tensor,
        key: Tensor,
        scale: float | None,
        mask: Tensor | None,
        *,
        causal: bool,
        **rest: Any,
    ) -> SoftmaxCall:
        """Describe an attention whose operands were passed by name. Scale and causal order have the meaning
        that they have in ``scaled_dot_product_attention``.
        """
        m, n = query.shape[-2], key.shape[-2]
        if causal and m != n:
            order = torch.ones(m, n, dtype=torch.bool, device=query.device).tril()
            mask, causal = order if mask is None else torch.where(order, mask, -math.inf), False
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        return cls(query=query, key=key, scale=scale, mask=mask, causal=causal, **rest)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values. Queries and keys must be known."""
        assert self.query is not None
        assert self.key is not None
        return self.query, self.key, self.value


def all_true(condition: Tensor) -> bool:
    """Return True if all entries of a boolean tensor are True.

    Inside ``torch.vmap``, which hides the values, the answer is always True.
    """
    try:
        return bool(condition.all())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return True


def plain_attention(call: SoftmaxCall) -> Tensor:
    """Compute softmax attention (*lead, heads, m, value_dim) in the dtype of the operands.

    The formula is written out here a second time, because captured maps of the library are compared with it.
    Long sequences use PyTorch's fused kernel, or are computed in blocks of heads and query rows.
    """
    query, key, value = call.operands
    heads, m, n = query.shape[-3], query.shape[-2], key.shape[-2]
    groups = heads // key.shape[-3]
    key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    batch = query.shape[:-3].numel()
    # As many heads as fit into _ENTRIES scores, or else one head in blocks of query rows.
    together = max(1, min(heads, _ENTRIES // (batch * m * n)))
    rows = max(1, min(m, _ENTRIES // (batch * together * n)))
    bare = call.mask is None and call.softcap is None and call.sinks is None
    long = (together, rows) != (heads, m)
    if long and bare and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # it needs no (m, n) matrix
            return scaled_dot_product_attention(query, key, value, is_causal=call.causal, scale=call.scale)
    whole = replace(call, key=key, value=value)
    blocks = [
        [_block(whole, slice(h, h + together), slice(i, min(i + rows, m))) for i in range(0, m, rows)]
        for h in range(0, heads, together)
    ]
    return torch.cat([torch.cat(block, dim=-2) for block in blocks], dim=-3) if long else blocks[0][0]


def _block(call: SoftmaxCall, heads: slice, rows: slice) -> Tensor:
    query, key, value = call.operands
    n = key.shape[-2]
    keys = slice(min(n, rows.stop) if call.causal else n)
    scores = _scores(call, query[..., heads, rows, :], key[..., heads, keys, :])
    if call.causal:
        order = torch.arange(max(n, rows.stop), device=scores.device)
        scores = scores.masked_fill(order[keys] > order[rows, None], -math.inf)
    mask = None if call.mask is None else call.mask.expand(*query.shape[:-1], n)[..., heads, rows, keys]
    sinks = None if call.sinks is None else call.sinks[heads]
    return _softmax_values(scores, value[..., heads, keys, :], mask, sinks)


def _scores(call: SoftmaxCall, query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT * call.scale
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def _softmax_values(scores: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    n, dtype = scores.shape[-1], scores.dtype
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if boolean else scores + mask
    scores = scores.to(dtype)  # a mask of a wider dtype widens them
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(dim=-1)[..., :n] @ value


def disagreement(call: SoftmaxCall, eps: float, *, every: bool) -> str:
    """Compare the output of a softmax attention with the output computed again from its operands. Return a
    phrase that says how they differ, or "" if they agree.

    Unless ``every`` is set, a sample of the rows is compared. Rows that see no key are not compared: their
    output has no meaning. ``eps`` is the machine epsilon of the coarsest dtype in the computation.
    """
    q, k, v = call.operands
    assert call.output is not None
    mask, output = call.mask, call.output
    m = q.shape[-2]
    dtype = torch.float32
    for tensor in (q, k, v, output):
        dtype = torch.promote_types(dtype, tensor.dtype)
    with torch.no_grad(), torch._C.DisableTorchFunction():  # hide this computation from all tracers
        if m > _ROWS and not every:
            rows = torch.linspace(0, m - 1, _ROWS, device=q.device).round().long()
            q, output = q[..., rows, :], output[..., rows, :]
            mask = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        scores = _scores(call, q.to(dtype), k.to(dtype))
        size = scores.abs().max()  # the error of the weights grows with the size of the scores
        seen = torch.ones((), dtype=torch.bool, device=q.device)
        if mask is not None:
            seen = (mask if mask.dtype == torch.bool else mask > HIDES).any(-1)
        expected = _softmax_values(scores, v.to(dtype), mask, call.sinks)
        allowed = 16 * max(eps, torch.finfo(output.dtype).eps) * (1 + size) * v.abs().max().to(dtype)
        if all_true(((expected - output).abs() <= allowed) | ~seen[..., None]):
            return ""
        finite = all_true(call.output.isfinite())
    return f"its output is not {'that of the softmax of its scores' if finite else 'finite'}"
