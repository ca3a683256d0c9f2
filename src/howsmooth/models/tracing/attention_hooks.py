"""Hooks that read, and optionally replace, the softmax attentions that a module computes.

A module that dispatches through transformers' attention interface hands over its queries, keys and values
before any score is computed, and before key heads are repeated. The softmax attentions of all other modules
are found by the :class:`~howsmooth.models.tracing.softmax_tracer.SoftmaxTracer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from howsmooth.errors import CaptureError
from howsmooth.models.measurement_mode import own_attention
from howsmooth.models.tracing.softmax_tracer import (
    SoftmaxCall,
    SoftmaxTracer,
    capped_scores,
    softmax_values,
    triangle,
)

__all__ = ["OnSoftmax", "intercept_softmaxes", "plain_attention"]

OnSoftmax = Callable[[SoftmaxCall], Tensor | None]

#: Keyword arguments of attention functions that have no effect in one forward pass without cache or dropout.
#: ``sliding_window`` is among them because the mask of the call already contains the window.
_WITHOUT_EFFECT = frozenset({
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "position_ids",
    "return_dict", "sliding_window", "use_cache",
})  # fmt: skip

# Number of scores that are computed at a time; it bounds the memory of long sequences.
_ENTRIES = 1 << 22

#: Keyword arguments that say which keys each query sees, chosen from the tokens (data-dependent sparsity).
_SPARSE = frozenset({"block_indices", "indices"})


@contextlib.contextmanager
def intercept_softmaxes(
    module: nn.Module, on_softmax: OnSoftmax, *, implementation: str | None, compute: bool = True
) -> Iterator[None]:
    """Return a context manager that calls ``on_softmax`` with every softmax attention that ``module``
    computes.

    Parameters
    ----------
    module
        The module that will be called within the context.
    on_softmax
        Called with each softmax attention, in the order of the forward pass. A tensor that it returns
        replaces the output of that attention.
    implementation
        The name of the user's attention implementation, which decides what a missing mask means. None leaves
        the attention interface alone and only traces the module: some modules choose their code by the name
        of the implementation.
    compute
        False if ``on_softmax`` replaces every output: the attentions of the interface are then not computed.

    """
    tracer = SoftmaxTracer(on_softmax, ahead=not compute)
    if implementation is None:
        with tracer, _flex_is_replaced() if not compute else contextlib.nullcontext():
            yield
        return

    # The parameters have the names that transformers' own attention functions use: some layers pass them by
    # name.
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **keywords: Any) -> tuple[Tensor, None]:  # fmt: skip
        with torch._C.DisableTorchFunction():  # hide this computation from the tracer
            softmax = _interface_call(
                module, query, key, value, attention_mask, scaling, keywords, implementation, compute
            )
            other = on_softmax(softmax)
        output = softmax.output if other is None else other
        if output is None:
            raise CaptureError(
                f"{type(module).__name__}: {softmax.obstacle or 'its output was not computed'}."
            )
        return output.transpose(-3, -2).contiguous(), None

    with own_attention(module, attend), tracer:
        yield


@contextlib.contextmanager
def _flex_is_replaced() -> Iterator[None]:
    """Return a context manager in which ``flex_attention``, whose output is replaced before it is computed,
    takes tensors that need gradients also on a processor, where it has none.
    """
    own = flex_attention._validate_device
    flex_attention._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        flex_attention._validate_device = own


def _interface_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    keywords: dict[str, Any],
    implementation: str,
    compute: bool,
) -> SoftmaxCall:
    causal = keywords.pop("is_causal", None)
    bias, cap = keywords.pop("position_bias", None), keywords.pop("softcap", None)
    sinks = [t for t in (keywords.pop("s_aux", None), keywords.pop("sinks", None)) if t is not None]
    obstacle = _unread(keywords) or _shapes(query, key, value)
    # Without a mask, SDPA is causal if the module says so; the eager implementation then hides nothing.
    causal = getattr(module, "is_causal", True) if causal is None else causal
    ordered = mask is None and implementation.startswith("sdpa") and bool(causal)
    if ordered and query.shape[-2] != key.shape[-2]:
        mask, ordered = triangle(query, key), False
    if isinstance(bias, Tensor):
        mask = bias if mask is None else _added(bias, mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sink = sinks[0].reshape(-1) if sinks and sinks[0].numel() == query.shape[1] else None
    if sinks and sink is None:
        obstacle = obstacle or "its sinks are not one number for each head"
    if obstacle or not compute:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1]) if compute else None
        return SoftmaxCall(query, key, value, scale, None, None, None, output, None, "interface", obstacle)
    output = plain_attention(query, key, value, mask, scale, cap, sink, causal=ordered)
    return SoftmaxCall(query, key, value, scale, mask, cap, sink, output, None, "interface", "", ordered)


def _unread(keywords: dict[str, Any]) -> str:
    for name, value in keywords.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, bool | int | float | str | tuple | list | dict) and not value:
            continue  # switched off
        if name in _SPARSE:
            return f"data-dependent sparsity ({name})"
        return f"its attention is given {name}, which is not known"
    return ""


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    shapes = [tuple(t.shape) for t in (query, key, value)]
    if (
        any(len(shape) != 4 for shape in shapes)
        or query.shape[1] % key.shape[1]
        or key.shape[1] != value.shape[1]
    ):
        return (
            f"its queries, keys and values have shapes {shapes[0]}, {shapes[1]}, {shapes[2]} where (batch, "
            "heads, n, head_dim) with grouped keys is expected"
        )
    return ""


def _added(bias: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Compute softmax attention (batch, heads, m, value_dim) in the dtype of the operands.

    The formula is written out here a second time, because captured maps of the library are compared with it.
    Long sequences use PyTorch's fused kernel, or are computed in blocks of heads and query rows.
    """
    heads, m, n = query.shape[-3], query.shape[-2], key.shape[-2]
    groups = heads // key.shape[-3]
    key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    batch = query.shape[:-3].numel()
    # As many heads as fit into _ENTRIES scores, or else one head in blocks of query rows.
    together = max(1, min(heads, _ENTRIES // (batch * m * n)))
    length = max(1, min(m, _ENTRIES // (batch * together * n)))
    if together == heads and length == m:
        return _block(query, key, value, mask, scale, softcap, sinks, slice(m) if causal else None)
    plain = mask is None and softcap is None and sinks is None
    if plain and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # it needs no (m, n) matrix
            return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    whole = None if mask is None else mask.expand(*query.shape[:-1], n)
    out = value.new_empty((*query.shape[:-1], value.shape[-1]))
    for h in range(0, heads, together):
        some = slice(h, h + together)
        sink = None if sinks is None else sinks[some]
        for start in range(0, m, length):
            rows = slice(start, min(start + length, m))
            keys = slice(min(n, rows.stop) if causal else n)
            part = None if whole is None else whole[..., some, rows, keys]
            operands = query[..., some, rows, :], key[..., some, keys, :], value[..., some, keys, :]
            out[..., some, rows, :] = _block(*operands, part, scale, softcap, sink, rows if causal else None)
    return out


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    causal_rows: slice | None,
) -> Tensor:
    """Compute softmax attention for a block of query rows.

    If the attention is causal, ``causal_rows`` holds the positions of the queries.
    """
    scores = capped_scores(query, key, scale, softcap)
    if causal_rows is not None:
        order = torch.arange(max(scores.shape[-1], causal_rows.stop), device=scores.device)
        scores = scores.masked_fill(order[: scores.shape[-1]] > order[causal_rows, None], float("-inf"))
    return softmax_values(scores, value, mask, sinks)
