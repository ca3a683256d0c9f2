"""The softmax cores of a module, seen and replaced: through transformers' attention interface, or without.

A module that dispatches through the interface hands over queries, keys and values before any score is
formed, key heads not repeated; this road is taken where there is one. All others are watched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from howsmooth.errors import CaptureError
from howsmooth.models.measurement_mode import own_attention
from howsmooth.models.tracing.softmax_tracer import CoreCall, Watch, capped_scores, softmax_values, triangle

__all__ = ["OnCore", "intercepted", "plain_attention"]

OnCore = Callable[[CoreCall], Tensor | None]

#: Keywords of attention functions that change nothing in a single pass without cache or dropout. The mask
#: that comes with the call holds the window already.
_WITHOUT_EFFECT = frozenset({
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "position_ids",
    "return_dict", "sliding_window", "use_cache",
})  # fmt: skip

# Scores that are formed at a time.
_ENTRIES = 1 << 22

#: Keywords that choose keys by the tokens.
_SPARSE = frozenset({"block_indices", "indices"})


@contextlib.contextmanager
def intercepted(
    module: nn.Module, on_core: OnCore, *, implementation: str | None, compute: bool = True
) -> Iterator[None]:
    """Within the context every core of ``module`` is shown to ``on_core``, which may return another output.

    Parameters
    ----------
    module
        Anything that is called within the context.
    on_core
        What is told of each core, in order.
    implementation
        The user's attention implementation: it decides what a missing mask means. None: the module does not
        go through the interface, and is only watched; some read the name to choose their code.
    compute
        False: ``on_core`` replaces every output, so those of the interface need not be computed.

    """
    watch = Watch(on_core, ahead=not compute)
    if implementation is None:
        with watch:
            yield
        return

    # The parameters have the names of transformers' own attention functions: some layers pass them by name.
    def attend(owner: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **keywords: Any) -> tuple[Tensor, None]:  # fmt: skip
        with torch._C.DisableTorchFunction():  # the watch is not to see what is computed here
            core = _core(owner, query, key, value, attention_mask, scaling, keywords, implementation, compute)
            other = on_core(core)
        output = core.output if other is None else other
        if output is None:
            raise CaptureError(f"{type(owner).__name__}: {core.obstacle or 'its output was not computed'}.")
        return output.transpose(-3, -2).contiguous(), None

    with own_attention(module, attend), watch:
        yield


def _core(
    owner: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    keywords: dict[str, Any],
    implementation: str,
    compute: bool,
) -> CoreCall:
    causal = keywords.pop("is_causal", None)
    bias, cap = keywords.pop("position_bias", None), keywords.pop("softcap", None)
    sinks = [t for t in (keywords.pop("s_aux", None), keywords.pop("sinks", None)) if t is not None]
    obstacle = _unread(keywords) or _shapes(query, key, value)
    # What the user's implementation would do without a mask.
    causal = getattr(owner, "is_causal", True) if causal is None else causal
    ordered = mask is None and implementation.startswith("sdpa") and bool(causal)
    if ordered and query.shape[-2] != key.shape[-2]:
        mask, ordered = triangle(query, key), False
    if isinstance(bias, Tensor):
        mask = bias if mask is None else _added(bias, mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sink = sinks[0].reshape(-1) if sinks and sinks[0].numel() == query.shape[1] else None
    if sinks and sink is None:
        obstacle = obstacle or "its sinks are not one number a head"
    if obstacle or not compute:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1]) if compute else None
        return CoreCall(query, key, value, scale, None, None, None, output, None, "interface", obstacle)
    output = plain_attention(query, key, value, mask, scale, cap, sink, causal=ordered)
    return CoreCall(query, key, value, scale, mask, cap, sink, output, None, "interface", "", ordered)


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
    """Softmax attention (batch, heads, m, value_dim) in the operands' own precision, nothing else.

    Written out here, apart from the library's attention maps, because the two are held against each other.
    Long sequences go through PyTorch's fused kernel, or are taken in blocks of heads and rows.
    """
    heads, m, n = query.shape[-3], query.shape[-2], key.shape[-2]
    groups = heads // key.shape[-3]
    key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    batch = query.shape[:-3].numel()
    together = max(1, min(heads, _ENTRIES // (batch * m * n)))
    length = max(1, min(m, _ENTRIES // (batch * together * n)))
    if together == heads and length == m:
        return _block(query, key, value, mask, scale, softcap, sinks, slice(m) if causal else None)
    plain = mask is None and softcap is None and sinks is None
    if plain and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which forms no matrix of n² numbers
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
    """Attention of some rows, ``causal_rows`` their places where the order of the tokens counts."""
    scores = capped_scores(query, key, scale, softcap)
    if causal_rows is not None:
        order = torch.arange(max(scores.shape[-1], causal_rows.stop), device=scores.device)
        scores = scores.masked_fill(order[: scores.shape[-1]] > order[causal_rows, None], float("-inf"))
    return softmax_values(scores, value, mask, sinks)
