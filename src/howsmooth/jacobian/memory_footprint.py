"""The memory in bytes of a closed-form Jacobian, with probabilities kept or recomputed tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from howsmooth.attention import Compose, Residual, SelfAttention, StagedAttention
from howsmooth.attention.compositions import layers
from howsmooth.attention.custom_code_attention import CoreShape
from howsmooth.jacobian.fused_softmax import PARTS_BYTES
from howsmooth.jacobian.tiling import parts_for_threads, working_bytes
from howsmooth.triton_launch import padded_width

__all__ = ["cached_bytes", "kernel_bytes", "streamed_bytes"]

_DOUBLE = 8
# Number of tensors of n × d entries that the graphs of a layer in stages and of its adjoint keep. It was
# measured; the tests hold it against real layers.
_IN_GRAPHS = 64


def cached_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype) -> int:
    """Return the largest number of bytes that n × n tensors take at one time, if attention probabilities are
    kept. It includes the autograd graphs of layers written as PyTorch code, and the float64 operator that
    checks a float32 one.
    """
    single = dtype.itemsize if dtype != torch.float64 else 0
    found = 0
    for layer in layers(f):
        if isinstance(layer, StagedAttention):
            found += _IN_GRAPHS * n * max(layer.d, layer.d_out) * (single + _DOUBLE)
        if isinstance(layer, SelfAttention | StagedAttention):
            for shape, capped in _softmaxes(layer, n):
                pairs = shape.lead * shape.heads * shape.m * shape.n
                copies = 2 if capped else 1  # P, and P∘D beside it under a cap
                found += pairs * (copies * single + (copies + 2) * _DOUBLE)
    return found


def _softmaxes(f: SelfAttention | StagedAttention, n: int) -> Iterator[tuple[CoreShape, bool]]:
    """Yield the sizes of each softmax of a layer at n tokens, and whether its scores have a cap."""
    if isinstance(f, SelfAttention):
        yield CoreShape(1, f.heads, f.kv_heads, n, n, f.key_dim, f.value_dim), f.softcap is not None
    else:
        capped = [core.softcap is not None for core in f.cores]
        yield from zip(f.core_shapes(), capped, strict=True)


def streamed_bytes(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many bytes the Jacobian at one sequence takes at most while it is formed or multiplied, if
    attention probabilities are not kept.
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
    """Return how many bytes Triton kernels take in addition for a Jacobian at one sequence: the operands of
    their matrix products, split into bfloat16 parts. It is 0 if no kernel runs.
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
    ((shape, capped),) = _softmaxes(f, n)
    queries, keys, rows, means = _entries(shape)
    size = dtype.itemsize
    # What the derivative keeps: q, k, v, the means, and the logarithms of the denominators.
    kept = (rows + means) * size + n * f.heads * _DOUBLE + _exact(queries + keys, dtype)
    # Tangents and cotangents, two rotated copies of queries, the image and the result.
    product = (2 * rows + 2 * queries + n * (f.d + f.d_out)) * size
    # If each thread has rows of its own, it has its own cotangents of all keys and values too.
    product += (parts_for_threads(f.kv_heads, device) - 1) * (rows - queries) * size
    # The table of columns and their averages: values and, for the proof in float64, keys and squares.
    columns = f.value_dim + (f.key_dim + 4 if dtype == torch.float64 else 1)
    averages = n * (f.heads + f.kv_heads) * columns
    linearising = (2 * n * f.d + 2 * rows + averages) * _DOUBLE + (rows + means) * size
    return max(kept + product, linearising) + working_bytes(f.heads, n, n, size, device, capped=capped)


def _streamed_stages_bytes(f: StagedAttention, n: int, dtype: torch.dtype, device: torch.device) -> int:
    size, tiles, linearising = dtype.itemsize, 0, 0
    # The graphs that PyTorch keeps of the layer and of its adjoint.
    total = _IN_GRAPHS * n * max(f.d, f.d_out) * size
    for shape, capped in _softmaxes(f, n):
        queries, keys, rows, means = _entries(shape)
        total += (2 * rows + 2 * means) * size + _exact(queries + keys, dtype)
        total += (parts_for_threads(shape.kv_heads, device) - 1) * (rows - queries) * size
        linearising = max(linearising, (3 * rows + 3 * means + queries) * _DOUBLE)
        tiles = max(tiles, working_bytes(shape.heads, shape.m, shape.n, size, device, capped=capped))
    return total + linearising + tiles


def _entries(shape: CoreShape) -> tuple[int, int, int, int]:
    """Return the numbers of entries of the queries, the keys, all projections, and the outputs."""
    heads, kv_heads = shape.lead * shape.heads * shape.m, shape.lead * shape.kv_heads * shape.n
    queries, keys = heads * shape.key_dim, kv_heads * shape.key_dim
    return queries, keys, queries + keys + kv_heads * shape.value_dim, heads * shape.value_dim


def _exact(entries: int, dtype: torch.dtype) -> int:
    """Return the bytes of the float64 queries and keys that products in a narrower dtype also keep."""
    return 0 if dtype == torch.float64 else entries * _DOUBLE
