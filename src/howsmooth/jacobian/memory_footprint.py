"""The memory in bytes of a closed-form Jacobian, with attention probabilities kept in memory or recomputed
tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from howsmooth.attention import Compose, Residual, SelfAttention, StagedAttention
from howsmooth.jacobian.closed_form import layers
from howsmooth.jacobian.fused_softmax import PARTS_BYTES
from howsmooth.jacobian.tiling import parts_for_threads, working_bytes
from howsmooth.triton_launch import padded_width

__all__ = ["cached_bytes", "kernel_bytes", "streamed_bytes"]

_DOUBLE = 8
# Number of tensors of n × d entries that the graphs of a layer in stages and of its adjoint keep. It was
# measured; the tests hold it against real layers.
_IN_GRAPHS = 64


def cached_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype) -> int:
    """Return the largest number of bytes that n × n tensors take at one time: probabilities, and temporary
    tensors of a product. For layers written as PyTorch code, autograd graphs are counted too.

    If ``dtype`` is float32, the tensors are counted in float32 and in float64, because the result of a
    float32 computation is computed again in float64 while the float32 operator is in memory.
    """
    single = dtype.itemsize if dtype != torch.float64 else 0

    def of_pairs(pairs: int, softcap: float | None) -> int:
        copies = 1 if softcap is None else 2  # P, and P∘D beside it under a cap
        return pairs * (copies * single + (copies + 2) * _DOUBLE)

    found = 0
    for layer in layers(f):
        if isinstance(layer, SelfAttention):
            found += of_pairs(layer.heads * n * n, layer.softcap)
        elif isinstance(layer, StagedAttention):
            found += _IN_GRAPHS * n * max(layer.d, layer.d_out) * (single + _DOUBLE)
            for shape, core in zip(layer.core_shapes(), layer.cores, strict=True):
                found += of_pairs(shape.lead * shape.heads * shape.m * shape.n, core.softcap)
    return found


def streamed_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a Jacobian at one sequence if probabilities are not kept: the peak of linearising
    the map and of one product.
    """
    match f:
        case Residual():
            return streamed_bytes(f.inner, n, dtype, device) + n * f.d * dtype.itemsize
        case Compose():
            # Both operators are in memory, and one of them works at a time. The sum is an upper limit.
            return streamed_bytes(f.outer, n, dtype, device) + streamed_bytes(f.inner, n, dtype, device)
        case SelfAttention():
            return _streamed_attention_bytes(f, n, dtype, device)
        case StagedAttention():
            return _streamed_stages_bytes(f, n, dtype, device)
        case _:
            return 0


def kernel_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the additional bytes of Triton kernels for a Jacobian at one sequence, or 0 if no kernel runs:
    the operands of their matrix products, split into bfloat16 parts.
    """
    if device.type != "cuda" or dtype != torch.float32:
        return 0
    # Queries, their tangents and the heads' cotangents; keys, values and the tangents of both.
    return sum(
        n * (3 * f.heads + 4 * f.kv_heads) * padded_width(f.key_dim, f.value_dim) * PARTS_BYTES
        for f in layers(f)
        if isinstance(f, SelfAttention)
    )


def _streamed_attention_bytes(f: SelfAttention, n: int, dtype: torch.dtype, device: torch.device) -> int:
    size = dtype.itemsize
    queries, keys = n * f.heads * f.key_dim, n * f.kv_heads * f.key_dim
    rows = queries + keys + n * f.kv_heads * f.value_dim
    means = n * f.heads * f.value_dim
    # What the derivative keeps: q, k, v, the means, and the logarithms of the denominators.
    kept = (rows + means) * size + n * f.heads * _DOUBLE
    if dtype != torch.float64:  # float64 queries and keys, if scores are formed in float64
        kept += (queries + keys) * _DOUBLE
    # Tangents and cotangents, two rotated copies of queries, the image and the result.
    product = (2 * rows + 2 * queries + n * (f.d + f.d_out)) * size
    # If each thread has rows of its own, it has its own cotangents of all keys and values too.
    product += (parts_for_threads(f.kv_heads, device) - 1) * (rows - queries) * size
    # The table of columns and their averages: values and, for the proof in float64, keys and squares.
    columns = f.value_dim + (f.key_dim + 4 if dtype == torch.float64 else 1)
    averages = n * (f.heads + f.kv_heads) * columns
    linearising = (2 * n * f.d + 2 * rows + averages) * _DOUBLE + (rows + means) * size
    tiles = working_bytes(f.heads, n, n, size, device, capped=f.softcap is not None)
    return max(kept + product, linearising) + tiles


def _streamed_stages_bytes(f: StagedAttention, n: int, dtype: torch.dtype, device: torch.device) -> int:
    size, tiles = dtype.itemsize, 0
    # The graphs that PyTorch keeps of the layer and of its adjoint.
    kept = _IN_GRAPHS * n * max(f.d, f.d_out) * size
    linearising = 0
    for shape, core in zip(f.core_shapes(), f.cores, strict=True):
        queries = shape.lead * shape.heads * shape.m * shape.key_dim
        keys = shape.lead * shape.kv_heads * shape.n * shape.key_dim
        rows = queries + keys + shape.lead * shape.kv_heads * shape.n * shape.value_dim
        means = shape.lead * shape.heads * shape.m * shape.value_dim
        kept += (2 * rows + 2 * means) * size
        if dtype != torch.float64:  # float64 queries and keys, if scores are formed in float64
            kept += (queries + keys) * _DOUBLE
        kept += (parts_for_threads(shape.kv_heads, device) - 1) * (rows - queries) * size
        linearising = max(linearising, (3 * rows + 3 * means + queries) * _DOUBLE)
        capped = core.softcap is not None
        tiles = max(tiles, working_bytes(shape.heads, shape.m, shape.n, size, device, capped=capped))
    return kept + linearising + tiles
