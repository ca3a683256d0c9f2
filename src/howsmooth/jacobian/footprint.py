"""How many bytes a closed-form Jacobian takes, with its probabilities in memory or formed tile by tile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from howsmooth.attention import Compose, Residual, SelfAttention, StagedAttention
from howsmooth.jacobian.fused import PARTS_BYTES, filled_width
from howsmooth.jacobian.tiling import batches_apart, working_bytes

__all__ = ["cached_bytes", "kernel_bytes", "streamed_bytes"]

_DOUBLE = 8
# Tensors of n × d numbers that are kept of the code around softmaxes and of its adjoint: measured, see tests.
_IN_GRAPHS = 64


def cached_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype) -> int:
    """Bytes for the probabilities of one member with n tokens, and for what a product makes of their size.

    Those in ``dtype`` and, for the verdict on float32, those in float64 beside them.
    """
    match f:
        case Residual():
            return cached_bytes(f.inner, n, dtype)
        case Compose():
            return cached_bytes(f.outer, n, dtype) + cached_bytes(f.inner, n, dtype)
        case SelfAttention():
            copies = 1 if f.softcap is None else 2
            single = copies * dtype.itemsize if dtype != torch.float64 else 0
            return f.heads * n * n * (single + (copies + 2) * _DOUBLE)
        case StagedAttention():
            single = dtype.itemsize if dtype != torch.float64 else 0
            return _IN_GRAPHS * n * max(f.d, f.d_out) * (single + _DOUBLE) + sum(
                shape.lead * shape.heads * shape.m * shape.n * (copies * single + (copies + 2) * _DOUBLE)
                for shape, core in zip(f.core_shapes(), f.cores, strict=True)
                for copies in (1 if core.softcap is None else 2,)
            )
        case _:
            return 0


def streamed_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes for one member with n tokens without probabilities: to linearise, or to make a product."""
    match f:
        case Residual():
            return streamed_bytes(f.inner, n, dtype, device) + n * f.d * dtype.itemsize
        case Compose():
            # Both are kept, and one works at a time: as an upper limit, both.
            return streamed_bytes(f.outer, n, dtype, device) + streamed_bytes(f.inner, n, dtype, device)
        case SelfAttention():
            return _streamed_attention_bytes(f, n, dtype, device)
        case StagedAttention():
            return _streamed_stages_bytes(f, n, dtype, device)
        case _:
            return 0


def kernel_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes beside :func:`streamed_bytes` where a device has kernels: all they multiply, in parts."""
    match f:
        case Residual():
            return kernel_bytes(f.inner, n, dtype, device)
        case Compose():
            return kernel_bytes(f.outer, n, dtype, device) + kernel_bytes(f.inner, n, dtype, device)
        case SelfAttention() if device.type == "cuda" and dtype == torch.float32:
            # Queries, keys, values, the tangents of each, and the cotangents of the heads.
            rows = n * (3 * f.heads + 4 * f.kv_heads)
            return rows * filled_width(f.key_dim, f.value_dim) * PARTS_BYTES
        case _:
            return 0


def _streamed_attention_bytes(f: SelfAttention, n: int, dtype: torch.dtype, device: torch.device) -> int:
    size = dtype.itemsize
    queries, keys = n * f.heads * f.key_dim, n * f.kv_heads * f.key_dim
    rows = queries + keys + n * f.kv_heads * f.value_dim
    means = n * f.heads * f.value_dim
    kept = (rows + means) * size + n * f.heads * _DOUBLE
    if dtype != torch.float64:  # scores in float64
        kept += (queries + keys) * _DOUBLE
    # Tangents and cotangents, two turned copies of one of them, the image and what comes back.
    product = (2 * rows + 2 * queries + n * (f.d + f.d_out)) * size
    # Cotangents of keys and values that each thread has of its own.
    product += (batches_apart(f.kv_heads, device) - 1) * (rows - queries) * size
    # Values, for what is proved in float64 keys and squares, and the averages of these.
    columns = f.value_dim + (f.key_dim + 4 if dtype == torch.float64 else 1)
    averages = n * (f.heads + f.kv_heads) * columns
    linearising = (2 * n * f.d + 2 * rows + averages) * _DOUBLE + (rows + means) * size
    tiles = working_bytes(f.heads, n, n, size, device, capped=f.softcap is not None)
    return max(kept + product, linearising) + tiles


def _streamed_stages_bytes(f: StagedAttention, n: int, dtype: torch.dtype, device: torch.device) -> int:
    size, tiles = dtype.itemsize, 0
    # What PyTorch keeps of the layer in the graphs of the layer and of its adjoint.
    kept = _IN_GRAPHS * n * max(f.d, f.d_out) * size
    linearising = 0
    for shape, core in zip(f.core_shapes(), f.cores, strict=True):
        queries = shape.lead * shape.heads * shape.m * shape.key_dim
        keys = shape.lead * shape.kv_heads * shape.n * shape.key_dim
        rows = queries + keys + shape.lead * shape.kv_heads * shape.n * shape.value_dim
        means = shape.lead * shape.heads * shape.m * shape.value_dim
        kept += (2 * rows + 2 * means) * size
        if dtype != torch.float64:  # scores in float64
            kept += (queries + keys) * _DOUBLE
        kept += (batches_apart(shape.kv_heads, device) - 1) * (rows - queries) * size
        linearising = max(linearising, (3 * rows + 3 * means + queries) * _DOUBLE)
        capped = core.softcap is not None
        tiles = max(tiles, working_bytes(shape.heads, shape.m, shape.n, size, device, capped=capped))
    return kept + linearising + tiles
