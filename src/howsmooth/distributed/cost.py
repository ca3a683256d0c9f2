"""What one long sequence costs on several devices: operations, memory, bytes received, counted beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.distributed.footprint import bytes_per_head, fixed_bytes
from howsmooth.distributed.linearise import check_shareable
from howsmooth.distributed.shares import RowShares
from howsmooth.errors import ArgumentError

__all__ = ["Device", "StepCost", "step_cost"]


@dataclass(frozen=True)
class Device:
    """What is assumed of each device.

    Parameters
    ----------
    operations_per_second
        Floating-point operations that matrix products in the operator's dtype reach.
    memory
        Bytes that may be used.
    bytes_per_second
        What a device receives from the others.
    kind
        "cuda" or "cpu": decides on the size of tiles.

    """

    operations_per_second: float
    memory: float
    bytes_per_second: float
    kind: str = "cuda"


@dataclass(frozen=True)
class StepCost:
    """The cost of one step of Lanczos, one product with JᵀJ, to the process that has most of it.

    Attributes
    ----------
    operations
        Floating-point operations of matrix products.
    exponentials
        Entries of attention probabilities that are formed.
    received
        Bytes that come from other processes.
    memory
        Bytes at the peak, with the Krylov basis in half precision.
    heads_together
        Key heads gathered at a time; of fewer than all, probabilities are formed twice and keys sent anew.
    fits
        Whether the memory is that of the device, at most.
    seconds
        Time at the rates assumed of the device, nothing overlapping.

    """

    operations: int
    exponentials: int
    received: int
    memory: int
    heads_together: int
    fits: bool
    seconds: float


def step_cost(
    f: TokenMap,
    n: int,
    processes: int,
    device: Device,
    *,
    dtype: torch.dtype = torch.float32,
    vectors: int = 32,
) -> StepCost:
    """Return the cost of one step at ``n`` tokens shared among ``processes``, one device each.

    Parameters
    ----------
    f
        :class:`~howsmooth.attention.SelfAttention`, of which sizes, order and window count.
    n
        Tokens of the sequence.
    processes
        Number of processes.
    device
        What is assumed of each device.
    dtype
        Of the products.
    vectors
        Vectors of the Krylov basis: the steps that are expected.

    Raises
    ------
    ArgumentError
        If the map cannot be shared, or there are fewer than two tokens a process.

    References
    ----------
    docs/guide/many-machines.md, which derives the numbers.

    """
    if not isinstance(f, SelfAttention):
        raise ArgumentError("f", expected="SelfAttention", got=type(f).__name__)
    check_shareable(f)
    shares, where = RowShares(n, processes), torch.device(device.kind)
    own = shares.longest

    def stage(of: torch.dtype, heads: int, basis: int) -> int:
        return (
            fixed_bytes(f, own, n, of, where)
            + heads * bytes_per_head(f, n, of, where)
            + basis * own * f.d * 2
        )

    # The verdict is made in float64, with one head at a time if need be and no basis.
    verdict = stage(torch.float64, 1, 0)
    fitting = [
        heads
        for heads in range(1, f.kv_heads + 1)
        if max(stage(dtype, heads, vectors), verdict) <= device.memory
    ]
    heads = max(fitting, default=1)
    memory = max(stage(dtype, heads, vectors), verdict)
    whole = heads == f.kv_heads
    pairs = max(_visible_pairs(f, n, part) for part in map(shares.ranges, range(processes)))
    # qkᵀ, dq kᵀ, q dkᵀ, dSᵀq, dS k of size key_dim; dS v, P dv, dO vᵀ, PᵀdO of size value_dim. Where heads
    # come one after the other, J is done before Jᵀ begins, and qkᵀ is made twice.
    formed = 1 if whole else 2
    products = 2 * pairs * f.heads * ((4 + formed) * f.key_dim + 4 * f.value_dim)
    rows = f.heads * f.key_dim + f.kv_heads * (f.key_dim + f.value_dim)
    out = 0 if f.output is None else f.heads * f.value_dim * f.d_out
    operations = products + 4 * own * (f.d * rows + out)
    # Tangents are gathered, cotangents summed; keys and values, if not kept, once for J and once for Jᵀ.
    sent = 2 if whole else 4
    received = (processes - 1) * own * f.kv_heads * (f.key_dim + f.value_dim) * dtype.itemsize * sent
    return StepCost(
        operations=operations,
        exponentials=formed * pairs * f.heads,
        received=received,
        memory=memory,
        heads_together=heads,
        fits=bool(fitting),
        seconds=operations / device.operations_per_second + received / device.bytes_per_second,
    )


def _visible_pairs(f: SelfAttention, n: int, ranges: tuple[slice, ...]) -> int:
    """Count the pairs of a query in ``ranges`` and a key that it sees."""

    def sees(i: int) -> int:
        first = 0 if f.window is None else max(0, i - f.window + 1)
        last = i + 1 if f.causal else n if f.window is None else min(n, i + f.window)
        return last - first

    def total(low: int, high: int) -> int:
        return (high - low) * (sees(low) + sees(high - 1)) // 2

    # Between these rows the number of keys grows by a constant.
    bends = {0, n} if f.window is None else {0, min(f.window - 1, n), max(n - f.window, 0), n}
    count = 0
    for part in ranges:
        edges = sorted({part.start, part.stop, *(one for one in bends if part.start < one < part.stop)})
        count += sum(total(low, high) for low, high in pairwise(edges))
    return count
