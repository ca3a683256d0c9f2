"""Hooks that read, and optionally replace, the softmax attentions that a module computes.

A module that dispatches through transformers' attention interface hands over its queries, keys and values
before any score is computed, and before key heads are repeated. The softmax attentions of all other modules
are found by the :class:`~howsmooth.models.tracing.softmax_tracer.SoftmaxTracer`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from howsmooth.errors import CaptureError
from howsmooth.models.measurement_mode import own_attention
from howsmooth.models.tracing.softmax_call import SoftmaxCall, plain_attention
from howsmooth.models.tracing.softmax_tracer import SoftmaxTracer

__all__ = ["intercept_softmaxes"]

#: Keyword arguments of attention functions that have no effect in one forward pass without cache or dropout.
#: ``sliding_window`` is among them because the mask of the call already contains the window.
_WITHOUT_EFFECT = frozenset({
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "position_ids",
    "return_dict", "sliding_window", "use_cache",
})  # fmt: skip

#: Keyword arguments that say which keys each query sees, chosen from the tokens (data-dependent sparsity).
_SPARSE = frozenset({"block_indices", "indices"})


@contextlib.contextmanager
def intercept_softmaxes(
    module: nn.Module,
    on_softmax: Callable[[SoftmaxCall], Tensor | None],
    *,
    implementation: str | None,
    compute: bool = True,
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
        # Without a mask, SDPA is causal if the module says so; the eager implementation then hides nothing.
        causal = keywords.pop("is_causal", None)
        causal = getattr(module, "is_causal", True) if causal is None else causal
        causal = implementation.startswith("sdpa") and bool(causal)
        with torch._C.DisableTorchFunction():  # hide this computation from the tracer
            call = _interface_call(query, key, value, attention_mask, scaling, keywords, causal=causal)
            if compute:
                zeros = query.shape[:-1] + value.shape[-1:]
                done = query.new_zeros(zeros) if call.obstacle else plain_attention(call)
                call = replace(call, output=done)
            other = on_softmax(call)
        output = call.output if other is None else other
        if output is None:
            raise CaptureError(f"{type(module).__name__}: {call.obstacle or 'its output was not computed'}.")
        return output.transpose(-3, -2).contiguous(), None

    with own_attention(module, attend), tracer:
        yield


@contextlib.contextmanager
def _flex_is_replaced() -> Iterator[None]:
    """Return a context manager that lets ``flex_attention`` be called on a CPU with tensors that need
    gradients. This is safe because its output is replaced before it is computed.
    """
    own = flex_attention._validate_device
    flex_attention._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        flex_attention._validate_device = own


def _interface_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    keywords: dict[str, Any],
    *,
    causal: bool,
) -> SoftmaxCall:
    """Describe a call of transformers' attention interface. ``causal`` counts only if there is no mask."""
    bias, cap = keywords.pop("position_bias", None), keywords.pop("softcap", None)
    sinks = [t for t in (keywords.pop("s_aux", None), keywords.pop("sinks", None)) if t is not None]
    obstacle = _obstacle(query, key, value, keywords)
    if sinks and sinks[0].numel() != query.shape[1]:
        obstacle = obstacle or "its sinks are not one number for each head"
    if obstacle:
        return SoftmaxCall(query=query, key=key, value=value, kind="interface", obstacle=obstacle)
    causal = causal and mask is None
    if isinstance(bias, Tensor):
        if mask is None:
            mask = bias
        else:
            mask = torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else bias + mask
    sink = sinks[0].reshape(-1) if sinks else None
    return SoftmaxCall.given(
        query, key, scale, mask, causal=causal, value=value, softcap=cap, sinks=sink, kind="interface"
    )


def _obstacle(query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> str:
    """Return why a call of transformers' attention interface cannot be read, or "" if it can."""
    for name, given in keywords.items():
        plain = isinstance(given, bool | int | float | str | tuple | list | dict)
        if given is None or name in _WITHOUT_EFFECT or (plain and not given):  # switched off
            continue
        if name in _SPARSE:
            return f"data-dependent sparsity ({name})"
        return f"its attention is given {name}, which is not known"
    shapes = [tuple(t.shape) for t in (query, key, value)]
    four = all(len(shape) == 4 for shape in shapes)
    if four and not query.shape[1] % key.shape[1] and key.shape[1] == value.shape[1]:
        return ""
    return (
        f"its queries, keys and values have shapes {shapes[0]}, {shapes[1]}, {shapes[2]} where (batch, "
        "heads, n, head_dim) with grouped keys is expected"
    )
