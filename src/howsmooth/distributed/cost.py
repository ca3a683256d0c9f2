"""Predicted cost of measuring one long sequence on several devices: operations, memory and communication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.distributed.memory_per_process import bytes_per_head, fixed_bytes
from howsmooth.distributed.shared_jacobian import check_shareable
from howsmooth.distributed.token_partition import RowShares
from howsmooth.errors import ArgumentError

__all__ = ["Device", "StepCost", "step_cost"]


@dataclass(frozen=True)
class Device:
    """The assumed speed, memory and network rate of each device, for predicting the cost of a measurement.

    Parameters
    ----------
    operations_per_second
        Floating-point operations per second of matrix products in the operator's dtype.
    memory
        Bytes of memory that may be used.
    bytes_per_second
        Bytes per second that a device receives from the others.
    kind
        "cuda" or "cpu", which determines the size of tiles.

    """

    operations_per_second: float
    memory: float
    bytes_per_second: float
    kind: str = "cuda"


@dataclass(frozen=True)
class StepCost:
    """The predicted cost of one Lanczos step of a measurement on several devices, for the process with the
    most work.

    A Lanczos step is one product with JᵀJ.

    Attributes
    ----------
    operations
        Floating-point operations of matrix products.
    exponentials
        Number of attention probabilities that are computed.
    received
        Bytes received from other processes.
    memory
        Largest number of bytes in use at one time, with the Krylov basis in half precision.
    heads_together
        Number of key heads that are gathered at a time. If it is less than the number of all key heads,
        probabilities are computed twice and keys are sent again in each product.
    fits
        Whether ``memory`` is at most the memory of the device.
    seconds
        Time at the device's assumed rates, if computation and communication do not overlap.

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
    """Predict the cost of one Lanczos step for a sequence of ``n`` tokens that are divided among
    ``processes`` processes, each with one device.

    Parameters
    ----------
    f
        A :class:`~howsmooth.attention.SelfAttention`. Its sizes, causality and window determine the cost.
    n
        Number of tokens of the sequence.
    processes
        Number of processes.
    device
        Assumed speed and memory of each device.
    dtype
        Dtype of the products.
    vectors
        Number of vectors in the Krylov basis, which is the expected number of steps.

    Raises
    ------
    ArgumentError
        If the rows of the map cannot be shared, or there are fewer than two tokens for each process.

    References
    ----------
    Documentation page "Many machines", which derives the numbers.

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

    # The final check of a result in float64 needs no basis, and can take one head at a time.
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
    # Products over pairs of tokens: qkᵀ, dq kᵀ, q dkᵀ, dSᵀq and dS k have inner size key_dim, and dS v, P dv,
    # dO vᵀ and PᵀdO have inner size value_dim. If heads are taken in turn, J is applied for all heads before
    # Jᵀ, so that qkᵀ is computed twice.
    formed = 1 if whole else 2
    products = 2 * pairs * f.heads * ((4 + formed) * f.key_dim + 4 * f.value_dim)
    rows = f.heads * f.key_dim + f.kv_heads * (f.key_dim + f.value_dim)
    out = 0 if f.output is None else f.heads * f.value_dim * f.d_out
    # The projections: forward and adjoint, two operations for each entry of a weight and token.
    operations = products + 4 * own * (f.d * rows + out)
    # Tangents are gathered and cotangents are summed. Keys and values that are not kept are gathered twice
    # more, once for J and once for Jᵀ.
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
    """Count the pairs (query, key) in which the query sees the key, for the query rows in ``ranges``."""

    def sees(i: int) -> int:
        first = 0 if f.window is None else max(0, i - f.window + 1)
        last = i + 1 if f.causal else n if f.window is None else min(n, i + f.window)
        return last - first

    def total(low: int, high: int) -> int:
        return (high - low) * (sees(low) + sees(high - 1)) // 2

    # Between two of these rows the number of visible keys is linear in the row, so its sum needs only the
    # first and the last row.
    # A window is cut off at the beginning and at the end of the sequence.
    bends = {0, n} if f.window is None else {0, min(f.window - 1, n), max(n - f.window, 0), n}
    count = 0
    for part in ranges:
        edges = sorted({part.start, part.stop, *(one for one in bends if part.start < one < part.stop)})
        count += sum(total(low, high) for low, high in pairwise(edges))
    return count
