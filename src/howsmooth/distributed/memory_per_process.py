"""Estimates of the memory that each process needs for its part of a long sequence.

A given budget is divided between keys gathered from other processes and the Krylov basis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from howsmooth.attention import Compose, Residual, SelfAttention, TokenMap
from howsmooth.distributed.communication import Collectives
from howsmooth.distributed.token_partition import RowShares
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import streamed_bytes
from howsmooth.jacobian.tiling import parts_for_threads, working_bytes

__all__ = ["GATHERED", "Room", "bytes_per_head", "check_budget", "fixed_bytes", "room"]

GATHERED = 7
"""Number of tensors as large as the keys and values of the gathered heads that are held at one time. They are
the keys and values, their tangents, the received buffer, the cotangents of two ranges and the sent buffer,
and in float32 the float64 keys of which scores are formed."""

# As in one process, the basis is kept in the operator's precision if it has room for this many vectors, which
# is more than most runs need. Otherwise it is kept in half precision.
_ENOUGH_VECTORS = 64
_FEWEST_VECTORS = 2


@dataclass(frozen=True)
class Room:
    """The division of a process's memory between keys gathered from other processes and the Krylov basis.

    All processes use the same division. It consists of the number of heads gathered at a time, the number of
    vectors in the Krylov basis, and the dtype of that basis.
    """

    heads_together: int
    vectors: int
    basis_dtype: torch.dtype

    def basis_bytes(self, own: int, d: int) -> int:
        """Return the bytes of the Krylov basis in a process that holds ``own`` tokens of dimension ``d``."""
        return self.vectors * own * d * self.basis_dtype.itemsize


def _attentions(f: TokenMap) -> Iterator[SelfAttention]:
    match f:
        case SelfAttention():
            yield f
        case Residual():
            yield from _attentions(f.inner)
        case Compose():
            yield from _attentions(f.outer)
            yield from _attentions(f.inner)


def bytes_per_head(f: TokenMap, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that a process needs to gather the keys and values of one head, in the attention layer
    of ``f`` that needs the most.
    """
    # With one head alone, each thread accumulates cotangents in a buffer of its own.
    tensors = GATHERED + parts_for_threads(1, device) - 1
    return max((tensors * n * (a.key_dim + a.value_dim) * dtype.itemsize for a in _attentions(f)), default=0)


def fixed_bytes(f: TokenMap, own: int, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that a process needs for its part of a sequence, apart from gathered keys and the
    Krylov basis.

    They hold the Jacobian at the process's rows, tiles of probabilities, and five vectors of the solver.
    """
    tiles = sum(
        working_bytes(a.heads, own, n, dtype.itemsize, device, capped=a.softcap is not None)
        for a in _attentions(f)
    )
    return streamed_bytes(f, own, dtype, device) + tiles + 5 * own * max(f.d, f.d_out) * dtype.itemsize


def check_budget(
    f: TokenMap,
    shares: RowShares,
    dtypes: Iterable[torch.dtype],
    device: torch.device,
    budget: int,
    collectives: Collectives,
) -> None:
    """Raise ArgumentError in every process if any process has too little memory for its part of the sequence.

    The least memory holds the gathered keys and values of one head, and two vectors of the Krylov basis.
    """
    own = shares.count(collectives.rank)
    least = max(
        fixed_bytes(f, own, shares.n, dtype, device)
        + bytes_per_head(f, shares.n, dtype, device)
        + _FEWEST_VECTORS * own * f.d * torch.float16.itemsize
        for dtype in dtypes
    )
    # All processes see all budgets, so that all of them raise the same error.
    said = collectives.all_gather_objects((budget, least))
    short = [rank for rank, (given, needed) in enumerate(said) if given < needed]
    if short:
        rank = max(short, key=lambda one: said[one][1])
        given, needed = said[rank]
        raise ArgumentError(
            "memory",
            expected=f"at least {needed} bytes ({needed / 2**30:.3g} GiB) in process {rank}, for {shares.n} "
            f"tokens among {shares.world} processes",
            got=f"{given} bytes",
            remedy="Use more processes, or free memory.",
        )


def room(
    f: TokenMap,
    shares: RowShares,
    dtype: torch.dtype,
    device: torch.device,
    budget: int,
    max_iterations: int,
    collectives: Collectives,
) -> Room:
    """Decide how the memory of each process is divided between gathered keys and the Krylov basis.

    Every process takes the smallest numbers that any process can afford, so that they run in step.

    The budget must have passed :func:`check_budget`.
    """
    own, n = shares.count(collectives.rank), shares.n
    per_head, vector = bytes_per_head(f, n, dtype, device), own * f.d
    kv_heads = max((a.kv_heads for a in _attentions(f)), default=1)
    left = budget - fixed_bytes(f, own, n, dtype, device)
    # Half of the remaining memory is for the basis, the other half for heads, and at least one head.
    heads = min(kv_heads, max(1, left // 2 // per_head)) if per_head else kv_heads
    basis = left - heads * per_head
    # The processes take the smallest of each number, so that they run in step.
    answers = collectives.all_gather_objects(
        (heads, basis // (vector * dtype.itemsize), basis // (vector * torch.float16.itemsize))
    )
    heads, whole, halves = (min(answer[i] for answer in answers) for i in range(3))
    limit = min(max_iterations, n * f.d)
    if whole >= min(_ENOUGH_VECTORS, limit):
        return Room(heads, min(whole, limit), dtype)
    return Room(heads, min(halves, limit), torch.float16)
